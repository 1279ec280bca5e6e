"""A drafter with an index of frequent tokens: proposals come from it, output is the target's own."""

import pytest
import torch
from conftest import tiny_target
from generation_helpers import assert_same_ids, assisted, drafter_for, plain, prompt, small_target
from test_family_generation import FAMILIES, drafter_of
from test_sampling import LEVEL, SETTINGS, VOCAB, chi_square_p_value, decode_once, draw, exact_joint
from torch import nn

from dflash_hf.draft_head import DraftHead
from dflash_hf.errors import TargetMismatchError
from dflash_hf.generation import candidate_generator

INDEX = [9, 4, 77, 30, 5, 61, 18, 90, 42, 7, 96, 13, 50]
WITH_INDEX = [name for name in FAMILIES if "trimmed" not in name]


@pytest.fixture(scope="module")
def tiny():
    return tiny_target(seed=3)


def proposals_of(monkeypatch) -> list[list[int]]:
    """What the generator proposes from here on."""
    seen = []
    real = candidate_generator.DFlashCandidateGenerator.propose

    def propose(self, *args, **kwargs):
        tokens, scores = real(self, *args, **kwargs)
        seen.extend(tokens.tolist())
        return tokens, scores

    monkeypatch.setattr(candidate_generator.DFlashCandidateGenerator, "propose", propose)
    return seen


@pytest.mark.parametrize("name", WITH_INDEX)
def test_greedy_text_is_the_target_s_own(tiny, name, monkeypatch):
    """Of every family, with and without a processor that looks at ids."""
    drafter = drafter_of(tiny, name)
    drafter.frequent_token_ids = INDEX
    seen = proposals_of(monkeypatch)
    ids = torch.arange(5, 17)[None]
    assert_same_ids(tiny, drafter, ids, max_new_tokens=30)
    assert_same_ids(tiny, drafter, ids, max_new_tokens=20, repetition_penalty=1.3)
    assert seen and {token for row in seen for token in row} <= set(INDEX)


def test_logits_are_those_of_the_whole_head(tiny):
    """Oracle: the head over the whole vocabulary, every other token ruled out afterwards."""
    drafter = drafter_for(tiny)
    hidden = torch.randn(2, 5, tiny.config.hidden_size)
    whole = DraftHead(drafter, tiny).logits(hidden)
    drafter.frequent_token_ids = INDEX
    head = DraftHead(drafter, tiny)
    others = torch.ones(whole.shape[-1], dtype=torch.bool)
    others[INDEX] = False
    expected = whole.masked_fill(others, -torch.inf)
    torch.testing.assert_close(head.logits(hidden), expected)
    torch.testing.assert_close(head.frequent_logits(hidden), expected[..., INDEX])
    assert head.frequent[head.frequent_logits(hidden).argmax(-1)].tolist() == expected.argmax(-1).tolist()


class ScaledHead(nn.Linear):
    """A head with a forward of its own, as quantised and adapted ones have."""

    def forward(self, hidden):
        return -2 * super().forward(hidden)


def test_a_head_with_a_forward_of_its_own(tiny):
    """Its rows alone would give other logits."""
    target = tiny_target(seed=3)
    plain_head = target.lm_head
    target.lm_head = ScaledHead(plain_head.in_features, plain_head.out_features, bias=False)
    target.lm_head.load_state_dict(plain_head.state_dict())
    drafter = drafter_for(target)
    drafter.frequent_token_ids = INDEX
    hidden = torch.randn(1, 3, target.config.hidden_size)
    expected = target.lm_head(hidden)[..., INDEX]
    torch.testing.assert_close(DraftHead(drafter, target).frequent_logits(hidden), expected)
    assert_same_ids(target, drafter, prompt(), max_new_tokens=20)


def permuted(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(5))


def rounds_with(pair, index) -> list[int]:
    target, drafter = pair
    drafter.frequent_token_ids = index
    try:
        assert_same_ids(target, drafter, torch.arange(4, 20)[None], max_new_tokens=60)
    finally:
        drafter.frequent_token_ids = None
    return drafter.last_generation_stats.acceptance_lengths


def test_an_index_of_all_tokens_changes_nothing(trained_pair):
    """In another order: the map from places to ids decides how much is accepted, which greedy text never shows."""
    without = rounds_with(trained_pair, None)
    assert sum(without) / len(without) > 3
    assert rounds_with(trained_pair, permuted(trained_pair[0].config.vocab_size)) == without


def test_a_forgotten_map_is_found(trained_pair, monkeypatch):
    """Places in the index taken for token ids: the text stays right and acceptance is gone."""
    monkeypatch.setattr(DraftHead, "spread", lambda self, logits: logits)

    class Places:
        def __init__(self, index):
            self.index = index

        def to(self, device):
            return self

        def __getitem__(self, places):
            return places

    real = DraftHead.__init__

    def init(self, drafter, target):
        real(self, drafter, target)
        if self.frequent is not None:
            self.frequent_logits = lambda hidden, ids=self.frequent: self.head(hidden)[..., ids]
            self.frequent = Places(self.frequent)

    without = rounds_with(trained_pair, None)
    monkeypatch.setattr(DraftHead, "__init__", init)
    assert rounds_with(trained_pair, permuted(trained_pair[0].config.vocab_size)) != without


def test_rows_of_a_batch(trained_pair):
    """Each row as it is alone."""
    target, drafter = trained_pair
    drafter.frequent_token_ids = permuted(target.config.vocab_size)[:60]
    ids = torch.stack([torch.arange(4, 16), torch.arange(20, 32), torch.arange(40, 52)])
    try:
        assert_same_ids(target, drafter, ids, max_new_tokens=30, pad_token_id=0)
        assert drafter.last_generation_stats.acceptance_length > 1.2
    finally:
        drafter.frequent_token_ids = None


# Sampling.

SOME = [3, 14, 0, 9, 6, 11, 5]


@pytest.fixture
def pair():
    """As in test_sampling, and the drafter may propose half of the tokens."""
    target = small_target(seed=2, layers=1, hidden=16, vocab=VOCAB, initializer_range=0.3)
    drafter = drafter_for(target, seed=1, layers=1, block_size=4, target_layer_ids=[0])
    drafter.frequent_token_ids = SOME
    return target, drafter


def p_value(pair, name: str, draws: int = 800) -> float:
    _, processors = SETTINGS[name]
    counts, rate = draw(pair, decode_once, processors, draws)
    assert rate > 0.1, "proposals must be accepted for the test to say anything"
    return chi_square_p_value(counts, exact_joint(pair[0], prompt(4, vocab=VOCAB), processors))


@pytest.mark.parametrize(("name", "draws"), [("temperature", 800), ("top_p", 800), ("repetition_penalty", 500)])
def test_joint_distribution(name, draws, pair):
    """Where processors see the frequent tokens alone, and where one looks at ids."""
    assert p_value(pair, name, draws) > LEVEL


def test_q_over_the_whole_vocabulary_is_found(pair, monkeypatch):
    """A q that is not renormalised over the index: proposals come from it, q says that all tokens might have."""

    def spread(self, logits):
        full = self.head(self.hidden)
        full[..., self.frequent] = logits
        return full

    real = DraftHead.frequent_logits

    def frequent_logits(self, hidden):
        self.hidden = hidden
        return real(self, hidden)

    monkeypatch.setattr(DraftHead, "spread", spread)
    monkeypatch.setattr(DraftHead, "frequent_logits", frequent_logits)
    assert p_value(pair, "temperature") < LEVEL


def test_suppressed_tokens_are_never_given(pair, monkeypatch):
    """A processor that looks at ids must be shown ids, not places in the index; here it rules the whole index out."""
    target, drafter = pair
    ids = prompt(4, vocab=VOCAB)
    text = assisted(target, drafter, ids, max_new_tokens=30, do_sample=True, suppress_tokens=SOME)
    assert not set(text[0, 4:].tolist()) & set(SOME)
    assert_same_ids(target, drafter, ids, max_new_tokens=20, suppress_tokens=SOME[:3])
    seen = proposals_of(monkeypatch)
    drafter.frequent_token_ids = permuted(VOCAB)
    assisted(target, drafter, ids, max_new_tokens=30, do_sample=True, suppress_tokens=SOME)
    assert seen and not {token for row in seen for token in row} & set(SOME)


def test_a_confidence_threshold(trained_pair):
    """It looks at the distribution over the index."""
    target, drafter = trained_pair
    drafter.frequent_token_ids = permuted(target.config.vocab_size)[:100]
    drafter.generation_config.assistant_confidence_threshold = 0.6
    ids = torch.arange(4, 20)[None]
    try:
        assert (
            assisted(target, drafter, ids, max_new_tokens=30).tolist() == plain(target, ids, max_new_tokens=30).tolist()
        )
        assert len(set(drafter.last_generation_stats.proposed)) > 1
    finally:
        drafter.frequent_token_ids = None
        drafter.generation_config.assistant_confidence_threshold = None


def test_an_index_of_another_target_is_refused(tiny):
    """Ids that the drafter's config allows and the target does not have."""
    drafter = drafter_for(tiny)
    drafter.config.vocab_size = 200
    drafter.frequent_token_ids = [5, 150]
    with pytest.raises(TargetMismatchError, match="150.*97"):
        assisted(tiny, drafter, prompt(), max_new_tokens=4)
