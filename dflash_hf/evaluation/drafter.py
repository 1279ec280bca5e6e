"""How good a drafter is on a dataset: teacher-forced blocks, and real greedy generation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers.trainer_callback import PrinterCallback

from ..generation.statistics import GenerationStats
from ..modeling_dflash import DFlashDraftModel
from ..training.arguments import DFlashTrainingArguments
from ..training.trainer import DFlashTrainer


def evaluate_blocks(
    drafter: DFlashDraftModel,
    target: nn.Module,
    dataset: Dataset,
    *,
    tokenizer: Any = None,
    max_length: int = 3072,
    num_anchors: int = 512,
    batch_size: int = 4,
    seed: int = 42,
) -> dict[str, float]:
    """Loss, accuracy by slot and acceptance length of blocks after the text of the data (teacher forcing).

    Args:
        drafter: the drafter; its parameters are cast to fp32, as in training.
        target: the target; frozen.
        dataset: in a form that `prepare_dataset` takes.
        tokenizer: needed for messages.
        max_length: longer examples are cut.
        num_anchors: at most this many blocks an example, at random places of the answers.
        batch_size: examples in one forward pass.
        seed: of the places.

    Returns:
        `loss`, `block_acceptance_length`, `slot_accuracy`, `slot_accuracy_k` for every slot k.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = DFlashTrainingArguments(
            output_dir=folder,
            max_length=max_length,
            num_anchors=num_anchors,
            per_device_eval_batch_size=batch_size,
            seed=seed,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = DFlashTrainer(
            model=drafter, target_model=target, args=args, eval_dataset=dataset, processing_class=tokenizer
        )
        trainer.remove_callback(PrinterCallback)
        measured = trainer.evaluate()
    wanted = ("loss", "block_acceptance_length", "slot_accuracy")
    return {
        key.removeprefix("eval_"): value
        for key, value in measured.items()
        if key.removeprefix("eval_").startswith(wanted)
    }


def prompts_of(examples: Dataset) -> list[list[int]]:
    """The token ids before the first supervised token of each prepared example: what the target answers."""
    return [ids[: mask.index(1)] for ids, mask in zip(examples["input_ids"], examples["loss_mask"])]


def generate_greedily(
    target: nn.Module,
    drafter: DFlashDraftModel,
    prompts: Iterable[list[int]],
    *,
    max_new_tokens: int,
    on_prompt: Callable[[int, GenerationStats], None] | None = None,
) -> GenerationStats:
    """Answer every prompt greedily with the drafter and pool the statistics of all rounds.

    Args:
        target: the target.
        drafter: the drafter; it is put into evaluation mode while this runs.
        prompts: token ids.
        max_new_tokens: length limit of an answer.
        on_prompt: called with (prompt number, statistics so far) after each.
    """
    device = target.get_input_embeddings().weight.device
    total = GenerationStats()
    training = drafter.training
    drafter.eval()
    try:
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([prompt], device=device)
            target.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            total.add(drafter.last_generation_stats)
            if on_prompt is not None:
                on_prompt(number, total)
    finally:
        drafter.train(training)
    return total
