"""Run by test_a19: a drafter and a target on different devices, one of which only pretends to be one."""

import copy
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent))

from fuzz_targets import build_target  # noqa: E402
from generation_helpers import drafter_for  # noqa: E402
from knowing_drafter import padded_batch  # noqa: E402
from pretend_device import AWAY, pretend_device, send_away  # noqa: E402

OPTIONS = [
    {},
    {"repetition_penalty": 1.3},
    {"logits_processor": [lambda ids, scores: scores.roll(1, dims=-1)]},
    {"eos_token_id": 17},
    {"prefill_chunk_size": 3},
    {"cache_implementation": "static"},
    {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
    {"do_sample": True, "top_k": 1},
]


def check(name: str) -> None:
    """Every combination says what plain generate says on the CPU."""
    target = build_target(name)
    drafter = drafter_for(target)
    away_target, away_drafter = (send_away(copy.deepcopy(model)) for model in (target, drafter))
    pairs = [(away_target, drafter, AWAY), (target, away_drafter, "cpu"), (away_target, away_drafter, AWAY)]
    for lengths in ([6], [7, 3, 5]):
        inputs = padded_batch(lengths)
        for options in OPTIONS if len(lengths) > 1 else OPTIONS[:3]:
            options = {"do_sample": False, "max_new_tokens": 12, **options}
            expected = target.generate(**inputs, **options)
            expected = getattr(expected, "sequences", expected).tolist()
            for one, other, device in pairs:
                moved = {key: value.to(device) for key, value in inputs.items()}
                output = one.generate(**moved, **options, assistant_model=other)
                output = getattr(output, "sequences", output)
                assert output.device == torch.device(device)
                assert output.tolist() == expected, (name, lengths, options, device)


if __name__ == "__main__":
    with torch.no_grad(), pretend_device():
        try:
            torch.ones(2, device=AWAY) + torch.ones(2)
        except RuntimeError:
            check(sys.argv[1])
            print("equal")
