"""Data set and collator of a run, as its arguments ask."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers.utils import logging

from ..configuration_dflash import DFlashConfig
from ..data.features import build_feature_store, compute_states
from ..data.token_counts import most_frequent
from ..target import FeatureCapture
from .arguments import DFlashTrainingArguments
from .collator import DFlashDataCollator, DrafterDataset
from .packing import pack_lengths


def build_dataset(
    examples: Dataset,
    *,
    split: str,
    args: DFlashTrainingArguments,
    target: nn.Module,
    tokenizer: Any,
    layer_ids: list[int],
) -> DrafterDataset:
    """A data set for the trainer; the target's states are computed here unless `args.features` is `online`.

    Args:
        examples: of `prepare_dataset`.
        split: `train`, or a name that starts with `eval`; packing and final hidden states are for `train`.
        args: the trainer's.
        target: the frozen target.
        tokenizer: the target's, or None for examples that came as token ids.
        layer_ids: the drafter's taps.
    """
    needs_final = args.objective != "data" and split == "train"
    rows, features, final_states = None, None, None
    if args.packing and split == "train":
        lengths = [len(ids) for ids in examples["input_ids"]]
        rows = pack_lengths(lengths, capacity=args.packed_length or args.max_length)
    if args.features == "disk":
        progress = logging.tqdm(
            total=len(examples), desc=f"Features of the {split} examples", disable=args.disable_tqdm
        )
        with args.main_process_first(desc="features"), progress:
            features = build_feature_store(
                f"{args.features_dir}/{split}",
                target=target,
                dataset=examples,
                layer_ids=layer_ids,
                tokenizer=tokenizer,
                final_hidden_states=needs_final,
                on_progress=lambda done, count: progress.update(done - progress.n),
            )
        final_states = features.final_hidden_states if needs_final else None
    elif args.features == "memory":
        features, final_states = [], []
        with FeatureCapture(target, layer_ids) as capture:
            for ids in examples["input_ids"]:
                tapped, final = compute_states(target, capture, torch.tensor([ids], device=target.device))
                features.append(tapped[0].cpu())
                if needs_final:
                    final_states.append(final[0].cpu())
    return DrafterDataset(examples, features, final_states or None, rows)


def build_collator(
    counts: Counter[int] | None,
    *,
    args: DFlashTrainingArguments,
    config: DFlashConfig,
    gamma: float,
    vocab_size: int,
    compiled: bool,
) -> DFlashDataCollator:
    """The collator of a run.

    Args:
        counts: of `count_tokens` over the training examples, needed with `args.loss_vocab_size`.
        args: the trainer's.
        config: the drafter's.
        gamma: decay constant of the loss weights.
        vocab_size: rows of the target's embedding.
        compiled: whether attention is compiled, so that the shapes of batches should be few.
    """
    restricted = args.loss_vocab_size is not None and counts is not None
    return DFlashDataCollator(
        block_size=config.block_size,
        num_anchors=args.num_anchors,
        gamma=gamma,
        seed=args.data_seed if args.data_seed is not None else args.seed,
        weighting=args.loss_weighting,
        first_slot=0 if config.sample_from_anchor else 1,
        contiguous_prefix=args.contiguous_prefix,
        frequent=most_frequent(counts, args.loss_vocab_size) if restricted else None,
        negatives=args.loss_vocab_negatives,
        vocab_size=vocab_size,
        row_multiple=128 if compiled else 1,
        slot_multiple=args.num_anchors if compiled else 1,
    )
