"""Sampled batches have exactly the target's distribution: rows of different length, processors, stop tokens, hybrids.

Two oracles. Rows that are accepted apart from each other are drawn many times in one call (num_return_sequences), and
their first three tokens are counted against the exact joint distribution, which enumerates the target. Rows that go in
step are drawn in many calls of two rows (in a large batch nothing would ever be accepted): each drawn token is placed
in the target's exact distribution after its own prefix, sorted by probability, and these places must be uniform.
"""

import pytest
import torch
from generation_helpers import SAMPLING_SETTINGS, drafter_for, slow, small_target
from knowing_drafter import padded_batch
from test_sampling import LEVEL, VOCAB, chi_square_p_value
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList
from transformers.generation import logits_process as hf

from dflash_hf.generation import acceptance

LENGTHS = [5, 2, 3]
DRAWS, FEWER_DRAWS = 1500, 500  # of each row; fewer where processors run row by row
CALLS, NEW = 40, 16
EOS = 7


class PreferByLength(hf.LogitsProcessor):
    """A processor of a user's own: not known to the package, so it must see accepted prefixes only."""

    def __call__(self, input_ids, scores):
        return scores + torch.sin(torch.arange(scores.shape[1]) * input_ids.shape[1] + input_ids[:, -1:])


SETTINGS = SAMPLING_SETTINGS | {
    "own processor": ({"logits_processor": LogitsProcessorList([PreferByLength()])}, [PreferByLength]),
    "stop token": ({"eos_token_id": EOS}, []),
}


@pytest.fixture(scope="module")
def pair():
    """A target with a spread-out distribution, and a drafter that is often wrong."""
    target = small_target(seed=2, layers=1, hidden=16, vocab=VOCAB, initializer_range=0.3)
    return target, drafter_for(target, seed=1, layers=1, block_size=4, target_layer_ids=[0])


@pytest.fixture(scope="module")
def hybrid_pair():
    """The same with a recurrent state: gated delta rule, then attention."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
        initializer_range=0.25, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        target.lm_head.weight.mul_(2)  # sharper, which shows faults with fewer draws
    return target, drafter_for(target, seed=3, layers=1, block_size=4, target_layer_ids=[0])


def exact_joint(target, ids: torch.LongTensor, mask: torch.LongTensor, processors, eos: int) -> torch.Tensor:
    """`[V, V, V]`: probabilities of all continuations of three tokens of `ids [1, L]`; pad follows `eos`."""
    joint, prefixes = torch.ones(1), ids
    for step in range(3):
        real = torch.nn.functional.pad(mask, (0, step), value=1).expand(len(prefixes), -1)
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = target(prefixes, attention_mask=real, position_ids=positions).logits[:, -1].float()
        rows = LogitsProcessorList([make() for make in processors])(prefixes, logits).softmax(dim=-1)
        ended = (prefixes[:, ids.shape[1] :] == eos).any(dim=1)
        rows[ended] = torch.nn.functional.one_hot(torch.tensor(0), VOCAB).float()
        joint = (joint[:, None] * rows).flatten()
        tokens = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, dim=0), tokens], dim=1)
    return joint.view(VOCAB, VOCAB, VOCAB)


def p_values(pair, name: str) -> list[float]:
    """One for each row of a batch; five tokens are drawn, three are looked at."""
    target, drafter = pair
    draws = FEWER_DRAWS if name in ("repetition_penalty", "own processor") else DRAWS
    options, processors = SETTINGS[name]
    inputs = {key: value % VOCAB for key, value in padded_batch(LENGTHS, seed=4).items()}
    torch.manual_seed(1)
    output = target.generate(
        **inputs,
        assistant_model=drafter,
        do_sample=True,
        max_new_tokens=5,
        num_return_sequences=draws,
        **{"top_k": 0, **options},
    )
    values = []
    for row, drawn in enumerate(output[:, max(LENGTHS) :].split(draws)):
        first, second, third = torch.nn.functional.pad(drawn, (0, 3))[:, :3].T
        counts = ((first * VOCAB + second) * VOCAB + third).bincount(minlength=VOCAB**3)
        ids, mask = (inputs[key][row : row + 1] for key in ("input_ids", "attention_mask"))
        exact = exact_joint(target, ids, mask, processors, options.get("eos_token_id", -1))
        values.append(chi_square_p_value(counts.view(exact.shape), exact))
    return values


def place_p_value(pair, name: str) -> float:
    """Chi-square p-value of the places of all tokens that are drawn in `CALLS` calls of two rows."""
    target, drafter = pair
    options, processors = SETTINGS[name]
    inputs = {key: value % VOCAB for key, value in padded_batch([5, 3], seed=4).items()}
    width, eos = inputs["input_ids"].shape[1], options.get("eos_token_id", -1)
    torch.manual_seed(1)
    drawn, accepted = [], 0
    for _ in range(CALLS):
        options = {**SETTINGS[name][0], "assistant_model": drafter, "do_sample": True, "max_new_tokens": NEW}
        text = target.generate(**inputs, **{"top_k": 0, **options})
        drawn.append(torch.nn.functional.pad(text, (0, width + NEW - text.shape[1])))
        accepted += (
            0
            if drafter is None
            else sum(drafter.last_generation_stats.produced) - len(drafter.last_generation_stats.produced)
        )
    assert drafter is None or accepted > CALLS, "the drafter must be right often"
    text = torch.cat(drawn)
    mask = torch.nn.functional.pad(inputs["attention_mask"].repeat(CALLS, 1), (0, NEW), value=1)
    with torch.no_grad():
        logits = target(text, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits.float()
    live = torch.ones(len(text), dtype=torch.bool)
    places = []
    for step in range(width, width + NEW):
        rows = LogitsProcessorList([make() for make in processors])(text[:, :step], logits[:, step - 1])
        ordered, order = rows.softmax(dim=-1).sort(dim=-1, descending=True)
        rank = (order == text[:, step, None]).int().argmax(dim=-1, keepdim=True)
        own = ordered.gather(1, rank)[:, 0]
        below = ordered.cumsum(dim=-1).gather(1, rank)[:, 0] - own
        places.append((below + torch.rand(len(text)) * own)[live])
        live &= text[:, step] != eos
    counts = (torch.cat(places) * 32).long().clamp(max=31).bincount(minlength=32).float()
    return chi_square_p_value(counts, torch.full((32,), 1 / 32))


@pytest.mark.parametrize("name", ["temperature", "top_k", "repetition_penalty", "stop token", *slow("top_p")])
def test_rows_apart(name, pair):
    """Every row, drawn over a prefill, accepted and rejected proposals and a second round."""
    assert min(p_values(pair, name)) > LEVEL
    assert 0.1 < pair[1].last_generation_stats.acceptance_rate < 0.7, "the drafter must be right and wrong often"


def test_rows_in_step(pair):
    """A processor that may keep state is called with all rows at once."""
    assert place_p_value(pair, "own processor") > LEVEL


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "repetition_penalty",
        *slow("own processor"),
        *slow("stop token"),
    ],
)
def test_hybrid(name, hybrid_pair):
    """The same for a target whose state is restored after a rejection."""
    assert place_p_value(hybrid_pair, name) > LEVEL


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        *slow("own processor"),
        *slow("stop token"),
    ],
)
def test_plain_generate_passes(name, pair):
    """The checks accept what they take for right."""
    assert min(*p_values((pair[0], None), name), place_p_value((pair[0], None), name)) > LEVEL


@pytest.fixture
def residual_without_q(monkeypatch):
    """A fault put back: after a rejection the token is drawn from p instead of max(0, p - q)."""
    monkeypatch.setattr(acceptance, "_residual", lambda p, q: p)


def test_wrong_residual_is_found_in_rows_apart(pair, residual_without_q):
    assert min(p_values(pair, "temperature")) < LEVEL


def test_wrong_residual_is_found_in_rows_in_step(pair, residual_without_q):
    assert place_p_value(pair, "own processor") < LEVEL


def test_wrong_residual_is_found_in_a_hybrid(hybrid_pair, residual_without_q):
    assert place_p_value(hybrid_pair, "temperature") < LEVEL


def test_rows_that_share_their_numbers_are_found(pair, monkeypatch):
    """A fault put back: one uniform number decides for all rows, which leaves each row's own distribution as it is."""
    rand = torch.rand

    def shared(*size, **more):
        numbers = rand(*size, **more)
        return numbers[:1].expand_as(numbers) if numbers.dim() else numbers

    monkeypatch.setattr(torch, "rand", shared)
    assert min(p_values(pair, "temperature")) < LEVEL


def test_same_seed_same_texts(pair):
    """All randomness of a batch comes from torch's generator."""
    target, drafter = pair
    inputs = {key: value % VOCAB for key, value in padded_batch(LENGTHS, seed=4).items()}
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        output = target.generate(
            **inputs, assistant_model=drafter, do_sample=True, top_k=0, max_new_tokens=30, num_return_sequences=4
        )
        texts.append(output.tolist())
    assert texts[0] == texts[1] != texts[2]
