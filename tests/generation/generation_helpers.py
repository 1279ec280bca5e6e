"""What the generation tests share: plain generate as the oracle, and a drafter that knows the continuation."""

from dataclasses import fields

import pytest
import torch
import transformers
from conftest import in_whole_blocks, tiny_drafter, tiny_target
from packaging.version import Version
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import logits_process as hf

from dflash_hf import DFlashCandidateGenerator, DFlashDraftModel

# transformers 5.24 renamed the cache that generate takes and returns. The tests say `cache`.
CACHE_NAME = "cache" if "cache" in {item.name for item in fields(GenerateDecoderOnlyOutput)} else "past_key_values"

needs_static_rollback = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="transformers before 5.24 cannot crop a StaticCache",
)


def cache_of(output):
    """The target's cache in the output of generate."""
    return getattr(output, CACHE_NAME)


def _named_for_this_version(options: dict) -> dict:
    return {CACHE_NAME if name == "cache" else name: value for name, value in options.items()}


def small_target(family: str = "llama", **more):
    """A random target of four layers."""
    return tiny_target(family, **{"layers": 4, **more})


def drafter_for(target, **more) -> DFlashDraftModel:
    """A random drafter that taps the first and the third layer."""
    return in_whole_blocks(tiny_drafter(target, **{"target_layer_ids": [0, 2], **more}))


def prompt(length: int = 6, *, vocab: int = 97, seed: int = 0) -> torch.LongTensor:
    """Random ids `[1, length]`, the special ones (0 to 3) left out."""
    return torch.randint(4, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


def plain(target, ids, **options):
    """Plain greedy generate."""
    return target.generate(ids, **{"do_sample": False, **_named_for_this_version(options)})


def assisted(target, drafter, ids, **options):
    """The same call with the drafter."""
    return target.generate(ids, assistant_model=drafter, **{"do_sample": False, **_named_for_this_version(options)})


def assert_same_ids(target, drafter, ids, **options):
    """Greedy output of both, equal token for token; returns it."""
    expected = plain(target, ids, **options)
    assert assisted(target, drafter, ids, **options).tolist() == expected.tolist()
    return expected


def propose(monkeypatch, text: torch.LongTensor, *, wrong=lambda position: position % 5 == 3, offset: int = 0):
    """Let the drafter propose `text [1, n]`, except at the positions where `wrong` says so.

    The real drafter still runs, so that its cache and features are kept as always. `offset` is the number of positions
    before the first context row.
    """
    real = DFlashCandidateGenerator.draft_logits
    known = text[0].tolist()

    def draft_logits(self, anchor, num_tokens):
        position = offset + self.context.cache.get_seq_length() + self.context.pending.features.shape[1]
        logits = real(self, anchor, num_tokens).clone()
        for row, at in enumerate(range(position + 1, position + 1 + num_tokens)):
            if at < len(known):
                token = (known[at] + 1) % logits.shape[-1] if wrong(at) else known[at]
                logits[0, row, token] = logits[0, row].max() + 20.0
        return logits

    monkeypatch.setattr(DFlashCandidateGenerator, "draft_logits", draft_logits)


# What `generate` is asked for, and the processors that it makes of it, for tests of sampled distributions.
SAMPLING_SETTINGS = {
    "temperature": ({"temperature": 1.4}, [lambda: hf.TemperatureLogitsWarper(1.4)]),
    "top_k": (
        {"temperature": 1.3, "top_k": 5},
        [lambda: hf.TemperatureLogitsWarper(1.3), lambda: hf.TopKLogitsWarper(5)],
    ),
    "top_p": (
        {"temperature": 1.2, "top_p": 0.85},
        [lambda: hf.TemperatureLogitsWarper(1.2), lambda: hf.TopPLogitsWarper(0.85)],
    ),
    "repetition_penalty": (
        {"temperature": 1.2, "repetition_penalty": 1.7},
        [lambda: hf.RepetitionPenaltyLogitsProcessor(1.7), lambda: hf.TemperatureLogitsWarper(1.2)],
    ),
}  # fmt: skip


def slow(*values):
    """Parameters of a test that only `pytest -m slow` runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


class PutRecorder:
    """A streamer that keeps what it was given."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


def hook_count(target) -> int:
    """Forward hooks on all modules of a model."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())
