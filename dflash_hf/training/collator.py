"""Examples -> a batch with its anchors, labels and loss weights, all known before the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .anchors import block_labels, example_generator, sample_anchors, slot_weights


class DrafterDataset(Dataset):
    """Prepared examples with their index and the current epoch, and their features where a store is given.

    Args:
        examples: `datasets.Dataset` with `input_ids` and `loss_mask`.
        features: indexable store of `[n, K * H_t]` tensors, or None.
    """

    def __init__(self, examples, features=None):
        self.examples = examples
        self.features = features
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent loader workers see the change

    @property
    def epoch(self) -> int:
        """The current epoch; the anchors depend on it."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Called at the start of an epoch."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.examples[index]
        example = {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "index": index, "epoch": self.epoch}
        if self.features is not None:
            example["features"] = self.features[index]
        return example


@dataclass
class DFlashDataCollator:
    """Pads examples on the right and draws their anchors.

    Args:
        block_size: B.
        num_anchors: the most blocks an example; N of a batch is the largest number that one of its examples has.
        gamma: decay constant of the loss weights.
        seed: of the anchors, together with epoch and example index.
        pad_token_id: any valid id; padding is never seen.
        frequent: tokens that the loss covers, or None for the whole vocabulary.
        negatives: further tokens drawn for each batch from the rest.
        vocab_size: needed with `frequent`.

    A batch holds `input_ids`, `attention_mask` `[b, S]`; `anchors`, `keep` `[b, N]`; `labels`, `loss_weights` `[b, N,
    B]`; `active_rows` `[R]`, the flat indices of slots with a weight; `features` `[b, S, K * H_t]` where the examples
    have them; `loss_token_ids` `[v]` with `frequent`.
    """

    block_size: int
    num_anchors: int
    gamma: float
    seed: int
    pad_token_id: int = 0
    frequent: torch.Tensor | None = None
    negatives: int = 0
    vocab_size: int | None = None

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.as_tensor(example["input_ids"]) for example in examples]
        masks = [torch.as_tensor(example["loss_mask"]) for example in examples]
        anchors, keep, labels = [], [], []
        for example, input_ids, loss_mask in zip(examples, ids, masks):
            generator = example_generator(seed=self.seed, epoch=example["epoch"], index=example["index"])
            chosen, kept = sample_anchors(loss_mask=loss_mask, num_anchors=self.num_anchors, generator=generator)
            anchors.append(chosen)
            keep.append(kept)
            labels.append(
                block_labels(
                    input_ids=input_ids, loss_mask=loss_mask, anchors=chosen, keep=kept, block_size=self.block_size
                )
            )
        keep = torch.stack(keep)
        # Dense attention pays for every slot, so slots that no example of the batch fills are left out.
        used = max(1, int(keep.sum(dim=1).max()))
        batch = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "anchors": torch.stack(anchors)[:, :used],
            "keep": keep[:, :used],
            "labels": torch.stack(labels)[:, :used],
        }
        if "features" in examples[0]:
            batch["features"] = pad_sequence([example["features"] for example in examples], batch_first=True)
        weights = slot_weights(labels=batch["labels"], gamma=self.gamma)
        if self.frequent is not None:
            batch["loss_token_ids"] = self._loss_tokens(examples[0])
            weights = weights * torch.isin(batch["labels"], self.frequent)
        batch["loss_weights"] = weights
        # Indexed here, on the CPU: on a GPU the same would make the host wait for the device.
        batch["active_rows"] = weights.flatten().nonzero().flatten()
        return batch

    def _loss_tokens(self, first: dict[str, Any]) -> torch.Tensor:
        others = torch.ones(self.vocab_size, dtype=torch.bool)
        others[self.frequent] = False
        others = others.nonzero().flatten()
        generator = example_generator(seed=self.seed + 1, epoch=first["epoch"], index=first["index"])
        drawn = others[torch.randperm(len(others), generator=generator)[: self.negatives]]
        return torch.cat([self.frequent, drawn]).sort().values
