"""A drafter of another family as the start of training: it works where the trainer computes the same, else it stops."""

import pytest
import torch
from conftest import GOLDEN, tiny_target
from datasets import Dataset

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.errors import DFlashError


def rows() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 90, (4, 24), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": ids, "loss_mask": [[1] * 24] * 4})


def trainer_of(case: str, tmp_path, **changes) -> DFlashTrainer:
    target = tiny_target("qwen3", vocab=104, hidden=24, layers=8, intermediate_size=40)
    drafter = DFlashDraftModel.from_pretrained(GOLDEN / case)
    args = DFlashTrainingArguments(
        tmp_path / "out",
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=2,
        num_anchors=3,
        use_cpu=True,
        **changes,
    )
    return DFlashTrainer(model=drafter, target_model=target, args=args, train_dataset=rows())


@pytest.mark.parametrize(
    "case",
    [
        "zlab_swa_mixed",
        "speculators_dflash_full",
        "speculators_dflash_swa_causal",
        "speculators_dflash_swa_noncausal",
        "speculators_sample_from_anchor",
        "muse_assistant",
    ],
)
def test_training_goes_on_and_is_saved_in_the_same_family(case, tmp_path):
    """The weights move, a checkpoint resumes exactly, and the final folder is of the family that it came from."""
    trainer = trainer_of(case, tmp_path)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in ("fc.weight", "norm.weight"))
    resumed = trainer_of(case, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    for name, tensor in after.items():
        assert torch.allclose(resumed.model.state_dict()[name], tensor, atol=1e-6), name
    trainer.save_model(str(tmp_path / "final"))
    again = DFlashDraftModel.from_pretrained(tmp_path / "final")
    assert again.config.family == DFlashDraftModel.from_pretrained(GOLDEN / case).config.family
    for name, tensor in after.items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("case", "family", "missing"),
    [
        ("dflash2_qwen_like", "DFlash 2", "candidate selector"),
        ("domino_like", "Domino", "GRU"),
        ("dspark_gated", "SpecForge DSpark", "Markov head"),
        ("deepspec_block7", "DeepSpec", "own embedding and head"),
        ("speculators_dflash_trimmed", "speculators", "own embedding and head"),
    ],
)
def test_what_the_trainer_does_not_compute_is_refused(case, family, missing, tmp_path):
    """Before anything is run, naming the family and what is missing."""
    with pytest.raises(DFlashError, match=f"{family} drafter.*{missing}"):
        trainer_of(case, tmp_path)
