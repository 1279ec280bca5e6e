"""A drafter's folder loaded as another model: refused with the way to load it, where generate can see it."""

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline
from transformers.pipelines import base as pipelines_base

import dflash_hf
from dflash_hf.errors import UnsupportedGenerationError

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def pair(tmp_path):
    """A target, a drafter for it, its folder with the target's tokenizer, and that tokenizer."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    folder = tmp_path / "drafter"
    drafter.save_pretrained(folder)
    words = {f"w{i}": i for i in range(97)}
    bare = Tokenizer(models.WordLevel(words, unk_token="w4"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="w4", pad_token="w0", bos_token="w1")
    tokenizer.save_pretrained(folder)
    return target, drafter, folder, tokenizer


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_a_drafter_loaded_by_an_auto_class_is_refused(pair, auto):
    """transformers builds a Qwen3 with random weights without a word; generate refuses it by name."""
    target, _, folder, _ = pair
    mistaken = auto.from_pretrained(folder)
    assert type(mistaken).__name__.startswith("Qwen3")
    with pytest.raises(UnsupportedGenerationError, match=rf"DFlashDraftModel.from_pretrained\('{folder}'\)"):
        target.generate(PROMPT, assistant_model=mistaken, max_new_tokens=4)


def test_pipeline_refuses_a_name_and_takes_a_drafter(pair):
    target, drafter, folder, tokenizer = pair
    with pytest.raises(UnsupportedGenerationError, match="pipeline would load a name with AutoModel"):
        pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=str(folder))
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    text = pipe("w5 w6 w7", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    assert text == plain("w5 w6 w7", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert drafter.last_generation_stats.rounds > 0


def test_other_assistants_pass(pair, tmp_path):
    """An ordinary assistant, as an object and by name."""
    target, _, _, tokenizer = pair
    assistant = tiny_target(seed=3)
    plain = target.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert target.generate(PROMPT, assistant_model=assistant, max_new_tokens=6, do_sample=False).equal(plain)
    assistant.save_pretrained(tmp_path / "assistant")
    tokenizer.save_pretrained(tmp_path / "assistant")
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=str(tmp_path / "assistant"))
    assert pipe("w5", max_new_tokens=2, do_sample=False)


def test_uninstall_gives_the_pipeline_its_own_function_back(pair):
    target, _, folder, tokenizer = pair
    dflash_hf.uninstall()
    try:
        assert not hasattr(pipelines_base.load_assistant_model, "_dflash_original")
    finally:
        dflash_hf.install()
        dflash_hf.install()
    original = pipelines_base.load_assistant_model._dflash_original
    assert not hasattr(original, "_dflash_original")
    assert pipelines_base.load_assistant_model(target, None, None) == (None, None)
