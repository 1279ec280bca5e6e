"""Position tables, long allowances, callbacks on prefixes, offloaded targets: each was wrong once."""

import pytest
import torch
from accelerate import cpu_offload
from generation_helpers import assert_same_ids, drafter_for, prompt, propose, small_target
from transformers import AutoModelForCausalLM, GPT2Config, StoppingCriteria, StoppingCriteriaList


class StopAtLength(StoppingCriteria):
    """Ends a row at a length that no other limit knows."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("length", [29, 31, 32])
def test_learned_positions_end_before_max_length(length):
    """A block near the end of the position table is shortened, whatever max_length allows (IndexError otherwise)."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=32, initializer_range=0.3)
    target = AutoModelForCausalLM.from_config(config).eval()
    drafter = drafter_for(target)
    options = {"max_length": 60, "eos_token_id": None, "pad_token_id": 0}
    criteria = {"stopping_criteria": StoppingCriteriaList([StopAtLength(length)])}
    assert_same_ids(target, drafter, prompt(6), **options, **criteria)


def test_buffers_grow_with_the_text_and_not_with_the_allowance():
    """An open-ended max_new_tokens allocates nothing in advance; a text past the first room is still the target's."""
    target = small_target(max_position_embeddings=4096)
    drafter = drafter_for(target)
    criteria = {"stopping_criteria": StoppingCriteriaList([StopAtLength(24)])}
    assert_same_ids(target, drafter, prompt(6), max_new_tokens=4 * 10**9, eos_token_id=None, **criteria)


def test_a_text_longer_than_the_first_room(monkeypatch):
    """Ids, positions and mask double when a round would pass their end."""
    from dflash_hf.generation import decoding

    monkeypatch.setattr(decoding, "_FIRST_ROOM", 16)
    target = small_target()
    drafter = drafter_for(target)
    mask = torch.ones(1, 6, dtype=torch.long)
    mask[:, :2] = 0
    text = assert_same_ids(target, drafter, prompt(6), attention_mask=mask, max_new_tokens=100, eos_token_id=None)
    propose(monkeypatch, text)
    assert_same_ids(target, drafter, prompt(6), attention_mask=mask, max_new_tokens=100, eos_token_id=None)


def test_prefix_allowed_tokens_fn_sees_accepted_prefixes_once_and_in_order(monkeypatch):
    """A user's callback may be a trie that knows no other prefix; it is asked as plain generation asks it."""
    target = small_target()
    drafter = drafter_for(target)
    seen: list[list[int]] = []

    def allowed(batch_id, ids):
        seen.append(ids.tolist())
        return list(range(4, 60))

    options = {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": 20, "eos_token_id": None}
    text = target.generate(prompt(6), **options)
    plain_calls, seen[:] = list(seen), []
    propose(monkeypatch, text)
    assert target.generate(prompt(6), assistant_model=drafter, **options).tolist() == text.tolist()
    assert seen == plain_calls


@pytest.mark.parametrize("scale", [None, 1.0, 2.0])
def test_offloaded_target(scale):
    """Weights on the meta device between calls: rows and logits come through the modules that accelerate hooks."""
    target = small_target()
    drafter = drafter_for(target, input_embedding_scale=scale or 1.0)
    if scale is None:
        drafter.config.input_embedding_scale = None
    text = assert_same_ids(target, drafter, prompt(6), max_new_tokens=12, eos_token_id=None)
    lengths = drafter.last_generation_stats.acceptance_lengths
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.get_input_embeddings().weight.is_meta
    offloaded = target.generate(prompt(6), assistant_model=drafter, max_new_tokens=12, eos_token_id=None)
    assert offloaded.tolist() == text.tolist()
    assert drafter.last_generation_stats.acceptance_lengths == lengths
