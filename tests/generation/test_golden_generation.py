"""The recorded run of z-lab's loop: the same ids and the same number of tokens in every round."""

import copy

import pytest
from generation_helpers import assisted, plain


@pytest.fixture
def pair(trained_pair):
    """The trained pair; the drafter's generation config may be changed."""
    target, drafter = trained_pair
    saved = copy.deepcopy(drafter.generation_config)
    yield target, drafter
    drafter.generation_config = saved


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("variant", ["block8", "block4", "stop"])
def test_ids_and_acceptance_lengths(golden, pair, index, variant):
    """Per round: accepted draft tokens + 1, cut at the maximum length and at a stop token in mid-block."""
    target, drafter = pair
    case = golden("generation")
    facts = case.meta["prompts"][index]
    options = {"max_new_tokens": facts["max_new_tokens"], "eos_token_id": None}
    suffix = ""
    if variant == "block4":
        drafter.generation_config.block_size = 4
    if variant == "stop":
        options["eos_token_id"] = facts["stop_token_id"]
        suffix = "_stop"
    lengths = facts["acceptance_lengths" + {"block8": "", "block4": "_block4", "stop": "_stop"}[variant]]
    ids = case.io[f"p{index}.input_ids"]

    output = assisted(target, drafter, ids, **options)

    stats = drafter.last_generation_stats
    assert output.tolist() == case.io[f"p{index}.output_ids{suffix}"].tolist()
    assert stats.acceptance_lengths == lengths
    assert stats.new_tokens == sum(lengths) + 1
    assert stats.rounds == len(lengths)


def test_pooled_acceptance_length(golden, pair):
    """tau of the recording, pooled over the rounds of all prompts, bonus token included."""
    target, drafter = pair
    case = golden("generation")
    rounds = []
    for index, facts in enumerate(case.meta["prompts"]):
        assisted(
            target,
            drafter,
            case.io[f"p{index}.input_ids"],
            max_new_tokens=facts["max_new_tokens"],
            eos_token_id=None,
        )
        rounds += drafter.last_generation_stats.acceptance_lengths
    assert sum(rounds) / len(rounds) == pytest.approx(case.meta["pooled_mean_acceptance"])


def test_statistics_of_a_call(golden, pair):
    """The numbers follow from the two lists: proposals sent, tokens kept."""
    target, drafter = pair
    assisted(target, drafter, golden("generation").io["p0.input_ids"], max_new_tokens=48, eos_token_id=None)
    stats = drafter.last_generation_stats
    # Block of 8; the last round is cut by what is left: 48 - 1 - 41 tokens, one of them the target's own.
    assert stats.proposed == [7] * 8 + [5]
    assert stats.acceptance_length == pytest.approx(47 / 9)
    assert stats.accepted_draft_tokens_per_round == pytest.approx(47 / 9 - 1)
    assert stats.acceptance_rate == pytest.approx((47 - 9) / (7 * 8 + 5))
    assert 0 < stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds < stats.total_seconds
    assert stats.tokens_per_second == pytest.approx(48 / stats.total_seconds)
    assert "48 tokens in 9 rounds, acceptance length 5.22" in str(stats)


def test_drafter_is_called_once_a_round(golden, pair, monkeypatch):
    """The target runs once for the prompt and once a round; nothing hides extra passes."""
    target, drafter = pair
    calls = []
    handles = [
        target.register_forward_hook(lambda *_: calls.append("target")),
        drafter.register_forward_hook(lambda *_: calls.append("drafter")),
    ]
    try:
        assisted(target, drafter, golden("generation").io["p7.input_ids"], max_new_tokens=43, eos_token_id=None)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["target"] + ["drafter", "target"] * 6


def test_trained_drafter_is_right_often(golden, pair):
    """The pair is a real test of multi-token acceptance: far fewer target passes than tokens."""
    target, drafter = pair
    ids = golden("generation").io["p3.input_ids"]
    output = assisted(target, drafter, ids, max_new_tokens=100, eos_token_id=None)
    assert output.tolist() == plain(target, ids, max_new_tokens=100, eos_token_id=None).tolist()
    assert drafter.last_generation_stats.rounds < 50
