"""How often the target runs: as often as the acceptances ask for, and no more."""

import pytest
import torch
from fuzz_targets import build_target
from generation_helpers import CACHE_NAME, cache_of, drafter_for, prompt, slow, small_target
from knowing_drafter import knowing_drafter, padded_batch, recorded
from target_families import family_target

NEW = 24


def ideal_rounds(right: list[bool], proposals: int, new: int = NEW) -> int:
    """Verifications of one row, given which of its tokens the drafter knows; token 0 comes from the prefill."""
    done, rounds = 1, 0
    while done < new:
        budget = min(proposals, new - done - 1)
        accepted = 0
        while accepted < budget and right[done + accepted]:
            accepted += 1
        done += accepted + 1
        rounds += 1
    return rounds


class Forwards:
    """Counts the target's forward passes and keeps their widths."""

    def __init__(self, target):
        self.target, self.widths = target, []

    def __enter__(self):
        self.handle = self.target.get_decoder().register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def _count(self, module, args, kwargs):
        given = [*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        self.widths.append(next(each for each in given if each is not None).shape[1])

    def __exit__(self, *exc_info):
        self.handle.remove()


def generate_knowing(target, inputs: dict, *, right: float, seed: int, **more):
    """Statistics of a greedy call of `NEW` tokens, the widths of all target forwards, and which proposals are right."""
    drafter = knowing_drafter(target, target_layer_ids=[0, 2], layers=1, **more)
    options = {**inputs, "do_sample": False, "max_new_tokens": NEW}
    text, features = recorded(target, [0, 2], lambda: target.generate(**options))
    drafter.know(target, features, text, right=right, seed=seed)
    with Forwards(target) as forwards:
        output = target.generate(**options, assistant_model=drafter)
    assert output.tolist() == text.tolist()
    assert drafter.guesses == 0
    return drafter.last_generation_stats, forwards.widths, drafter.right[:, -NEW:]


@pytest.mark.parametrize("lengths", [[7], [6, 6, 6], [7, 3], [9, 4, 1, 6]])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", *slow("gemma2", "gpt2")],
)
def test_rounds(family, right, lengths):
    """One forward for the prompt, then as many as the row that needs most; one row alone needs no other number."""
    target = family_target(family)
    for seed, block_size in enumerate((2, 5, 8)):
        inputs = padded_batch(lengths, seed=seed)
        stats, widths, knows = generate_knowing(target, inputs, right=right, seed=seed, block_size=block_size)
        ideal = max(ideal_rounds(row, block_size - 1) for row in knows.tolist())
        assert stats.rounds == ideal
        assert len(widths) == 1 + ideal
        assert widths[0] == max(lengths) and max(widths[1:]) <= block_size


@pytest.mark.parametrize("lengths", [[7], [9, 4, 6]])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text",
        "mamba2",
        *slow("falcon_h1"),
        *slow("bamba"),
    ],
)
def test_rounds_with_a_recurrent_state(name, right, lengths):
    """Rows keep as many tokens as all of them accept; replays are counted, and there is none without a rejection."""
    target = build_target(name)
    inputs = padded_batch(lengths)
    target.generate(**inputs, max_new_tokens=8, assistant_model=drafter_for(target))  # a target is checked once
    stats, widths, knows = generate_knowing(target, inputs, right=right, seed=1, block_size=6)
    ideal = ideal_rounds(knows.all(dim=0).tolist(), 5)
    assert stats.rounds == ideal
    assert len(widths) == 1 + ideal + stats.replays
    assert stats.replays <= ideal
    if right == 1.0:
        assert stats.replays == 0


def test_rows_that_ended_leave_the_computation():
    """A finished row is not run any more, and costs no further rounds."""
    target = small_target()
    inputs = padded_batch([6, 6, 6], seed=2)
    options = {"do_sample": False, "max_new_tokens": NEW}
    text = target.generate(**inputs, **options)[:, 6:].tolist()
    stop = next(token for token in text[0][:4] if token not in text[1] + text[2])
    rows = []
    handle = target.get_decoder().register_forward_hook(lambda *args: rows.append(args[2].last_hidden_state.shape[0]))
    output = target.generate(**inputs, **options, eos_token_id=stop, assistant_model=drafter_for(target))
    handle.remove()
    assert output.tolist() == target.generate(**inputs, **options, eos_token_id=stop).tolist()
    assert rows[0] == 3 and rows[-1] == 2


@pytest.mark.parametrize("lengths", [[6], [7, 3, 5]])
def test_ten_turns_on_one_cache(lengths):
    """A conversation: each turn runs the target on its new tokens only, and says what one long prompt gives."""
    target = small_target(max_position_embeddings=1024)
    drafter = drafter_for(target)
    inputs = padded_batch(lengths)
    cache = {}
    for turn in range(10):
        expected = target.generate(**inputs, do_sample=False, max_new_tokens=7)
        with Forwards(target) as forwards:
            output = target.generate(
                **inputs, **cache, do_sample=False, max_new_tokens=7, assistant_model=drafter,
                return_dict_in_generate=True,
            )  # fmt: skip
        assert output.sequences.tolist() == expected.tolist()
        assert forwards.widths[0] == (max(lengths) if turn == 0 else 1 + 4)  # the newest token had not been run
        more = torch.randint(4, 90, (len(lengths), 4), generator=torch.Generator().manual_seed(turn))
        inputs = {
            "input_ids": torch.cat([output.sequences, more], dim=1),
            "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 11), value=1),
        }
        cache = {CACHE_NAME: cache_of(output)}


def test_prompt_is_run_in_chunks():
    """No forward pass is wider than asked for."""
    target = small_target()
    drafter = drafter_for(target)
    with Forwards(target) as forwards:
        target.generate(prompt(23), do_sample=False, max_new_tokens=5, prefill_chunk_size=8, assistant_model=drafter)
    assert forwards.widths[:3] == [8, 8, 7]
