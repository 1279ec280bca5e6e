"""Arguments and constructor checks: every refusal names the value and the remedy."""

import pytest
from conftest import tiny_target
from datasets import Dataset
from training_helpers import arguments, make_trainer, rows, tiny_drafter
from transformers import TrainingArguments

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.errors import DatasetError, DFlashError, TargetMismatchError


def test_defaults_are_the_papers(tmp_path):
    """lr 6e-4, cosine, 4% warm-up, 6 epochs, clip 1.0, 3,072 tokens, 512 anchors; columns are kept for the collator."""
    args = DFlashTrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert (args.learning_rate, args.num_train_epochs, args.max_grad_norm) == (6e-4, 6.0, 1.0)
    assert (args.lr_scheduler_type, args.max_length, args.num_anchors) == ("cosine", 3072, 512)
    assert args.get_warmup_steps(1000) == 40 and args.get_warmup_steps(50) == 2
    assert args.remove_unused_columns is False and args.decay_gamma is None and args.loss_vocab_size is None
    assert args.features == "online" and args.optimizer == "adamw" and args.label_names == ["labels"]


@pytest.mark.parametrize(
    "more, words",
    [
        (dict(optimizer="sgd"), ["optimizer", "'sgd'", "adamw", "muon"]),
        (dict(features="cached"), ["features", "'cached'", "online", "memory", "disk"]),
        (dict(features="disk"), ["features='disk'", "features_dir"]),
        (dict(num_anchors=0), ["num_anchors", "at least 1", "0"]),
        (dict(max_length=0), ["max_length", "at least 1", "0"]),
        (dict(head_chunk_rows=-3), ["head_chunk_rows", "at least 1", "-3"]),
        (dict(decay_gamma=0.0), ["decay_gamma", "positive", "0.0"]),
        (dict(decay_gamma=-1.0), ["decay_gamma", "positive", "-1.0"]),
        (dict(loss_vocab_size=1), ["loss_vocab_size", "at least 2", "1"]),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, more, words):
    """Name, value and limit or choices are in the message."""
    with pytest.raises(DFlashError) as caught:
        arguments(tmp_path, **more)
    for word in words:
        assert word in str(caught.value), word


def test_features_dir_means_disk(tmp_path):
    """A folder alone is enough; with features='memory' the folder is not silently preferred."""
    assert arguments(tmp_path, features_dir=str(tmp_path)).features == "disk"
    assert arguments(tmp_path, features_dir=str(tmp_path), features="memory").features == "memory"


def test_arguments_survive_a_round_trip(tmp_path):
    """to_dict (what model cards and trackers read) holds our own fields, and can rebuild them."""
    args = arguments(tmp_path, decay_gamma=3.0, loss_vocab_size=10, optimizer="muon")
    values = args.to_dict()
    assert (values["decay_gamma"], values["loss_vocab_size"], values["optimizer"]) == (3.0, 10, "muon")
    assert values["num_anchors"] == 6


def test_arguments_of_another_class_are_refused(tmp_path):
    """Plain TrainingArguments lack the anchors; the message names both classes."""
    target = tiny_target()
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(DFlashError, match="TrainingArguments; DFlashTrainer needs DFlashTrainingArguments"):
        DFlashTrainer(model=tiny_drafter(target), target_model=target, args=args, train_dataset=rows())


@pytest.mark.parametrize(
    "other, words",
    [
        (dict(hidden=64), ["width 32", "64"]),
        (dict(layers=2), ["layer 2", "2 layers"]),
        (dict(vocab=97 + 1024), ["97", "1121"]),
        (dict(vocab=60), ["mask_token_id 90", "60 rows"]),
    ],
)
def test_a_target_that_does_not_fit_is_refused(tmp_path, other, words):
    """At construction, before any data is prepared, naming both numbers."""
    drafter = tiny_drafter(tiny_target(), mask_token_id=90)
    with pytest.raises(TargetMismatchError) as caught:
        make_trainer(tmp_path, target=tiny_target(**other), drafter=drafter)
    for word in words:
        assert word in str(caught.value), word


def test_a_target_without_head_is_refused(tmp_path):
    """The base model has no head to borrow; the message names the class to load."""
    target = tiny_target()
    with pytest.raises(TargetMismatchError, match="AutoModelForCausalLM"):
        make_trainer(tmp_path, target=target.model, drafter=tiny_drafter(target))


def test_nothing_to_train_on_is_refused(tmp_path):
    """No supervised token in the training data; and the same in the evaluation data."""
    silent = Dataset.from_dict({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 0, 0]]})
    with pytest.raises(DatasetError, match="nothing to train"):
        make_trainer(tmp_path, train=silent)
    with pytest.raises(DatasetError, match="nothing to train"):
        make_trainer(tmp_path, evaluation=silent)


def test_messages_need_a_tokenizer(tmp_path):
    """The message names `processing_class`."""
    chat = Dataset.from_dict({"messages": [[{"role": "user", "content": "hi"}]]})
    with pytest.raises(DatasetError, match="processing_class"):
        make_trainer(tmp_path, train=chat)


def test_target_name_is_recorded(tmp_path):
    """The drafter's config remembers its target, and a name that it has already stays."""
    target = tiny_target()
    target.config._name_or_path = "someone/a-target"
    first = make_trainer(tmp_path, target=target)
    assert first.model.config.target_name_or_path == "someone/a-target"
    drafter = tiny_drafter(target)
    drafter.config.target_name_or_path = "someone/the-first"
    assert (
        make_trainer(tmp_path, target=target, drafter=drafter).model.config.target_name_or_path == "someone/the-first"
    )


def test_training_without_evaluation_data_and_the_reverse(tmp_path):
    """Either data set may be missing; evaluating without one is refused by transformers."""
    target = tiny_target()
    evaluating = DFlashTrainer(
        model=tiny_drafter(target), target_model=target, args=arguments(tmp_path), eval_dataset=rows([9, 12])
    )
    assert evaluating.evaluate()["eval_block_acceptance_length"] >= 1
    with pytest.raises(ValueError, match="eval_dataset"):
        make_trainer(tmp_path).evaluate()
