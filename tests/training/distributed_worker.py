"""One rank of test_distributed.py: a short run on a CPU; writes what it saw and where it ended."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from training_helpers import make_trainer, rows, tiny_drafter, tiny_target, weights_of
from transformers import TrainerCallback

from dflash_hf.training.lora import adapted


class Snapshots(TrainerCallback):
    """Weights after every step."""

    def __init__(self):
        self.weights = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(weights_of(getattr(model, "module", model)))


def rare_rows():
    """Two examples of the two frequent tokens, two whose every label is rare.

    With one example a rank, a rank has no label in at least one step. All other tokens are negatives, so that the draw
    of negatives, which is a batch's own, does not matter.
    """
    ids = [[5, 6] + [10, 11] * 6, [5, 6] + [11, 10] * 8, [5, 6] + list(range(20, 30)), [5, 6] + list(range(30, 38))]
    return Dataset.from_dict({"input_ids": ids, "loss_mask": [[0, 0] + [1] * (len(row) - 2) for row in ids]})


def run(folder, batch_size, peft_config=None, **more):
    """A run of two epochs with SGD; returns steps' weights, the (epoch, index) pairs of this rank, and metrics."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    if peft_config is not None:
        torch.manual_seed(0)  # the adapter's first weights
        drafter = adapted(drafter, peft_config)
    spy = Snapshots()
    trainer = make_trainer(
        folder,
        target=target,
        drafter=drafter,
        callbacks=[spy],
        optimizers=(torch.optim.SGD(drafter.parameters(), lr=0.1), None),
        evaluation=rows([9, 30, 14, 22, 12], seed=4),
        **{
            **dict(
                train=rows([6, 40, 9, 23]),
                per_device_train_batch_size=batch_size,
                per_device_eval_batch_size=2,
                max_steps=-1,
                num_train_epochs=2,
                max_grad_norm=0.0,
                lr_scheduler_type="constant",
                num_anchors=12,
                logging_strategy="steps",
                logging_steps=1,
            ),
            **more,
        },
    )
    seen, inner = [], trainer.data_collator

    def collator(examples):
        rows = [row if isinstance(row, list) else [row] for row in examples]
        seen.extend((example["epoch"], example["index"]) for row in rows for example in row)
        return inner(examples)

    trainer.data_collator = collator
    metrics = {key: value for key, value in trainer.evaluate().items() if "accuracy" in key or "loss" in key}
    metrics["eval_block_acceptance_length"] = trainer.state.log_history[-1]["eval_block_acceptance_length"]
    seen.clear()
    trainer.train()
    keys = ("loss", "slot_accuracy", "slot_accuracy_1", "block_acceptance_length")
    log = [[entry[key] for key in keys] for entry in trainer.state.log_history if "loss" in entry]
    return {"weights": spy.weights, "seen": seen, "metrics": metrics, "log": log}


def everything(folder, batch_size):
    """All cases of the test."""
    packed = dict(train=rows([6, 28, 9, 23, 12, 30, 15, 20, 8, 33]), packing=True, max_length=60)
    return {
        "packed, kl, dpace": run(
            folder / "packed", batch_size // 2, **packed, objective="target_kl", loss_weighting="dpace"
        ),
        "lora, argmax": run(
            folder / "lora", batch_size, peft_config=LoraConfig(r=4), objective="target_argmax", contiguous_prefix=True
        ),
        "plain": run(folder / "plain", batch_size),
        "rare": run(folder / "rare", batch_size // 2, train=rare_rows(), loss_vocab_size=2, loss_vocab_negatives=97),
    }


if __name__ == "__main__":
    rank, out = int(sys.argv[1]), Path(sys.argv[2])
    result = everything(out / "runs", batch_size=2)
    torch.save(result, out / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
