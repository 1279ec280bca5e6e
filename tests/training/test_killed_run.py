"""A run that is killed with SIGKILL in mid-epoch and started again ends with the weights of one that was not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_target
from peft import LoraConfig
from training_helpers import make_trainer, rows, tiny_drafter, weights_of
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from dflash_hf.training.lora import adapted

CASES = {
    "packing": dict(packing=True, max_length=60),
    "packing, adapter, muon": dict(packing=True, max_length=60, optimizer="muon"),
}


class Killed(TrainerCallback):
    """SIGKILL at the end of a step that is neither an epoch's last nor a checkpoint's."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder, case, *, kill=False, resume=None):
    """Three epochs of five steps, checkpoints every four."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    if "adapter" in case:
        torch.manual_seed(0)
        drafter = adapted(drafter, LoraConfig(r=4))
    trainer = make_trainer(
        folder,
        target=target,
        drafter=drafter,
        train=rows([31, 22, 17, 40, 55, 12, 9, 20, 33]),
        callbacks=[Killed()] if kill else None,
        max_steps=-1,
        num_train_epochs=3,
        per_device_train_batch_size=1,
        save_strategy="steps",
        save_steps=4,
        **CASES[case],
    )
    assert len(trainer.train_dataset) == 5
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == 15
    return weights_of(trainer.model)


@pytest.mark.parametrize("case", CASES)
def test_killed_run_ends_with_equal_weights(tmp_path, case):
    """Bit-equal parameters: the same order of rows, anchors, optimizer state and schedule."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path / "killed"), case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    checkpoint = get_last_checkpoint(str(tmp_path / "killed"))
    assert Path(checkpoint).name == "checkpoint-4"
    resumed = run(tmp_path / "killed", case, resume=checkpoint)
    whole = run(tmp_path / "whole", case)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], kill=True)
