"""`generate` with a drafter of every family: greedy text is the target's own, samples have its distribution."""

import pytest
import torch
from conftest import in_whole_blocks, tiny_drafter, tiny_target
from generation_helpers import assert_same_ids, assisted, plain, propose
from target_families import family_target
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from dflash_hf import DFlashDraftModel
from dflash_hf.draft_head import DraftHead, Walk
from dflash_hf.errors import UnsupportedGenerationError
from dflash_hf.generation.acceptance import accept_sampled
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.processors import Processors
from dflash_hf.target import FeatureCapture

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
FAMILIES = {
    "zlab": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5} | SLIDING,
    "deepspec": {"sample_from_anchor": True, "own_embedding": True, "own_head": True},
    "deepspec_gemma4": {"sample_from_anchor": True, "own_embedding": True, "own_head": True, "decoder_type": "gemma4"}
    | {
        "attention_k_eq_v": True,
        "layer_scalars": True,
        "hidden_act": "gelu_pytorch_tanh",
        "input_embedding_scale": 32**0.5,
    }
    | {"markov_rank": 6, "markov_head_type": "vanilla", "final_logit_softcapping": 5.0},
    "speculators_wider": {"sample_from_anchor": True, "own_embedding": True, "own_head": True, "hidden_size": 48},
    "dspark_vanilla": {"markov_rank": 6, "markov_head_type": "vanilla", "confidence_head": True},
    "dspark_gated": {"markov_rank": 6, "markov_head_type": "gated"},
    "dspark_rnn": {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": True, "own_embedding": True}
    | {"own_head": True},
    "domino": {"gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1, "sample_from_anchor": True},
    "speculators": {"window_rule": "anchor", "is_causal": False} | SLIDING,
    "speculators_trimmed": {"own_head": True, "draft_vocab_size": 40, "sample_from_anchor": True},
    "speculators_trimmed_dspark": {"own_head": True, "draft_vocab_size": 40, "sample_from_anchor": True}
    | {"markov_rank": 6, "markov_head_type": "vanilla"},
    "muse_assistant": {
        "family": "muse_assistant",
        "is_causal": False,
        "vocab_size": None,
        "input_embedding_scale": None,
    }
    | SLIDING,
}
WALKING = ["dflash2", "deepspec_gemma4", "dspark_vanilla", "dspark_rnn", "domino", "speculators_trimmed_dspark"]


def drafter_of(target, name: str, *, seed: int = 2, block_size: int = 6, **more) -> DFlashDraftModel:
    """A random drafter of that family, at a scale where its corrections matter."""
    config = tiny_drafter(target, seed=seed, block_size=block_size, **more).config
    for field, value in FAMILIES[name].items():
        setattr(config, field, value)
    config.family = FAMILIES[name].get("family") or config._family_of_fields()
    torch.manual_seed(seed)
    drafter = in_whole_blocks(DFlashDraftModel(config).eval())
    for parameter_name, parameter in drafter.named_parameters():
        if any(part in parameter_name for part in ("selector", "markov", "prefix_gru", "embed_proj", "conv")):
            parameter.data.normal_(0, 0.4)
        if parameter_name in ("embed_tokens.weight", "lm_head.weight"):
            parameter.data.normal_(0, 0.3)
    if drafter.d2t is not None:
        kept = torch.randperm(target.config.vocab_size)[: config.draft_vocab_size].sort().values
        drafter.d2t.copy_(kept - torch.arange(len(kept)))
        drafter.t2d[kept] = True
    return drafter


@pytest.fixture(scope="module")
def tiny():
    return tiny_target(seed=3)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_the_target_s_own(tiny, name):
    """Also with a processor that looks at the prefix, and with a draft that is nearly always wrong."""
    drafter = drafter_of(tiny, name)
    ids = torch.arange(5, 17)[None]
    assert_same_ids(tiny, drafter, ids, max_new_tokens=40)
    stats = drafter.last_generation_stats
    most = drafter.config.block_size - (0 if drafter.config.sample_from_anchor else 1)
    assert max(stats.proposed) == most
    assert_same_ids(tiny, drafter, ids, max_new_tokens=30, repetition_penalty=1.3)


@pytest.mark.parametrize("markov_rank", [None, 6])
def test_a_gemma_4_drafter_on_gemma_4(monkeypatch, markov_rank):
    """Text of a tiny Gemma 4 with sliding and global layers; right drafts are accepted whole."""
    target = family_target("gemma4_text")
    drafter = drafter_of(target, "deepspec_gemma4", target_layer_ids=[0, 2])
    config = drafter.config
    if markov_rank is None:
        config.markov_rank = config.markov_head_type = drafter.markov_head = None
    ids = torch.arange(5, 17)[None]
    expected = assert_same_ids(target, drafter, ids, max_new_tokens=40)
    mask = torch.tensor([[1] * 12, [0] * 4 + [1] * 8])
    batch = torch.cat([ids, ids.flip(1)]) * mask
    assert_same_ids(target, drafter, batch, attention_mask=mask, max_new_tokens=20)
    propose(monkeypatch, expected, wrong=lambda position: False)
    assert_same_ids(target, drafter, ids, max_new_tokens=40)
    assert max(drafter.last_generation_stats.produced) == config.block_size + 1


@pytest.mark.parametrize("name", ["dflash2", "deepspec", "dspark_rnn", "domino", "speculators_trimmed_dspark"])
def test_rows_of_a_batch_are_the_target_s_own(tiny, name):
    """Each row's walk, GRU state and trimmed vocabulary are its own; rows end at different tokens."""
    drafter = drafter_of(tiny, name)
    ids = torch.tensor([[3, 8, 21, 40], [0, 0, 5, 9], [0, 17, 30, 2]])
    mask = (ids != 0).long()
    options = dict(attention_mask=mask, max_new_tokens=24)
    eos = plain(tiny, ids, **options)[1, 12].item()
    for more in ({}, {"eos_token_id": eos, "pad_token_id": 0}, {"repetition_penalty": 1.2}):
        expected = plain(tiny, ids, **options, **more)
        assert assisted(tiny, drafter, ids, **options, **more).tolist() == expected.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_family_drafts_the_same(tiny, name, tmp_path):
    """The drafter that is loaded proposes what the one in memory did."""
    drafter = drafter_of(tiny, name)
    drafter.save_pretrained(tmp_path)
    again = DFlashDraftModel.from_pretrained(tmp_path).eval()
    assert again.config.family == drafter.config.family
    ids = torch.arange(5, 17)[None]
    produced = []
    for model in (drafter, again):
        assisted(tiny, model, ids, max_new_tokens=24)
        produced.append(model.last_generation_stats.produced)
    assert produced[0] == produced[1]


@pytest.mark.parametrize("name", ["dflash2", "deepspec", "domino", "dspark_rnn", "speculators_trimmed_dspark"])
def test_right_drafts_are_accepted_at_the_right_slot(monkeypatch, tiny, name):
    """Slot 0 or 1 first: with drafts that are right, every round accepts all of them."""
    drafter = drafter_of(tiny, name)
    ids = torch.arange(5, 17)[None]
    expected = plain(tiny, ids, max_new_tokens=36)
    propose(monkeypatch, expected, wrong=lambda position: False)
    assert assisted(tiny, drafter, ids, max_new_tokens=36).tolist() == expected.tolist()
    most = drafter.config.block_size - (0 if drafter.config.sample_from_anchor else 1)
    full = [produced for produced, proposed in zip(*_rounds(drafter)) if proposed == most]
    possible = drafter.config.draft_vocab_size is None  # a trimmed vocabulary lacks some of the target's tokens
    assert full and (not possible or set(full) == {most + 1})


def _rounds(drafter):
    stats = drafter.last_generation_stats
    return stats.produced, stats.proposed


SMALL = 12  # tokens, so that the joint distribution of two can be counted
ROWS = 8000
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(7)])


def small_pair(monkeypatch, name: str):
    """A target with few tokens and a drafter of that family whose support is a part of them."""
    target = tiny_target(seed=7, vocab=SMALL, layers=5)
    sizes = {"selector_top_k": 6} if name == "dflash2" else {}
    if "draft_vocab_size" in FAMILIES[name]:
        sizes = {"draft_vocab_size": 5}
    monkeypatch.setitem(FAMILIES, name, FAMILIES[name] | sizes)
    return target, drafter_of(target, name, block_size=3)


@torch.no_grad()
def two_tokens(target, drafter) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts `[SMALL, SMALL]` of the first two tokens of one draft round for many rows, and what is expected.

    Where a round gives one token only, the second is drawn from the target.
    """
    torch.manual_seed(11)
    ids = torch.tensor([[1, 5, 2, 8, 3]])
    processors = Processors(WARPERS, batch_size=ROWS)
    generator = DFlashCandidateGenerator(drafter, target, processors=processors, do_sample=True, batch_size=ROWS)
    with FeatureCapture(target, drafter.config.target_layer_ids) as capture, capture.recording():
        target(ids[:, :-1])
        features = capture.take(torch.device("cpu"))
    positions = torch.arange(4).expand(ROWS, -1)
    generator.context.add(features.expand(ROWS, -1, -1), positions)
    candidates, draft_scores = generator.get_candidates(ids.expand(ROWS, -1), 2)
    scores = processors.on_rows(target(candidates).logits[:, -3:].float(), draft=False)
    kept = accept_sampled(draft=candidates[:, -2:], draft_scores=draft_scores, scores=scores)

    every = torch.cat([ids.repeat(SMALL, 1), torch.arange(SMALL)[:, None]], dim=1)
    logits = target(every).logits[:, -2:].float()
    first = WARPERS(ids, logits[:1, 0]).softmax(dim=-1)[0]
    following = WARPERS(every, logits[:, 1]).softmax(dim=-1)
    drawn = torch.multinomial(following, ROWS, replacement=True)
    counts = torch.zeros(SMALL, SMALL)
    for row, tokens in enumerate(kept):
        counts[tokens[0], tokens[1] if len(tokens) > 1 else drawn[tokens[0], row]] += 1
    return counts, ROWS * first[:, None] * following


def chi_square(counts, exact) -> float:
    """Standardised: about 0 with deviation 1 if the counts follow `exact`."""
    likely = exact > 5
    rest = (counts[~likely].sum() - exact[~likely].sum()) ** 2 / exact[~likely].sum().clamp(min=1)
    statistic = ((counts - exact) ** 2 / exact)[likely].sum() + rest
    freedom = int(likely.sum())
    return ((statistic - freedom) / (2 * freedom) ** 0.5).item()


@pytest.mark.parametrize("name", ["dflash2", "dspark_rnn", "domino", "speculators_trimmed_dspark"])
def test_samples_have_the_target_s_distribution(monkeypatch, name):
    """q is that of the walk, over candidates or a part of the vocabulary, after temperature and top-k."""
    assert chi_square(*two_tokens(*small_pair(monkeypatch, name))) < 4


def _q_before_the_walk(monkeypatch):
    """The fault: tokens from the corrected scores, but q from the logits before the correction."""
    real = DFlashCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, num_tokens=None):
        ids, _ = real(self, input_ids, num_tokens)
        return ids, self.processors.on_rows(self.head.logits(self._hidden).float(), draft=True)

    monkeypatch.setattr(DFlashCandidateGenerator, "get_candidates", get_candidates)


def _q_before_temperature(monkeypatch):
    """The fault: q cached before temperature and top-k."""
    real = DFlashCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, num_tokens=None):
        kept, scores_of = [], Walk.scores

        def scores(walk, index, previous):
            kept.append(scores_of(walk, index, previous))
            return kept[-1]

        Walk.scores = scores
        try:
            ids, _ = real(self, input_ids, num_tokens)
        finally:
            Walk.scores = scores_of
        return ids, torch.stack(kept, dim=1)

    monkeypatch.setattr(DFlashCandidateGenerator, "get_candidates", get_candidates)


@pytest.mark.parametrize("fault", [_q_before_the_walk, _q_before_temperature])
@pytest.mark.parametrize("name", ["dflash2", "dspark_rnn"])
def test_the_distribution_test_sees_a_wrong_q(monkeypatch, name, fault):
    """The faults that published implementations had, put back."""
    pair = small_pair(monkeypatch, name)
    fault(monkeypatch)
    assert chi_square(*two_tokens(*pair)) > 6


def test_every_candidate_ruled_out(tiny):
    """A processor forbids all tokens that the drafter can propose: q becomes uniform, the text stays the target's."""
    drafter = drafter_of(tiny, "speculators_trimmed")
    possible = DraftHead(drafter, tiny).token_ids.tolist()
    ids = torch.arange(5, 17)[None]
    torch.manual_seed(0)
    text = assisted(tiny, drafter, ids, max_new_tokens=20, do_sample=True, suppress_tokens=possible)
    assert text.shape[1] == 32
    assert not set(text[0, 12:].tolist()) & set(possible)
    assert_same_ids(tiny, drafter, ids, max_new_tokens=20, suppress_tokens=possible)


@pytest.mark.parametrize("name", WALKING)
def test_half_precision(tiny, name):
    """A bf16 drafter with an fp32 target, greedy and sampled."""
    drafter = drafter_of(tiny, name).bfloat16()
    ids = torch.arange(5, 17)[None]
    assert_same_ids(tiny, drafter, ids, max_new_tokens=20)
    assert assisted(tiny, drafter, ids, max_new_tokens=20, do_sample=True).shape == (1, 32)


def test_a_smaller_block_and_fewer_proposals(tiny):
    """generation_config.block_size and num_assistant_tokens count proposals from slot 0 where it proposes."""
    for name, extra in (("deepspec", 1), ("dflash2", 0)):
        drafter = drafter_of(tiny, name)
        ids = torch.arange(5, 17)[None]
        drafter.generation_config.block_size = 4
        assert_same_ids(tiny, drafter, ids, max_new_tokens=20)
        assert max(drafter.last_generation_stats.proposed) == 3 + extra
        drafter.generation_config.num_assistant_tokens = 2
        assert_same_ids(tiny, drafter, ids, max_new_tokens=20)
        assert set(drafter.last_generation_stats.proposed) <= {0, 1, 2}  # 0 where one token is left


@pytest.mark.parametrize("name", ["dflash2", "deepspec", "domino", "speculators"])
def test_transformers_own_loop_refuses_what_it_cannot_draft(tiny, name):
    """It would take slot 1 for the first proposal, or leave the walk out; not wrong text, but slow without a word."""
    with pytest.raises(UnsupportedGenerationError, match="speculation_type='dflash'"):
        assisted(tiny, drafter_of(tiny, name), torch.arange(5, 17)[None], max_new_tokens=8, speculation_type="dflash")
