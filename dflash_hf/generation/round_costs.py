"""What a round's parts cost: measured by `calibrate` and stored with the drafter, or the shape that a device has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import DFlashConfigError
from ..modeling_dflash import DFlashDraftModel
from ..packing import PackedLinear
from ..pretrained import ROUND_COSTS
from ..target import output_head, output_vocabulary

Points = tuple[tuple[int, float], ...]

# A target's forward pass over so many rows, in passes over one row. CPU: SmolLM2-135M, two cores; in fp32 past 16 rows
# matrix products are efficient again, in half precision they are so from the start (AMX). Accelerators read the weights
# once for all rows.
_CPU_SHAPE: Points = ((1, 1.0), (8, 2.35), (16, 3.9), (64, 4.5), (128, 6.4))
_PACKED_CPU_SHAPE: Points = ((1, 1.0), (8, 1.75), (16, 2.0), (64, 3.6), (128, 6.4))
_HALF_CPU_SHAPE: Points = ((1, 1.0), (8, 1.12), (16, 1.2), (64, 1.8), (128, 2.6))
_ACCELERATOR_SHAPE: Points = ((1, 1.0), (251, 2.0))


@dataclass(frozen=True)
class RoundCosts:
    """Costs at one batch size, in any unit of time.

    Attributes:
        draft: (proposals, cost of drafting them), ascending.
        verify: (tokens of one sequence, cost of the target's forward pass over them), ascending.
    """

    draft: Points
    verify: Points

    def of_draft(self, proposals: int) -> float:
        """Cost of a draft whose first `proposals` slots go through the head; nothing for none."""
        return interpolate(self.draft, proposals) if proposals else 0.0

    def of_verify(self, tokens: int) -> float:
        """Cost of the target's forward pass over `tokens` tokens of each sequence."""
        return interpolate(self.verify, tokens)


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Piecewise linear through `points`; constant before the first, and past the last as between the last two."""
    (left, low), *rest = points
    if x <= left or not rest:
        return low
    for right, high in rest:
        if x <= right or (right, high) == rest[-1]:
            return low + (high - low) * (x - left) / (right - left)
        left, low = right, high


def costs_for(drafter: DFlashDraftModel, target: nn.Module, *, batch_size: int, context_length: int) -> RoundCosts:
    """The stored table that is nearest in batch size, then in context; without one, the device's usual shape.

    Only tables that were measured on such a device, in the target's dtype and packed or not as it is, count.

    Args:
        drafter, target: the pair.
        batch_size: sequences in a round. A table of another batch size is read at the same total number of rows.
        context_length: tokens before the round.

    Raises:
        DFlashConfigError: if the stored tables are not what `calibrate` writes.
    """
    conditions = conditions_of(target)
    tables = [table for table in _stored(drafter) if conditions.items() <= table.items()]
    if not tables:
        return default_costs(drafter, target, batch_size=batch_size)
    table = min(tables, key=lambda t: (abs(t["batch_size"] - batch_size), abs(t["context_length"] - context_length)))
    draft, verify = (tuple((int(n), float(ms)) for n, ms in table[part]) for part in ("draft", "verify"))
    ratio = batch_size / table["batch_size"]
    if ratio == 1.0:
        return RoundCosts(draft=draft, verify=verify)
    most = verify[-1][0]
    longer = interpolate(verify, ratio * most) / verify[-1][1]
    return RoundCosts(
        draft=tuple((n, ms * longer) for n, ms in draft),
        verify=tuple((n, interpolate(verify, ratio * n)) for n in range(1, most + 1)),
    )


def default_costs(drafter: DFlashDraftModel, target: nn.Module, *, batch_size: int) -> RoundCosts:
    """Costs from the device's usual shape and the sizes of both models, in target passes over one row."""
    conditions = conditions_of(target)
    on_cpu = conditions["device"] == "cpu"
    shape = _ACCELERATOR_SHAPE
    if on_cpu:
        in_fp32 = _PACKED_CPU_SHAPE if conditions["packed"] else _CPU_SHAPE
        shape = in_fp32 if conditions["dtype"] == "float32" else _HALF_CPU_SHAPE
    config, text = drafter.config, target.config.get_text_config(decoder=True)
    rows = config.draft_vocab_size or drafter.num_frequent_tokens or output_vocabulary(target)
    head = rows * config.hidden_size
    whole = sum(parameter.numel() for parameter in target.parameters())
    if not getattr(text, "tie_word_embeddings", False):
        whole -= output_vocabulary(target) * text.hidden_size  # looked up, not multiplied
    tables = [table.weight.numel() for table in (drafter.embed_tokens, drafter.lm_head) if table is not None]
    body = (sum(parameter.numel() for parameter in drafter.parameters()) - sum(tables)) / max(whole, 1)
    if not on_cpu:  # small layers wait for their launch, not for their weights
        body = max(body, config.num_hidden_layers / text.num_hidden_layers)
    block, most = batch_size * config.block_size, 2 * config.block_size
    return RoundCosts(
        draft=tuple(
            (n, body * interpolate(shape, block) + head / max(whole, 1) * interpolate(shape, batch_size * n))
            for n in range(1, config.block_size + 1)
        ),
        verify=tuple((n, interpolate(shape, batch_size * n)) for n in range(1, most + 1)),
    )


def conditions_of(target: nn.Module) -> dict[str, Any]:
    """What stored tables are told apart by.

    Returns:
        `device` (`cpu`, or the accelerator's own name), `dtype`, and whether the linear layers are `packed`.
    """
    weight = target.get_input_embeddings().weight
    return {
        "device": torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else weight.device.type,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "packed": isinstance(output_head(target), PackedLinear),
    }


def _stored(drafter: DFlashDraftModel) -> list[dict[str, Any]]:
    tables = getattr(drafter.generation_config, ROUND_COSTS, None) or []
    for table in tables:
        numbers = [pair for part in ("draft", "verify") for pair in table.get(part, [])]
        whole = {"device", "dtype", "packed", "batch_size", "context_length", "draft", "verify"} <= table.keys()
        if not whole or not table["draft"] or not table["verify"] or any(not ms > 0 for _, ms in numbers):
            raise DFlashConfigError(
                f"generation_config.{ROUND_COSTS} holds a table that calibrate did not write: {table}. Run "
                "dflash_hf.calibrate(drafter, target) again, or set it to None."
            )
    return tables
