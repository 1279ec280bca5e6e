"""Every logits processor of plain generate gives the same greedy text with a drafter."""

import pytest
import torch
from generation_helpers import assert_same_ids, assisted, drafter_for, plain, prompt, propose, small_target
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from dflash_hf.generation.processors import Processors

NEW = 24


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


@pytest.fixture
def drafter(target):
    """A random drafter for the tiny Llama."""
    return drafter_for(target)


def options_of(name: str, text: list[int]) -> dict:
    """Settings that change this target's text, made from what it says without them."""
    return {
        "repetition_penalty": {"repetition_penalty": 1.8},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "bad_words_ids": {"bad_words_ids": [[text[2]], [text[0], text[1]]]},
        "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": text[1]},
        "min_length": {"min_length": 15, "eos_token_id": text[1]},
        "suppress_tokens": {"suppress_tokens": [text[1], text[4]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [text[0]]},
        "sequence_bias": {"sequence_bias": [[[text[3]], -30.0], [[text[0], text[1]], -30.0]]},
        "forced_eos_token_id": {"forced_eos_token_id": 50},
        "forced_bos_token_id": {"forced_bos_token_id": 51},
        "exponential_decay": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 60},
        "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.3},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "remove_invalid_values": {"remove_invalid_values": True},
        "prefix_allowed_tokens_fn": {
            "prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * step + len(ids)) % 97 for step in (3, 5, 7)]
        },
        "guidance_scale": {"guidance_scale": 1.5},
        "guidance_with_negative_prompt": {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[9, 8, 7]])},
        "several": {
            "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [text[5]],
            "min_new_tokens": 5, "eos_token_id": text[1],
        },
    }[name]  # fmt: skip


NAMES = [
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens", "min_length", "suppress_tokens",
    "begin_suppress_tokens", "sequence_bias", "forced_eos_token_id", "forced_bos_token_id", "exponential_decay",
    "renormalize_logits", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "remove_invalid_values",
    "prefix_allowed_tokens_fn", "guidance_scale", "guidance_with_negative_prompt", "several",
]  # fmt: skip
# These leave this text as it is; they may still not disturb it.
SILENT = {"remove_invalid_values", "encoder_no_repeat_ngram_size"}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_processor(name, seed, monkeypatch):
    """Each row of a block is processed with its own accepted prefix, whether the proposals are wrong or right."""
    target = small_target(seed=seed)
    drafter = drafter_for(target)
    ids = prompt(1 if name == "forced_bos_token_id" else 7)
    base = plain(target, ids, max_new_tokens=NEW)
    options = {"max_new_tokens": NEW, **options_of(name, base[0, ids.shape[1] :].tolist())}
    expected = assert_same_ids(target, drafter, ids, **options)
    if name not in SILENT:
        assert expected.tolist() != base.tolist(), "the option changes nothing, so the test could not fail"
    propose(monkeypatch, expected, wrong=lambda position: position % 7 == 5)
    assert_same_ids(target, drafter, ids, **options)
    produced = drafter.last_generation_stats.acceptance_lengths
    assert max(produced, default=2) > 1


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"guidance_scale": 1.4}])
def test_processor_with_the_trained_pair(options, trained_pair):
    """The same where the drafter follows the target by itself."""
    target, drafter = trained_pair
    assert_same_ids(target, drafter, prompt(8, vocab=120), max_new_tokens=40, eos_token_id=None, **options)


class Counting(LogitsProcessor):
    """Keeps state: the lengths that it was called with decide what it does."""

    def __init__(self):
        self.lengths, self.prefixes = [], []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        self.prefixes.append(input_ids[0].tolist())
        return scores.roll(len(self.lengths) % 3, dims=-1)


@pytest.mark.parametrize("right", [False, True])
def test_stateful_processor(right, target, drafter, monkeypatch):
    """One call a new token, in order, on accepted prefixes only (it would go astray on a rejected one)."""
    ids = prompt(5)
    reference = Counting()
    expected = plain(target, ids, max_new_tokens=20, logits_processor=LogitsProcessorList([reference]))
    if right:
        propose(monkeypatch, expected)
    counting = Counting()
    output = assisted(target, drafter, ids, max_new_tokens=20, logits_processor=LogitsProcessorList([counting]))
    assert output.tolist() == expected.tolist()
    assert counting.lengths == list(range(5, 25)) == reference.lengths
    assert counting.prefixes == reference.prefixes


def test_stateful_processor_when_sampling(target, drafter):
    """Sampling calls it once a token too, each time with the text so far."""
    counting = Counting()
    torch.manual_seed(0)
    output = target.generate(
        prompt(5),
        assistant_model=drafter,
        do_sample=True,
        max_new_tokens=20,
        logits_processor=LogitsProcessorList([counting]),
    )
    assert counting.lengths == list(range(5, 25))
    assert counting.prefixes == [output[0, :length].tolist() for length in range(5, 25)]


def test_stateful_processor_stops_with_the_text(target, drafter, monkeypatch):
    """After a stop token in the middle of an accepted block there is no further call."""
    ids = prompt(5)
    text = plain(target, ids, max_new_tokens=20)
    propose(monkeypatch, text, wrong=lambda position: False)
    stop = text[0, 9].item()
    length = text[0, 5:].tolist().index(stop) + 1

    class Watching(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores

    watching = Watching()
    output = assisted(
        target, drafter, ids, max_new_tokens=20, eos_token_id=stop, logits_processor=LogitsProcessorList([watching])
    )
    assert output.shape[1] == 5 + length
    assert watching.calls == length


def test_processor_that_writes_into_its_scores(target, drafter):
    """A processor may change its argument in place: raw logits and the next rows stay what they were."""

    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, input_ids[0, -1]] = -float("inf")
            return scores

    options = dict(
        max_new_tokens=16,
        logits_processor=LogitsProcessorList([InPlace()]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = prompt(5)
    expected, output = plain(target, ids, **options), assisted(target, drafter, ids, **options)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(output.scores, expected.scores):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("right", [False, True])
def test_subclass_of_a_known_processor_counts_as_stateful(right, target, drafter, monkeypatch):
    """A subclass may keep state, so it is called in order like any unknown processor."""

    class Cooling(logits_process.SuppressTokensLogitsProcessor):
        def __call__(self, input_ids, scores):
            self.suppress_tokens = (self.suppress_tokens + 11) % 97
            return super().__call__(input_ids, scores)

    def processors():
        return LogitsProcessorList([Cooling(list(range(0, 60, 2)))])

    ids = prompt(5)
    expected = plain(target, ids, max_new_tokens=20, logits_processor=processors())
    if right:
        propose(monkeypatch, expected)
    output = assisted(target, drafter, ids, max_new_tokens=20, logits_processor=processors())
    assert output.tolist() == expected.tolist()
    assert not Processors(processors()).rowwise


def test_rowwise_processors_run_once_a_round(target, drafter, monkeypatch):
    """An empty or row-wise list takes all rows of a block at once: no Python loop over the slots."""
    rows = []
    real = logits_process.TemperatureLogitsWarper.__call__

    def warp(self, input_ids, scores):
        rows.append(scores.shape[0])
        return real(self, input_ids, scores)

    monkeypatch.setattr(logits_process.TemperatureLogitsWarper, "__call__", warp)
    torch.manual_seed(0)
    target.generate(prompt(5), assistant_model=drafter, do_sample=True, temperature=0.7, top_k=0, max_new_tokens=30)
    stats = drafter.last_generation_stats
    expected = [1]  # the prefill's row; then the draft rows and the target rows of each round
    for proposed in stats.proposed:
        expected += [proposed, proposed + 1] if proposed else [1]
    assert rows == expected


def test_every_processor_of_transformers_is_sorted():
    """The lists of names hold classes of this transformers version, so that a rename does not go unseen."""
    from dflash_hf.generation import processors as sorted_processors

    known = sorted_processors._ROWWISE + sorted_processors._PREFIX + sorted_processors._BATCH_PREFIX
    assert [name for name in known if not hasattr(logits_process, name)] == []
    assert len(known) == len(set(known))
