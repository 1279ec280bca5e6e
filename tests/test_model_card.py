"""Cards: written with a seal, never over somebody's words; filled from recorded facts."""

import pytest
from conftest import tiny_drafter, tiny_target
from datasets import Dataset

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.model_card import card_data, fill_card, is_untouched, training_curve, write_card


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
