"""How much of a block is sent to the target, and the rules on more than one row."""

import pytest
import torch
from generation_helpers import assert_same_ids, prompt

from dflash_hf.errors import DFlashConfigError
from dflash_hf.generation.acceptance import accept_greedy, accept_sampled


@pytest.fixture
def pair(trained_pair):
    """The trained pair, with the drafter's generation_config given back afterwards."""
    target, drafter = trained_pair
    yield target, drafter
    drafter.generation_config.num_assistant_tokens = None


@pytest.mark.parametrize("count", [1, 2, 5, 7, 20])
def test_num_assistant_tokens_limits_what_is_verified(pair, count):
    """The text stays, at most `count` proposals a round are verified, and as many as before where that is enough."""
    target, drafter = pair
    drafter.generation_config.num_assistant_tokens = count
    assert_same_ids(target, drafter, prompt(6, vocab=100), max_new_tokens=40, eos_token_id=None)
    stats = drafter.last_generation_stats
    assert max(stats.proposed) == min(count, drafter.config.block_size - 1)
    assert max(stats.produced) <= count + 1


def test_num_assistant_tokens_below_one_is_refused(pair):
    target, drafter = pair
    drafter.generation_config.num_assistant_tokens = 0
    with pytest.raises(DFlashConfigError, match="num_assistant_tokens is 0.*at least 1.*Set 1 to 7"):
        target.generate(prompt(6, vocab=100), assistant_model=drafter, max_new_tokens=5)


def test_rows_of_a_batch_are_accepted_independently():
    """Greedy: each row has a prefix of its own."""
    chosen = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    scores = torch.nn.functional.one_hot(chosen, 5).float()
    draft = torch.tensor([[1, 2], [0, 2], [1, 0]])
    assert accept_greedy(draft=draft, scores=scores) == [[1, 2, 3], [1], [1, 2]]


def test_sampling_rows_do_not_mix():
    """A row whose q equals p keeps everything; a row whose proposal has p = 0 keeps nothing, beside each other."""
    torch.manual_seed(0)
    p = torch.randn(2, 3, 6)
    q = p[:, :2].clone()
    draft = torch.multinomial(q.softmax(-1).flatten(0, 1), 1).view(2, 2)
    p[1, 0, draft[1, 0]] = -float("inf")
    for _ in range(200):
        first, second = accept_sampled(draft=draft, draft_scores=q, scores=p)
        assert first[:2] == draft[0].tolist() and len(first) == 3
        assert len(second) == 1 and second[0] != int(draft[1, 0])
