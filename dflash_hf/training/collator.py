"""Examples -> a batch with its anchors, labels and loss weights, all known before the forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .anchors import IGNORE, block_labels, example_generator, sample_anchors, slot_weights

WEIGHTINGS = ("decay", "uniform", "dpace")


class DrafterDataset(Dataset):
    """Prepared examples with their index and the current epoch, and their target states where a store is given.

    Args:
        examples: `datasets.Dataset` with `input_ids` and `loss_mask`.
        features: indexable store of `[n, K * H_t]` tensors, or None.
        final_states: indexable store of `[n, H_t]` tensors, or None.
        rows: for packing, the example indices of each row; an item is then the list of a row's examples.
    """

    def __init__(self, examples, features=None, final_states=None, rows: list[list[int]] | None = None):
        self.examples = examples
        self.features = features
        self.final_states = final_states
        self.rows = rows
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent loader workers see the change

    @property
    def epoch(self) -> int:
        """The current epoch; the anchors depend on it."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Called at the start of an epoch."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.examples) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any] | list[dict[str, Any]]:
        return self._example(index) if self.rows is None else [self._example(i) for i in self.rows[index]]

    def _example(self, index: int) -> dict[str, Any]:
        row = self.examples[index]
        example = {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "index": index, "epoch": self.epoch}
        if self.features is not None:
            example["features"] = self.features[index]
        if self.final_states is not None:
            example["final_hidden_states"] = self.final_states[index]
        return example


@dataclass
class DFlashDataCollator:
    """Pads examples on the right, or lays several in a row, and draws their anchors.

    An example gets the same blocks alone, beside others and in a packed row. Blocks, labels and anchors never cross
    from one example into the next.

    Args:
        block_size: B.
        num_anchors: the most blocks an example; N of a batch is the largest number that one of its rows has.
        gamma: decay constant of the loss weights.
        seed: of the anchors, together with epoch and example index.
        pad_token_id: any valid id; padding is never seen.
        weighting: `decay`, `uniform`, or `dpace` (weights 1 here; they depend on the drafter).
        first_slot: the first slot that predicts (1, or 0 for drafters that sample from the anchor).
        contiguous_prefix: supervise a block up to its first unsupervised token only.
        frequent: tokens that the loss covers, or None for the whole vocabulary.
        negatives: further tokens drawn for each batch from the rest.
        vocab_size: needed with `frequent`.
        row_multiple, slot_multiple: S and N are rounded up to these, so that compiled attention sees few shapes.

    A batch holds `input_ids`, `attention_mask`, `position_ids` `[b, S]`; `anchors` (rows of S), `keep` `[b, N]`;
    `labels`, `loss_weights` `[b, N, B]`; `active_rows` `[R]`, the flat indices of slots with a weight;
    `label_places` `[U]`, the flat places in `[b, S]` whose states predict their labels, each once, and `label_place_of`
    `[R]`, which of these is a row's;
    `loss_normaliser`, fp32 scalar: the sum of the weights, with `dpace` the number of blocks that have one;
    `features` `[b, S, K * H_t]` and `final_hidden_states` `[b, S, H_t]` where the examples have them;
    `loss_token_ids` `[v]` with `frequent`. Packed rows add `document_ids` `[b, S]` (-1 on padding) and `documents`
    `[D, L]`, the flat places of each example's tokens in `input_ids` (-1 on padding).
    """

    block_size: int
    num_anchors: int
    gamma: float
    seed: int
    pad_token_id: int = 0
    weighting: str = "decay"
    first_slot: int = 1
    contiguous_prefix: bool = False
    frequent: torch.Tensor | None = None
    negatives: int = 0
    vocab_size: int | None = None
    row_multiple: int = 1
    slot_multiple: int = 1

    def __call__(self, examples: list[dict[str, Any] | list[dict[str, Any]]]) -> dict[str, torch.Tensor]:
        packed = isinstance(examples[0], list)
        rows = examples if packed else [[example] for example in examples]
        lengths = [[len(example["input_ids"]) for example in row] for row in rows]
        width = _round_up(max(sum(row) for row in lengths), self.row_multiple)
        blocks = [self._blocks_of_row(row) for row in rows]
        anchors, labels = zip(*blocks)
        slots = _round_up(max(1, *(len(row) for row in anchors)), self.slot_multiple)
        keep = torch.arange(slots)[None] < torch.tensor([[len(row)] for row in anchors])
        positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
        batch = {
            "input_ids": self._fill(rows, "input_ids", width, self.pad_token_id),
            "attention_mask": _pad([torch.ones(sum(row), dtype=torch.int64) for row in lengths], width),
            "position_ids": _pad(positions, width),
            "anchors": _pad(anchors, slots),
            "keep": keep,
            "labels": _pad(labels, slots, IGNORE),
        }
        if packed:
            ids = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
            batch["document_ids"] = _pad(ids, width, -1)
            batch["documents"] = _document_places(lengths, width)
        for key in ("features", "final_hidden_states"):
            if key in rows[0][0]:
                batch[key] = self._fill(rows, key, width, 0)
        gamma = self.gamma if self.weighting == "decay" else math.inf
        weights = slot_weights(labels=batch["labels"], gamma=gamma, first_slot=self.first_slot)
        if self.frequent is not None:
            batch["loss_token_ids"] = self._loss_tokens(rows[0][0])
            weights = weights * torch.isin(batch["labels"], self.frequent)
        batch["loss_weights"] = weights
        counted = (weights > 0).any(dim=-1).float() if self.weighting == "dpace" else weights
        batch["loss_normaliser"] = counted.sum()
        # Indexed here, on the CPU: on a GPU the same would make the host wait for the device.
        batch["active_rows"] = weights.flatten().nonzero().flatten()
        batch |= label_places(batch, width=width, first_slot=self.first_slot)
        return batch

    def _blocks_of_row(self, examples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchors `[n]`, as places in the row, and labels `[n, B]` of all blocks of a row's examples."""
        anchors, labels, start = [], [], 0
        for example in examples:
            input_ids, loss_mask = torch.as_tensor(example["input_ids"]), torch.as_tensor(example["loss_mask"])
            generator = example_generator(seed=self.seed, epoch=example["epoch"], index=example["index"])
            chosen, keep = sample_anchors(loss_mask=loss_mask, num_anchors=self.num_anchors, generator=generator)
            chosen, keep = chosen[keep], keep[keep]
            anchors.append(chosen + start)
            labels.append(
                block_labels(
                    input_ids=input_ids,
                    loss_mask=loss_mask,
                    anchors=chosen,
                    keep=keep,
                    block_size=self.block_size,
                    first_slot=self.first_slot,
                    contiguous_prefix=self.contiguous_prefix,
                )
            )
            start += len(input_ids)
        return torch.cat(anchors), torch.cat(labels)

    @staticmethod
    def _fill(rows: list[list[dict[str, Any]]], key: str, width: int, value: int) -> torch.Tensor:
        return _pad([torch.cat([torch.as_tensor(example[key]) for example in row]) for row in rows], width, value)

    def _loss_tokens(self, first: dict[str, Any]) -> torch.Tensor:
        others = torch.ones(self.vocab_size, dtype=torch.bool)
        others[self.frequent] = False
        others = others.nonzero().flatten()
        generator = example_generator(seed=self.seed + 1, epoch=first["epoch"], index=first["index"])
        drawn = others[torch.randperm(len(others), generator=generator)[: self.negatives]]
        return torch.cat([self.frequent, drawn]).sort().values


def label_places(batch: dict[str, torch.Tensor], *, width: int, first_slot: int) -> dict[str, torch.Tensor]:
    """`label_places` and `label_place_of`: blocks overlap, and what the target says at a place is needed once.

    Args:
        batch: with `anchors`, `labels` and `active_rows`.
        width: S.
        first_slot: the first slot that predicts.
    """
    active, slots = batch["active_rows"], batch["labels"].shape[-1]
    starts = torch.arange(len(batch["anchors"]))[:, None] * width + batch["anchors"]
    places, place_of = (starts.flatten()[active // slots] + active % slots - first_slot).unique(return_inverse=True)
    return {"label_places": places, "label_place_of": place_of}


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _pad(rows: list[torch.Tensor], width: int, value: int = 0) -> torch.Tensor:
    """Rows `[n_i, ...]` -> `[b, width, ...]`."""
    padded = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), value)
    for place, row in zip(padded, rows):
        place[: len(row)] = row
    return padded


def _document_places(lengths: list[list[int]], width: int) -> torch.Tensor:
    places = []
    for number, row in enumerate(lengths):
        start = number * width
        for length in row:
            places.append(torch.arange(start, start + length))
            start += length
    return pad_sequence(places, batch_first=True, padding_value=-1)
