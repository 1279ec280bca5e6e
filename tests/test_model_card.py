"""Cards: written with a seal, never over somebody's words; filled from recorded facts."""

import json
from pathlib import Path

import pytest
from conftest import tiny_drafter, tiny_target
from datasets import Dataset
from huggingface_hub import ModelCard

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.model_card import card_data, fill_card, is_untouched, layout_of, training_curve, write_card


@pytest.fixture
def card(drafter):
    data = card_data(name="me/drafter", base_model="someone/target", license="mit", datasets=["a/b"])
    return fill_card(data=data, config=drafter.config, num_parameters=1234567, dtype="bfloat16")


def test_card_states_the_config_and_leaves_unknown_sections_out(card, drafter):
    text = str(card)
    for part in (
        "base_model: someone/target",
        "license: mit",
        "- a/b",
        "1.2 M",
        f"{drafter.config.block_size} (anchor",
    ):
        assert part in text
    assert "## Measured" not in text and "## Training" not in text and "None" not in text


def test_several_tasks_become_results_and_rows(drafter):
    """A task at two temperatures and another one: three entries of the model index, three rows, one command each."""
    common = {
        "prompts": 4,
        "identical_prompts": 4,
        "rounds": 7,
        "dataset_type": "openai/gsm8k",
        "dataset_name": "GSM8K",
    }
    common |= {"plain_tokens_per_second": 20.0, "dflash_tokens_per_second": 30.0}
    tasks = [
        {**common, "acceptance_length": 2.5, "speedup": 1.5, "command": "first"},
        {**common, "acceptance_length": 2.25, "speedup": 1.25, "command": "second", "settings": {"temperature": 1.0}},
        {**common, "acceptance_length": 3.125, "speedup": 2.0, "dataset_type": "a/mbpp", "dataset_name": "MBPP"},
    ]
    data = card_data(name="me/drafter", base_model="someone/target", benchmarks=tasks)
    card = fill_card(data=data, config=drafter.config, num_parameters=1, dtype="float32", benchmarks=tasks)
    again = ModelCard(str(card)).data
    found = {
        (result.dataset_name, (result.metric_args or {}).get("temperature"), result.metric_type): result.metric_value
        for result in again.eval_results
    }
    assert found["GSM8K", None, "acceptance_length"] == 2.5 and found["GSM8K", 1.0, "speedup"] == 1.25
    assert found["MBPP", None, "acceptance_length"] == 3.125 and found["MBPP", None, "dflash_tokens_per_second"] == 30
    assert len(found) == 9
    for row in ("| GSM8K | 4 | 4 | 2.500 |", "| GSM8K (temperature 1.0) | 4 | 4 | 2.250 |", "| MBPP | 4 | 4 | 3.125 |"):
        assert row in card.text
    assert "first" in card.text and "second" in card.text


def test_the_card_tells_only_the_engines_that_read_the_layout(drafter):
    """And no path of a local target."""
    data = card_data(name="me/drafter", base_model=str(Path.cwd()))
    assert data.base_model is None
    texts = {
        layout: str(fill_card(data=data, config=drafter.config, num_parameters=1, dtype="float32", layout=layout))
        for layout in ("dflash", "speculators", "other")
    }
    assert "sglang" in texts["dflash"] and '"method": "dflash"' in texts["dflash"]
    assert "vllm serve me/drafter" in texts["speculators"] and "sglang" not in texts["speculators"]
    assert "vllm" not in texts["other"]
    assert all(str(Path.cwd()) not in text and "AutoModel" in text for text in texts.values())
    assert layout_of(json.loads(json.dumps(drafter.config._on_disk()))) == "dflash"
    assert layout_of({"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"]}) == "speculators"


def test_a_written_card_is_untouched_until_a_person_edits_it(card, tmp_path):
    path = tmp_path / "README.md"
    write_card(card, path)
    text = path.read_text()
    assert is_untouched(text)
    assert not is_untouched(text.replace("someone/target", "someone/other", 1))
    assert not is_untouched("# Mine\n") and not is_untouched("")


def test_curve_keeps_the_last_evaluation_and_the_loss_before_each():
    log = []
    for step in range(10, 310, 10):
        log.append({"step": step, "loss": step / 100})
        log.append({"step": step, "eval_loss": 1.0, "eval_block_acceptance_length": 2.0, "eval_slot_accuracy": 0.5})
    curve = training_curve(log, rows=12)
    assert len(curve) <= 12 and curve[-1]["step"] == 300 and curve[-1]["loss"] == "3.000"


def test_trainer_refreshes_its_own_card_and_keeps_a_person_s(tmp_path):
    target = tiny_target()
    rows = [{"input_ids": list(range(5, 25)), "loss_mask": [0] * 4 + [1] * 16}] * 4
    arguments = DFlashTrainingArguments(str(tmp_path), max_steps=1, num_anchors=2, report_to="none", save_strategy="no")
    trainer = DFlashTrainer(tiny_drafter(target), target, arguments, train_dataset=Dataset.from_list(rows))
    trainer.train()
    path = tmp_path / "README.md"
    trainer.create_model_card(model_name="one", finetuned_from="someone/target")
    trainer.create_model_card(model_name="two", finetuned_from="someone/target", license="mit")
    assert "# two" in path.read_text() and "license: mit" in path.read_text() and "1 updates" in path.read_text()
    path.write_text(path.read_text() + "\nMy words.\n")
    trainer.create_model_card(model_name="three")
    assert "My words." in path.read_text() and "# two" in path.read_text()
