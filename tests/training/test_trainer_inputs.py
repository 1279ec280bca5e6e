"""What users hand to the Trainer beside one dataset: several, none, the wrong thing."""

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from datasets import Dataset, IterableDataset

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.errors import DatasetError, DFlashError

ROW = {"input_ids": list(range(5, 25)), "loss_mask": [0] * 4 + [1] * 16}


def make_trainer(tmp_path, *, train=None, evaluation=None, model=None, **options):
    target = tiny_target()
    options = {"max_steps": 1, "num_anchors": 2, "report_to": "none", "save_strategy": "no", **options}
    arguments = DFlashTrainingArguments(str(tmp_path), **options)
    train = Dataset.from_list([ROW] * 4) if train is None else train
    return DFlashTrainer(
        tiny_drafter(target) if model is None else model,
        target,
        arguments,
        train_dataset=train,
        eval_dataset=evaluation,
    )


@pytest.mark.parametrize("features", ["online", "memory"])
def test_several_evaluation_sets(tmp_path, features):
    """A dictionary gives one set of numbers a name."""
    sets = {"short": Dataset.from_list([ROW] * 2), "other": Dataset.from_list([ROW] * 3)}
    trainer = make_trainer(tmp_path, evaluation=sets, features=features)
    metrics = trainer.evaluate()
    assert {"eval_short_loss", "eval_other_block_acceptance_length"} <= metrics.keys()


def test_predict_takes_a_dataset(tmp_path):
    trainer = make_trainer(tmp_path)
    metrics = trainer.predict(Dataset.from_list([ROW] * 2)).metrics
    assert metrics["test_block_acceptance_length"] >= 1


def test_unused_columns_stay_whatever_is_asked(tmp_path):
    trainer = make_trainer(tmp_path, remove_unused_columns=True)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_local_target_path_is_not_recorded(tmp_path):
    """config.json and card would carry a path that means nothing to others."""
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    target.config._name_or_path = str(tmp_path / "target")
    arguments = DFlashTrainingArguments(str(tmp_path / "out"), max_steps=1, report_to="none")
    trainer = DFlashTrainer(tiny_drafter(tiny_target()), target, arguments, train_dataset=Dataset.from_list([ROW]))
    assert trainer.model.config.target_name_or_path is None
    target.config._name_or_path = "someone/target"
    trainer = DFlashTrainer(tiny_drafter(tiny_target()), target, arguments, train_dataset=Dataset.from_list([ROW]))
    assert trainer.model.config.target_name_or_path == "someone/target"


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ([ROW], ["list", "Dataset.from_list"]),
        (IterableDataset.from_generator(lambda: iter([ROW])), ["IterableDataset", "Dataset.from_generator"]),
        (
            Dataset.from_list([ROW, {"input_ids": [1, 5, 97, 4], "loss_mask": [0, 1, 1, 1]}]),
            ["Example 1", "token id 97", "97 rows", "target's tokenizer"],
        ),
    ],
    ids=["list", "stream", "foreign ids"],
)
def test_unusable_data_is_refused_in_words(tmp_path, data, parts):
    with pytest.raises(DatasetError) as caught:
        make_trainer(tmp_path, train=data)
    for part in parts:
        assert part in str(caught.value)


def test_a_model_that_is_no_drafter_is_refused(tmp_path):
    with pytest.raises(DFlashError, match="LlamaForCausalLM.*trains a DFlashDraftModel"):
        make_trainer(tmp_path, model=tiny_target())
    with pytest.raises(DFlashError, match="Linear.*trains a DFlashDraftModel"):
        make_trainer(tmp_path, model=torch.nn.Linear(2, 2))
