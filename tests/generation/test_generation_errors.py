"""Every message that generation raises names the value, the limit and the remedy."""

import copy

import pytest
import torch
from conftest import tiny_drafter
from generation_helpers import assisted, drafter_for, hook_count, plain, prompt, small_target
from transformers import (
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from dflash_hf import DFlashConfig, DFlashDraftModel, DFlashError
from dflash_hf.errors import DFlashConfigError, TargetMismatchError, UnsupportedGenerationError
from dflash_hf.generation.rollback import Rollback
from dflash_hf.generation.target_forward import cache_key
from dflash_hf.target import FeatureCapture, OutputHead, check_compatibility, decoder_layers


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


@pytest.fixture
def drafter(target):
    """A random drafter for the tiny Llama."""
    return drafter_for(target)


def message_of(error, call, *words):
    """The message of the error that `call` raises; all words are in it."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert isinstance(caught.value, DFlashError)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    return text


def test_a_target_without_a_cache():
    """The last line of defence: no cache was prepared."""
    message_of(
        UnsupportedGenerationError,
        lambda: cache_key(small_target(), {"cache": None, "use_cache": False}),
        "needs the target's key-value cache",
        "use_cache",
    )


def test_prompt_lookup(target, drafter):
    """Two sources of proposals."""
    message_of(
        UnsupportedGenerationError,
        lambda: assisted(target, drafter, prompt(5), max_new_tokens=4, prompt_lookup_num_tokens=3),
        "prompt_lookup_num_tokens=3",
        "assistant_model",
        "Pass one of them",
    )


def test_encoder_decoder(drafter):
    """Named by its class."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    target = T5ForConditionalGeneration(config).eval()
    message_of(
        UnsupportedGenerationError,
        lambda: assisted(target, drafter, prompt(5), max_new_tokens=4),
        "T5ForConditionalGeneration",
        "encoder-decoder",
        "decoder-only",
    )


def test_rollback_of_an_unknown_cache():
    """An object without crop."""

    class Strange:
        pass

    message_of(UnsupportedGenerationError, lambda: Rollback(Strange()), "Strange", "cannot forget rejected tokens")


# check_compatibility, through generate.


def test_hidden_size(target):
    """A drafter of a wider target: both widths are named, not a matrix shape."""
    drafter = drafter_for(small_target(hidden=48))
    text = message_of(
        TargetMismatchError,
        lambda: assisted(target, drafter, prompt(5), max_new_tokens=4),
        "width 48",
        "LlamaForCausalLM",
        "hidden size 32",
        "the target it was trained for",
    )
    assert "It was trained for" not in text
    drafter.config.target_name_or_path = "some/target-9b"
    message_of(
        TargetMismatchError,
        lambda: assisted(target, drafter, prompt(5), max_new_tokens=4),
        "It was trained for some/target-9b.",
    )


def test_width_of_a_borrowed_embedding(target):
    """Features may be of another width than the drafter, the embedding may not."""
    config = copy.deepcopy(drafter_for(target).config)
    config.hidden_size, config.target_hidden_size = 64, 32
    message_of(TargetMismatchError, lambda: check_compatibility(config, target), "hidden size 64", "width is 32")


def test_tap_beyond_the_target(target):
    """A drafter of a deeper target."""
    drafter = tiny_drafter(small_target(layers=9), target_layer_ids=[1, 7])
    message_of(
        TargetMismatchError,
        lambda: assisted(target, drafter, prompt(5), max_new_tokens=4),
        "taps target layer 7",
        "has 4 layers (ids 0 to 3)",
        "the target it was trained for",
    )


def test_mask_id_outside_the_embedding(target):
    """A drafter that was trained with an enlarged embedding."""
    drafter = drafter_for(small_target(vocab=120), mask_token_id=110)
    message_of(
        TargetMismatchError,
        lambda: assisted(target, drafter, prompt(5), max_new_tokens=4),
        "mask_token_id 110",
        "97 rows",
        "larger embedding",
        "use the target it was trained for",
    )


def test_vocabulary_mismatch(target):
    """More than padding."""
    drafter = drafter_for(small_target(vocab=2048))
    message_of(
        TargetMismatchError,
        lambda: assisted(target, drafter, prompt(5), max_new_tokens=4),
        "vocabulary of 2048 tokens",
        "has 97",
        "less than 1024 rows",
        "the target it was trained for",
    )


@pytest.mark.parametrize("vocab", [90, 128, 1120])
def test_padded_vocabulary_is_allowed(vocab, target):
    """Less than 1024 rows of padding, in either direction: the ids agree."""
    drafter = drafter_for(small_target(vocab=vocab))
    expected = plain(target, prompt(5, vocab=90), max_new_tokens=17)
    assert assisted(target, drafter, prompt(5, vocab=90), max_new_tokens=17).tolist() == expected.tolist()


@pytest.mark.parametrize("block_size", [1, 9, 16, -3])
def test_inference_block_size(block_size, target, drafter):
    """The trained size is the limit; a block of one proposes nothing."""
    drafter.generation_config.block_size = block_size
    message_of(
        DFlashConfigError,
        lambda: assisted(target, drafter, prompt(5), max_new_tokens=4),
        f"generation_config.block_size is {block_size}",
        "blocks of 8",
        "2 to 8",
    )
    assert hook_count(target) == 0


@pytest.mark.parametrize("block_size", [2, 5, 8, None])
def test_inference_block_size_in_range(block_size, target, drafter):
    """Unset means the trained one."""
    drafter.generation_config.block_size = block_size
    expected = plain(target, prompt(5), max_new_tokens=17)
    assert assisted(target, drafter, prompt(5), max_new_tokens=17).tolist() == expected.tolist()
    assert max(drafter.last_generation_stats.proposed) == (block_size or 8) - 1


def test_inference_block_size_zero(target, drafter):
    """0 is a value out of range too, not "unset"."""
    drafter.generation_config.block_size = 0
    message_of(
        DFlashConfigError,
        lambda: assisted(target, drafter, prompt(5), max_new_tokens=4),
        "generation_config.block_size is 0",
        "2 to 8",
    )


# Parts of a target.


def test_target_without_a_head(target):
    """A bare decoder."""
    bare = LlamaModel(target.config)
    bare.get_output_embeddings = lambda: None
    message_of(
        TargetMismatchError,
        lambda: OutputHead(bare, drafter_for(target).config),
        "LlamaModel",
        "no output head",
        "AutoModelForCausalLM",
    )


def test_target_without_decoder_layers(target):
    """The number that was looked for is named."""
    target.config.num_hidden_layers = 5
    message_of(TargetMismatchError, lambda: decoder_layers(target), "5 decoder layers", "LlamaForCausalLM")


def test_tapped_layer_that_did_not_run(target):
    """Hooks that were bypassed are noticed instead of giving old features."""
    with FeatureCapture(target, [1]) as capture:
        message_of(TargetMismatchError, lambda: capture.take(torch.device("cpu")), "Target layer 1", "compiled")


@pytest.mark.parametrize("block_size", [1, 0])
def test_trained_block_size(block_size, target):
    """Refused when the config is made."""
    message_of(
        DFlashConfigError,
        lambda: DFlashConfig(
            vocab_size=97, mask_token_id=3, target_layer_ids=[0], num_hidden_layers=1, block_size=block_size
        ),
        f"block_size is {block_size}",
        "at least 2",
    )


def test_errors_are_value_errors_and_leave_the_target_usable(target, drafter):
    """Callers who catch ValueError keep working, and the next call is as always."""
    expected = plain(target, prompt(5), max_new_tokens=8)
    with pytest.raises(ValueError):
        assisted(target, drafter, prompt(5), max_new_tokens=4, num_beams=2)
    assert hook_count(target) == 0
    assert drafter.last_generation_stats is None
    assert assisted(target, drafter, prompt(5), max_new_tokens=8).tolist() == expected.tolist()
    assert isinstance(drafter, DFlashDraftModel)
