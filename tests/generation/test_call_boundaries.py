"""What a call leaves behind and what it finds: caches of batches, dtypes, inference mode, limits, wrapped targets."""

import copy

import pytest
import torch
from fuzz_targets import build_target
from generation_helpers import (
    CACHE_NAME,
    assisted,
    cache_of,
    drafter_for,
    needs_static_rollback,
    plain,
    prompt,
    small_target,
)
from knowing_drafter import padded_batch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from target_families import family_target

from dflash_hf import DFlashCandidateGenerator, DFlashSession
from dflash_hf.errors import UnsupportedGenerationError
from dflash_hf.generation.acceptor import Acceptor
from dflash_hf.target import embed_tokens

NEW = 12


def rows_that_end_early(target):
    """A padded batch, and the id of a token that ends some of its rows before others."""
    inputs = padded_batch([7, 4, 6], seed=5)
    text = target.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    return inputs, int(text[0, 7 + 3])


@needs_static_rollback
def test_second_turn_on_a_static_cache_of_rows_that_ended_apart():
    """Rows go in step there: under the padding of one that has ended lies what the target makes of padding."""
    target = small_target()
    drafter = drafter_for(target)
    ids = torch.tensor([[3, 8, 21, 40], [7, 9, 5, 9], [11, 17, 30, 2]])
    target._previous_max_cache_length = 100
    eos = int(plain(target, ids, max_new_tokens=30)[1, 8])
    call = {"cache_implementation": "static", "max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": 0}
    call |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    text = plain(target, ids, **call).sequences
    ended = (text == eos).any(dim=1)
    assert ended.any() and not ended.all()
    # Drafts that are right for the rows that go on, so that several tokens are kept at once beside the padding.
    caches = [cache_of(copy.deepcopy(plain(target, ids, **call)))]
    real = DFlashCandidateGenerator.draft_logits
    lengths = []

    def draft_logits(self, anchor, num_tokens):
        logits = real(self, anchor, num_tokens).clone()
        start = ids.shape[1] + lengths[-1]
        known = text[:, start : start + num_tokens]
        known = torch.where(known == 0, 7, known)  # no padding for the row that has ended
        logits[:, : known.shape[1]].scatter_(-1, known[..., None], 1e4)
        return logits

    with pytest.MonkeyPatch.context() as patch:
        observe = Acceptor.__call__

        def count(self, *args, **more):
            kept = observe(self, *args, **more)
            lengths.append(max(self.sequences.lengths) - ids.shape[1])
            return kept

        patch.setattr(Acceptor, "__call__", count)
        patch.setattr(DFlashCandidateGenerator, "draft_logits", draft_logits)
        output = assisted(target, drafter, ids, **call)
    assert torch.equal(output.sequences, text) and drafter.last_generation_stats.acceptance_length > 3
    caches.append(cache_of(output))
    following = torch.cat([text, torch.tensor([[5, 6], [7, 8], [9, 10]])], dim=1)
    more = {"max_new_tokens": 20, "attention_mask": torch.ones_like(following)}
    turns = [plain(target, following, cache=copy.deepcopy(cache), **more) for cache in caches]
    assert torch.equal(*turns)


def test_a_turn_without_a_token_that_is_seen(target):
    """Its one new token is masked: the drafter has no new context, and the next block begins where it would."""
    drafter = drafter_for(target)
    first = {"max_new_tokens": 6, "return_dict_in_generate": True}
    output = assisted(target, drafter, prompt(9), attention_mask=torch.ones(1, 9, dtype=torch.long), **first)
    mask = torch.ones_like(output.sequences)
    mask[:, -1] = 0
    more = {"attention_mask": mask, "max_new_tokens": 8}
    expected = plain(target, output.sequences, cache=copy.deepcopy(cache_of(output)), **more)
    assert torch.equal(assisted(target, drafter, output.sequences, cache=cache_of(output), **more), expected)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "bloom"])
def test_second_turn_of_a_batch_whose_rows_ended_apart(family, masked):
    """The returned cache has every row where plain generation has it, the padding after an early end included."""
    target = family_target(family)
    drafter = drafter_for(target)
    inputs, eos = rows_that_end_early(target)
    options = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": NEW, "return_dict_in_generate": True}
    first = target.generate(**inputs, **options, do_sample=False)
    ours = target.generate(**inputs, **options, do_sample=False, assistant_model=drafter)
    assert ours.sequences.tolist() == first.sequences.tolist()
    more = prompt(3, seed=9).expand(3, -1)
    ids = torch.cat([first.sequences, more], dim=1)
    mask = torch.cat([inputs["attention_mask"], (first.sequences[:, 7:] != 0).long(), torch.ones_like(more)], dim=1)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = mask if masked else torch.ones_like(mask)
    expected = target.generate(ids, **options, **{CACHE_NAME: copy.deepcopy(cache_of(first))}).tolist()
    assert target.generate(ids, **options, **{CACHE_NAME: copy.deepcopy(cache_of(ours))}).tolist() == expected
    again = target.generate(ids, **options, assistant_model=drafter, **{CACHE_NAME: cache_of(ours)})
    assert again.tolist() == expected


def test_a_returned_sliding_cache_stays_small():
    """Recording what a rollback needs ends with the call: afterwards the window is all that is kept."""
    target = family_target("mistral")
    turn = assisted(target, drafter_for(target), prompt(6), max_new_tokens=NEW, return_dict_in_generate=True)
    ids = torch.cat([turn.sequences, prompt(2, seed=1)], dim=1)
    more = plain(target, ids, max_new_tokens=40, return_dict_in_generate=True, **{CACHE_NAME: cache_of(turn)})
    layer = cache_of(more).layers[0]
    assert layer.keys.shape[-2] == layer.sliding_window - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_batch_under_autocast(dtype):
    """Keys and values of the drafter differ in dtype there."""
    target = small_target()
    inputs = padded_batch([6, 3])
    with torch.autocast("cpu", dtype=dtype):
        output = target.generate(**inputs, do_sample=False, max_new_tokens=8, assistant_model=drafter_for(target))
    assert output.shape == (2, 14)


@pytest.mark.parametrize("change", ["inference mode", "dtype"])
def test_a_kept_context_that_cannot_go_on(change):
    """Made in inference mode, or by the drafter in another dtype: a new context, the right text."""
    target = small_target()
    drafter = drafter_for(target)
    with torch.inference_mode(change == "inference mode"):
        turn = assisted(target, drafter, prompt(6), max_new_tokens=NEW, return_dict_in_generate=True)
    ids = torch.cat([turn.sequences.clone(), prompt(3, seed=9)], dim=1)
    expected = plain(target, ids, max_new_tokens=NEW)
    if change == "dtype":
        drafter.to(torch.bfloat16)
    output = assisted(target, drafter, ids, max_new_tokens=NEW, **{CACHE_NAME: cache_of(turn)})
    assert output.tolist() == expected.tolist()


def test_an_interrupted_turn_takes_the_context_with_it():
    """After an interrupt the target's cache holds tokens that the context does not, or the other way round."""
    target = small_target()
    drafter = drafter_for(target)
    turn = assisted(target, drafter, prompt(6), max_new_tokens=NEW, return_dict_in_generate=True)
    cache = cache_of(turn)
    held = cache.get_seq_length()
    ids = torch.cat([turn.sequences, prompt(3, seed=9)], dim=1)

    class Interrupting:
        puts = 0

        def put(self, value):
            self.puts += 1
            if self.puts == 4:
                raise KeyboardInterrupt

        def end(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        assisted(target, drafter, ids, max_new_tokens=NEW, streamer=Interrupting(), **{CACHE_NAME: cache})
    assert not hasattr(cache, "_dflash_context")
    cache.crop(held - cache.get_seq_length())
    expected = plain(target, ids, max_new_tokens=NEW)
    assert assisted(target, drafter, ids, max_new_tokens=NEW, **{CACHE_NAME: cache}).tolist() == expected.tolist()


@pytest.mark.parametrize("form", ["embeds", "new ids"])
def test_learned_positions_that_ids_do_not_count(form):
    """The table of positions ends at 64: what is in embeddings or in a cache counts too."""
    target = family_target("gpt2")
    limit = target.config.n_positions
    drafter = drafter_for(target)
    if form == "embeds":
        long = prompt(limit - 6)
        options = {"inputs_embeds": target.get_input_embeddings()(long), "max_new_tokens": 6}
        expected = target.generate(**options, do_sample=False)
        assert target.generate(**options, do_sample=False, assistant_model=drafter).tolist() == expected.tolist()
        return
    turn = plain(target, prompt(limit - 20), max_new_tokens=8, return_dict_in_generate=True)
    new = torch.cat([turn.sequences[:, -1:], prompt(4, seed=3)], dim=1)
    mask = torch.ones((1, turn.sequences.shape[1] + 4), dtype=torch.long)
    options = {"max_new_tokens": 8, "attention_mask": mask}
    expected = plain(target, new, **options, **{CACHE_NAME: copy.deepcopy(cache_of(turn))})
    output = assisted(target, drafter, new, **options, **{CACHE_NAME: cache_of(turn)})
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("lengths", [[6], [6, 3]])
def test_a_prefix_tuned_target(lengths):
    """PEFT puts its own preparation of inputs on the instance."""
    torch.manual_seed(0)
    target = get_peft_model(small_target(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    torch.nn.init.normal_(target.prompt_encoder["default"].embedding.weight)
    inputs = padded_batch(lengths)
    options = {"do_sample": False, "max_new_tokens": NEW}
    expected = target.generate(**inputs, **options)
    drafter = drafter_for(target.get_base_model())
    assert target.generate(**inputs, **options, assistant_model=drafter).tolist() == expected.tolist()


def test_a_prompt_tuned_target_is_refused():
    """Virtual tokens have no ids and no place in the drafter's context."""
    target = get_peft_model(small_target(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    drafter = drafter_for(target.get_base_model())
    with pytest.raises(UnsupportedGenerationError, match="virtual tokens"):
        target.generate(input_ids=prompt(6), attention_mask=torch.ones(1, 6), max_new_tokens=4, assistant_model=drafter)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "gemma3n_text"])
def test_states_of_each_position_of_unusual_targets(name):
    """Attentions of hybrids come from some layers only, layers share caches, hidden states have more dimensions."""
    target = build_target(name)
    options = {"max_new_tokens": 9, "return_dict_in_generate": True, "output_hidden_states": True}
    target.set_attn_implementation("eager")
    expected = plain(target, prompt(7), **options, output_attentions=True)
    output = assisted(target, drafter_for(target), prompt(7), **options, output_attentions=True)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in ((output.attentions, expected.attentions), (output.hidden_states, expected.hidden_states)):
        assert len(ours) == len(theirs) == 9
        for one, other in zip(ours, theirs):
            assert [None if x is None else x.shape for x in one] == [None if x is None else x.shape for x in other]
            for x, y in zip(one, other):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_a_norm_around_the_embedding_is_left_alone():
    """Other threads use the target meanwhile: its modules are not changed, not even for a moment."""

    class Normed(torch.nn.Embedding):
        def __init__(self, rows, width):
            super().__init__(rows, width)
            self.embed_norm = torch.nn.LayerNorm(width)
            self.assigned = []

        def __setattr__(self, name, value):
            if name == "embed_norm" and hasattr(self, "assigned"):
                self.assigned.append(name)
            super().__setattr__(name, value)

    target = small_target()
    normed = Normed(97, 32)
    target.set_input_embeddings(normed)
    ids = prompt(5)
    assert torch.equal(embed_tokens(target, ids, scale=None), normed.weight[ids])
    assert not normed.assigned


@pytest.mark.parametrize(
    "options", [{"num_return_sequences": 2, "do_sample": True}, {"return_dict_in_generate": True}, {"use_cache": False}]
)
def test_options_that_a_session_cannot_take(options):
    """Refused before anything runs."""
    target = small_target()
    session = DFlashSession(target, drafter_for(target))
    with pytest.raises(UnsupportedGenerationError, match="one answer a turn"):
        session.generate(prompt(5), max_new_tokens=4, **options)


@pytest.mark.parametrize("option", [{"dola_layers": "low"}, {"use_mtp": True}, {"assistant_early_exit": 1}])
def test_other_ways_of_decoding_are_refused(option):
    """They would be ignored."""
    target = small_target()
    (name,) = option
    if not hasattr(target.generation_config, name):
        pytest.skip(f"this transformers version has no {name}")
    with pytest.raises(ValueError, match=name):
        assisted(target, drafter_for(target), prompt(5), max_new_tokens=4, **option)
