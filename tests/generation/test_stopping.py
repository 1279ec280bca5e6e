"""Generation ends at the exact token, also inside an accepted block, and nothing after it shows."""

import pytest
import torch
from generation_helpers import PutRecorder, assert_same_ids, assisted, drafter_for, plain, prompt, propose, small_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

LENGTH = 5


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


@pytest.fixture
def drafter(target):
    """A random drafter for the tiny Llama."""
    return drafter_for(target)


@pytest.fixture
def text(target, monkeypatch):
    """The plain continuation; the drafter proposes it without an error, so that every block is accepted whole."""
    text = plain(target, prompt(LENGTH), max_new_tokens=26)
    propose(monkeypatch, text, wrong=lambda position: False)
    assert len(set(text[0, LENGTH:].tolist())) > 10
    return text


@pytest.fixture
def tokenizer():
    """One word a token."""
    vocabulary = {f"w{index}": index for index in range(97) if index != 1}
    vocabulary["abcdef"] = 1  # the word by which StopStringCriteria finds out how tokens become text
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="w2")


def first_index(text, token: int) -> int:
    return text[0, LENGTH:].tolist().index(token)


@pytest.mark.parametrize("place", range(1, 20))
def test_eos_at_every_place_of_a_block(place, target, drafter, text):
    """The stop token is the last one, whether it is a proposal, the bonus token or the prefill's token."""
    token = text[0, LENGTH + place].item()
    streamer = PutRecorder()
    output = assisted(
        target,
        drafter,
        prompt(LENGTH),
        max_new_tokens=26,
        eos_token_id=token,
        streamer=streamer,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    new = first_index(text, token) + 1
    assert output.sequences.tolist() == text[:, : LENGTH + new].tolist()
    assert len(output.scores) == len(output.logits) == new
    assert streamer.puts == [prompt(LENGTH).tolist(), *[[token] for token in text[0, LENGTH : LENGTH + new].tolist()]]
    stats = drafter.last_generation_stats
    assert stats.new_tokens == new == sum(stats.produced) + 1


def test_several_eos_tokens(target, drafter, text):
    """Whichever comes first ends the text."""
    tokens = [text[0, LENGTH + place].item() for place in (16, 4, 11)]
    expected = assert_same_ids(target, drafter, prompt(LENGTH), max_new_tokens=26, eos_token_id=tokens)
    assert expected.shape[1] == LENGTH + 1 + min(first_index(text, token) for token in tokens)


def test_eos_of_the_targets_generation_config(target, drafter, text):
    """Also when the call does not name it."""
    target.generation_config.eos_token_id = text[0, LENGTH + 10].item()
    expected = assert_same_ids(target, drafter, prompt(LENGTH), max_new_tokens=26)
    assert expected.shape[1] < LENGTH + 26


def test_wrong_drafter_never_overruns_eos(target, drafter):
    """The same with a drafter that is nearly always wrong."""
    for seed in range(5):
        ids = prompt(LENGTH, seed=seed)
        text = plain(target, ids, max_new_tokens=26)
        assert_same_ids(target, drafter, ids, max_new_tokens=26, eos_token_id=text[0, LENGTH + 9].item())


def test_proposed_eos_that_is_rejected_does_not_stop(target, drafter, monkeypatch):
    """A stop token counts only when the target says it."""
    ids = prompt(LENGTH)
    text = plain(target, ids, max_new_tokens=20)
    eos = next(token for token in range(4, 97) if token not in text[0].tolist())
    wrong = text.clone()
    wrong[0, LENGTH + 3 :: 3] = eos
    propose(monkeypatch, wrong, wrong=lambda position: False)
    assert assisted(target, drafter, ids, max_new_tokens=20, eos_token_id=eos).tolist() == text.tolist()


@pytest.mark.parametrize("max_length", [6, 7, 12, 13, 14, 21])
def test_max_length(max_length, target, drafter, text):
    """max_length counts the prompt."""
    expected = assert_same_ids(target, drafter, prompt(LENGTH), max_length=max_length)
    assert expected.shape[1] == max_length


@pytest.mark.parametrize("place", range(2, 14))
def test_stop_string_at_every_place_of_a_block(place, target, drafter, text, tokenizer):
    """A string that completes inside an accepted block ends the text there."""
    words = tokenizer.decode(text[0, LENGTH + place - 1 : LENGTH + place + 1])
    options = {"max_new_tokens": 26, "stop_strings": [words], "tokenizer": tokenizer}
    expected = assert_same_ids(target, drafter, prompt(LENGTH), **options)
    assert expected.shape[1] <= LENGTH + place + 1
    assert expected.shape[1] < LENGTH + 26


def test_several_stop_strings(target, drafter, text, tokenizer):
    """The first that completes ends the text."""
    strings = [f"w{text[0, LENGTH + place].item()}" for place in (13, 6)]
    expected = assert_same_ids(
        target, drafter, prompt(LENGTH), max_new_tokens=26, stop_strings=strings, tokenizer=tokenizer
    )
    assert expected.shape[1] <= LENGTH + 7


class StopAfter(StoppingCriteria):
    """A user's criterion, with state: stops the n-th time it is asked."""

    def __init__(self, calls: int):
        self.left, self.prefixes = calls, []

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        self.prefixes.append(input_ids[0].tolist())
        return torch.full((input_ids.shape[0],), self.left <= 0)


@pytest.mark.parametrize("calls", [1, 2, 7, 8, 9, 12, 20])
def test_user_criterion_sees_every_accepted_prefix(calls, target, drafter, text):
    """It is asked once a token, in order, also inside a block."""
    criterion = StopAfter(calls)
    output = assisted(
        target,
        drafter,
        prompt(LENGTH),
        max_new_tokens=26,
        stopping_criteria=StoppingCriteriaList([criterion]),
    )
    assert output.tolist() == text[:, : LENGTH + calls].tolist()
    assert criterion.prefixes == [text[0, : LENGTH + count].tolist() for count in range(1, calls + 1)]


def test_user_criterion_without_a_maximum_length(target, drafter, text):
    """A criterion of its own ends a text long before a large maximum."""
    criteria = StoppingCriteriaList([StopAfter(11)])
    output = assisted(target, drafter, prompt(LENGTH), max_length=500, stopping_criteria=criteria)
    assert output.tolist() == text[:, : LENGTH + 11].tolist()


def test_user_criterion_gets_the_scores(target, drafter, text):
    """With output_scores, one entry for each token so far, as in plain generate."""
    lengths = []

    class Watch(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            lengths.append((input_ids.shape[1], len(scores)))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    assisted(
        target,
        drafter,
        prompt(LENGTH),
        max_new_tokens=18,
        stopping_criteria=StoppingCriteriaList([Watch()]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert lengths == [(LENGTH + count, count) for count in range(1, 19)]


@pytest.mark.parametrize("right", [False, True])
def test_output_token_equal_to_the_mask_token(right, target, monkeypatch):
    """The mask id is no sentinel: the target may say it, and may be given it."""
    ids = prompt(LENGTH)
    text = plain(target, ids, max_new_tokens=26)
    mask = text[0, LENGTH + 6].item()
    drafter = drafter_for(target, mask_token_id=mask)
    if right:
        propose(monkeypatch, text, wrong=lambda position: False)
    assert assisted(target, drafter, ids, max_new_tokens=26).tolist() == text.tolist()
    assert mask in text[0, LENGTH:].tolist()
    ids = torch.cat([ids, torch.tensor([[mask]])], dim=1)
    monkeypatch.undo()
    assert_same_ids(target, drafter, ids, max_new_tokens=9)


def test_max_time_is_honoured(target, drafter, text):
    """A clock that has run out ends the text after the token that it is asked about."""
    expected = assert_same_ids(target, drafter, prompt(LENGTH), max_new_tokens=26, max_time=1e-9)
    assert expected.shape[1] == LENGTH + 1
