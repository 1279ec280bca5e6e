"""Sampled output has exactly the target's distribution, whatever the drafter says; checked by counting.

The oracle enumerates the target: the exact joint distribution of the first three tokens with transformers' own warpers.
"""

import itertools

import pytest
import torch
from generation_helpers import CACHE_NAME, SAMPLING_SETTINGS, drafter_for, prompt, small_target
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from dflash_hf.generation import acceptance, acceptor, candidate_generator, decoding

VOCAB = 16
LEVEL = 0.001
DRAWS, FEWER_DRAWS = 2400, 1200  # the faults below are seen with as many
SETTINGS = SAMPLING_SETTINGS


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's test of counts against exact probabilities; neighbouring cells are pooled until each expects 8."""
    total = counts.sum().item()
    observed, expected = [0.0], [0.0]
    for count, probability in zip(counts.flatten().tolist(), probabilities.flatten().tolist()):
        assert probability > 0 or count == 0, "a draw that the target cannot give"
        if expected[-1] >= 8:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += count
        expected[-1] += probability * total
    if expected[-1] < 8:  # what is left over
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    assert len(expected) > 20, "too few cells to see anything"
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(observed, expected))
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*half).item()


def test_the_check_itself():
    """It passes exact draws and rejects draws from a distribution that is a little off."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.rand(64, generator=generator) + 0.1
    exact /= exact.sum()
    off = exact.clone()
    off[:32] *= 1.25
    p_values = []
    for drawn in (exact, off):
        draws = torch.multinomial(drawn, 4000, replacement=True, generator=generator)
        p_values.append(chi_square_p_value(draws.bincount(minlength=64), exact))
    assert p_values[0] > LEVEL > p_values[1]
    # A known value: chi-square 30.144 at 19 degrees of freedom is the 5% point of the tables.
    assert torch.special.gammaincc(torch.tensor(9.5), torch.tensor(30.144 / 2)).item() == pytest.approx(0.05, abs=1e-4)


# The whole of generate.


@pytest.fixture(scope="module")
def pair():
    """A target with a spread-out distribution, and a drafter that is often wrong."""
    target = small_target(seed=2, layers=1, hidden=16, vocab=VOCAB, initializer_range=0.3)
    return target, drafter_for(target, seed=1, layers=1, block_size=4, target_layer_ids=[0])


def exact_joint(target, ids: torch.LongTensor, processors) -> torch.Tensor:
    """`[V, V, V]`: probabilities of all continuations of three tokens."""
    joint = torch.ones(1)
    prefixes = ids
    for _ in range(3):
        with torch.no_grad():
            logits = target(prefixes).logits[:, -1].float()
        rows = LogitsProcessorList([make() for make in processors])(prefixes, logits).softmax(dim=-1)
        joint = (joint[:, None] * rows).flatten()
        tokens = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, dim=0), tokens], dim=1)
    return joint.view(VOCAB, VOCAB, VOCAB)


def generate_once(pair, ids, options):
    """The whole of generate."""
    target, drafter = pair
    return target.generate(ids, assistant_model=drafter, do_sample=True, max_new_tokens=4, **{"top_k": 0, **options})


def decode_once(pair, ids, processors):
    """What generate calls in the end, without its preparations: they take longer than the decoding of four tokens."""
    return decoding.DFlashDecoding(
        *pair,
        input_ids=ids,
        logits_processor=LogitsProcessorList([make() for make in processors]),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + 4)]),
        generation_config=GenerationConfig(do_sample=True, max_length=ids.shape[1] + 4),
        streamer=None,
        model_kwargs={
            CACHE_NAME: DynamicCache(config=pair[0].config),
            "attention_mask": None,
            "position_ids": torch.arange(ids.shape[1])[None],
            "use_cache": True,
            "logits_to_keep": 1,
        },
    ).run()


def draw(pair, once, settings, draws: int) -> tuple[torch.Tensor, float]:
    """Counts `[V, V, V]` of the first three of four sampled tokens, and the drafter's acceptance rate."""
    ids = prompt(4, vocab=VOCAB)
    counts = torch.zeros((VOCAB,) * 3)
    proposed = accepted = 0
    torch.manual_seed(1)
    with torch.no_grad():
        for _ in range(draws):
            counts[tuple(once(pair, ids, settings)[0, 4:7].tolist())] += 1
            stats = pair[1].last_generation_stats
            proposed += sum(stats.proposed)
            accepted += sum(made - 1 for made in stats.produced)
    return counts, accepted / proposed


@pytest.mark.parametrize("name", SETTINGS)
def test_joint_distribution(name, pair):
    """Three tokens, drawn over a prefill, accepted and rejected proposals and a second round."""
    options, processors = SETTINGS[name]
    whole = name == "temperature"
    draws = DRAWS if whole else FEWER_DRAWS
    counts, rate = draw(pair, generate_once if whole else decode_once, options if whole else processors, draws)
    assert 0.15 < rate < 0.7, "the drafter must be right and wrong often"
    assert chi_square_p_value(counts, exact_joint(pair[0], prompt(4, vocab=VOCAB), processors)) > LEVEL


@pytest.mark.parametrize("name", SETTINGS)
def test_generate_prepares_these_processors(name, pair, monkeypatch):
    """What the check above hands to the decoding loop is what generate hands to it."""
    given = []
    real = decoding.DFlashDecoding.__init__

    def init(self, target, drafter, *, logits_processor, **more):
        given.extend(logits_processor)
        real(self, target, drafter, logits_processor=logits_processor, **more)

    monkeypatch.setattr(decoding.DFlashDecoding, "__init__", init)
    options, processors = SETTINGS[name]
    generate_once(pair, prompt(4, vocab=VOCAB), options)
    plain_numbers = [
        {key: value for key, value in vars(each).items() if isinstance(value, (int, float))} for each in given
    ]
    expected = [make() for make in processors]
    assert [type(each) for each in given] == [type(each) for each in expected]
    assert plain_numbers == [
        {key: value for key, value in vars(each).items() if isinstance(value, (int, float))} for each in expected
    ]


def in_batch(rule):
    """A rule for one row, called as the rules of `acceptance` are, with a batch of one."""

    def batched(*, draft, draft_scores, scores):
        return [rule(draft=draft[0], draft_scores=draft_scores[0], scores=scores[0])]

    return batched


def accept_sampled(*, draft, draft_scores, scores):
    """`acceptance.accept_sampled` on one row."""
    (tokens,) = acceptance.accept_sampled(draft=draft[None], draft_scores=draft_scores[None], scores=scores[None])
    return tokens


def no_subtraction(*, draft, draft_scores, scores):
    """Wrong: after a rejection the token is drawn from p instead of max(0, p - q)."""
    p, q = scores.softmax(-1), draft_scores.softmax(-1)
    for row, token in enumerate(draft.tolist()):
        if torch.rand(()) * q[row, token] >= p[row, token]:
            return [*draft[:row].tolist(), int(torch.multinomial(p[row], 1))]
    return [*draft.tolist(), int(torch.multinomial(p[-1], 1))]


def q_taken_for_p(*, draft, draft_scores, scores):
    """Wrong: the ratio is taken against the target's own distribution, so that every proposal stays."""
    return accept_sampled(draft=draft, draft_scores=scores[: len(draft)], scores=scores)


def test_generate_without_subtraction_is_found(pair, monkeypatch):
    """The check on generate has the power to see it."""
    monkeypatch.setattr(acceptor, "accept_sampled", in_batch(no_subtraction))
    _, processors = SETTINGS["temperature"]
    counts, _ = draw(pair, decode_once, processors, DRAWS)
    assert chi_square_p_value(counts, exact_joint(pair[0], prompt(4, vocab=VOCAB), processors)) < LEVEL


def test_generate_with_a_greedy_draft_is_found(pair, monkeypatch):
    """A draft that takes the largest logit while q says that it was drawn."""
    monkeypatch.setattr(
        candidate_generator.DFlashCandidateGenerator, "_choose", lambda self, scores: scores.argmax(dim=-1)
    )
    _, processors = SETTINGS["temperature"]
    counts, _ = draw(pair, decode_once, processors, FEWER_DRAWS)
    assert chi_square_p_value(counts, exact_joint(pair[0], prompt(4, vocab=VOCAB), processors)) < LEVEL


def test_same_seed_same_text(pair):
    """Sampling takes its randomness from torch's generator alone."""
    target, drafter = pair
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(
            target.generate(
                prompt(4, vocab=VOCAB), assistant_model=drafter, do_sample=True, top_k=0, max_new_tokens=30
            ).tolist()
        )
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_drafter_that_equals_the_target_is_always_accepted(pair, monkeypatch):
    """With q = p the ratio is 1."""
    target, drafter = pair

    real = decoding.DFlashCandidateGenerator.propose

    def propose(self, anchor, num_tokens, *, prefixes):
        real(self, anchor, num_tokens, prefixes=prefixes)  # for its bookkeeping
        (input_ids,), rows = prefixes(), []
        for _ in range(num_tokens):
            with torch.no_grad():
                rows.append(target(input_ids).logits[:, -1])
            input_ids = torch.cat([input_ids, torch.multinomial(rows[-1].softmax(-1), 1)], dim=1)
        return input_ids[:, -num_tokens:], torch.stack(rows, dim=1)

    monkeypatch.setattr(decoding.DFlashCandidateGenerator, "propose", propose)
    torch.manual_seed(0)
    target.generate(prompt(4, vocab=VOCAB), assistant_model=drafter, do_sample=True, top_k=0, max_new_tokens=41)
    assert drafter.last_generation_stats.acceptance_lengths == [4] * 10


def test_top_k_1_equals_greedy(pair):
    """Sampling from one token is greedy decoding."""
    target, drafter = pair
    ids = prompt(4, vocab=VOCAB)
    expected = target.generate(ids, do_sample=False, max_new_tokens=30)
    output = target.generate(ids, assistant_model=drafter, do_sample=True, top_k=1, max_new_tokens=30)
    assert output.tolist() == expected.tolist()


# The acceptance rule alone: rows that do not depend on the tokens, so the joint is the product of the rows.

SMALL = 6


@pytest.fixture(scope="module")
def rows():
    """Target scores `[3, 6]` and draft scores `[2, 6]`, far apart."""
    generator = torch.Generator().manual_seed(3)
    return 1.2 * torch.randn(3, SMALL, generator=generator), 1.2 * torch.randn(2, SMALL, generator=generator)


def draw_from_q(q):
    """Independent draws, as the drafter makes them."""
    return torch.multinomial(q.softmax(-1), 1)[:, 0]


def p_value_of(rows, accept, draws: int, draft_tokens=draw_from_q) -> float:
    """Draw three tokens by `accept` and, where it gave fewer, from the target's rows."""
    scores, draft_scores = rows
    p = scores.softmax(-1)
    rest = [torch.multinomial(row, draws, replacement=True).tolist() for row in p]
    counts = torch.zeros((SMALL,) * 3)
    for draw in range(draws):
        tokens = accept(draft=draft_tokens(draft_scores), draft_scores=draft_scores, scores=scores)
        tokens = tokens + [rest[row][draw] for row in range(len(tokens), 3)]
        counts[tuple(tokens)] += 1
    return chi_square_p_value(counts, torch.einsum("i,j,k->ijk", *p))


def in_order(*, draft, draft_scores, scores):
    """`accept_one` as the decoding loop calls it."""
    tokens = []
    for row, proposal in enumerate([*draft.tolist(), None]):
        token, accepted = acceptance.accept_one(
            draft=proposal,
            draft_scores=None if proposal is None else draft_scores[row],
            scores=scores[row],
            do_sample=True,
        )
        tokens.append(token)
        if not accepted:
            break
    return tokens


@pytest.mark.parametrize("accept", [accept_sampled, in_order])
def test_acceptance_rule(accept, rows):
    """Both forms of the rule give p exactly."""
    torch.manual_seed(0)
    assert p_value_of(rows, accept, 20000) > LEVEL


def shared_uniform(*, draft, draft_scores, scores):
    """Wrong: the residual draw reuses the number that the draft was drawn with."""
    p, q = scores.softmax(-1), draft_scores.softmax(-1)
    numbers = torch.rand(len(q))
    draft = (q.cumsum(-1) < numbers[:, None]).sum(-1).clamp(max=SMALL - 1)
    for row, token in enumerate(draft.tolist()):
        if torch.rand(()) * q[row, token] >= p[row, token]:
            residual = (p[row] - q[row]).clamp(min=0)
            residual /= residual.sum()
            token = int((residual.cumsum(-1) < numbers[row]).sum().clamp(max=SMALL - 1))
            return [*draft[:row].tolist(), token]
    return [*draft.tolist(), int(torch.multinomial(p[-1], 1))]


@pytest.mark.parametrize(
    ("accept", "draft_tokens"),
    [
        (no_subtraction, draw_from_q),
        (q_taken_for_p, draw_from_q),
        (accept_sampled, lambda q: q.argmax(-1)),
        (shared_uniform, draw_from_q),
    ],
    ids=["residual is p", "q taken for p", "greedy draft", "shared uniform"],
)
def test_wrong_rules_are_found(accept, draft_tokens, rows):
    """The same check rejects each of the known mistakes, with fewer draws."""
    torch.manual_seed(0)
    assert p_value_of(rows, accept, 6000, draft_tokens) < LEVEL


def test_tokens_the_target_excludes_are_never_kept():
    """p = 0 (top-k, suppressed) rejects a proposal for certain; q = 0 never divides."""
    scores = torch.tensor([[0.0, -float("inf"), 0.0], [0.0, 0.0, -float("inf")]])
    draft_scores = torch.tensor([[-float("inf"), 0.0, -float("inf")]])
    torch.manual_seed(0)
    seen = {
        tuple(accept_sampled(draft=torch.tensor([1]), draft_scores=draft_scores, scores=scores)) for _ in range(100)
    }
    assert seen == {(0,), (2,)}
    seen = {
        acceptance.accept_one(draft=1, draft_scores=draft_scores[0], scores=scores[0], do_sample=True)
        for _ in range(100)
    }
    assert seen == {(0, False), (2, False)}


def test_accept_greedy_by_brute_force():
    """Every pattern of right and wrong proposals."""
    scores = torch.eye(4)[[2, 0, 3, 1]]
    chosen = [2, 0, 3, 1]
    for draft in itertools.product(range(4), repeat=3):
        right = next((row for row in range(3) if draft[row] != chosen[row]), 3)
        assert acceptance.accept_greedy(draft=torch.tensor([draft]), scores=scores[None]) == [chosen[: right + 1]]
    nothing = torch.empty((1, 0), dtype=torch.long)
    assert acceptance.accept_greedy(draft=nothing, scores=scores[None, :1]) == [[2]]
