"""`calibrate`: measure what a round's parts cost for a pair on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessorList

from ..errors import DFlashConfigError
from ..modeling_dflash import DFlashDraftModel
from ..pretrained import ROUND_COSTS
from ..target import FeatureCapture, check_compatibility
from .candidate_generator import DFlashCandidateGenerator
from .processors import Processors
from .rollback import Rollback
from .round_costs import conditions_of
from .target_forward import cache_key, no_cache


@torch.no_grad()
def calibrate(
    drafter: DFlashDraftModel,
    target: nn.Module,
    *,
    batch_sizes: Sequence[int] = (1,),
    context_lengths: Sequence[int] = (256,),
    repeats: int = 7,
) -> list[dict[str, Any]]:
    """Measure draft and verification, and keep the table on `drafter.generation_config`.

    From then on block lengths are chosen by these costs on this device, for a target in this dtype, packed or not as it
    is; `save_pretrained` writes them. Run it when nothing else keeps the machine busy. Other tables stay.

    Args:
        drafter: the draft model.
        target: the model that it drafts for.
        batch_sizes: sequences in a round.
        context_lengths: tokens before the round.
        repeats: timings of each size; the shortest counts, the others had to wait for something else.

    Returns:
        the new tables: `device`, `dtype`, `packed`, `threads`, `batch_size`, `context_length`, and in milliseconds
        `draft` (`[proposals, ms]`) and `verify` (`[tokens of one sequence, ms]`).

    Raises:
        TargetMismatchError: if drafter and target do not fit.
        DFlashConfigError: for a size below 1.
    """
    for name, values in (("batch_sizes", batch_sizes), ("context_lengths", context_lengths), ("repeats", [repeats])):
        if not values or min(values) < 1:
            raise DFlashConfigError(f"calibrate needs {name} of at least 1, got {values}.")
    check_compatibility(drafter.config, target)
    training = drafter.training, target.training
    drafter.eval(), target.eval()
    try:
        tables = [
            _measure(drafter, target, batch_size=batch_size, context_length=context_length, repeats=repeats)
            for batch_size in batch_sizes
            for context_length in context_lengths
        ]
    finally:
        drafter.train(training[0])
        target.train(training[1])
    conditions = conditions_of(target)
    known = getattr(drafter.generation_config, ROUND_COSTS, None) or []
    others = [table for table in known if not conditions.items() <= table.items()]
    setattr(drafter.generation_config, ROUND_COSTS, others + tables)
    return tables


def _measure(
    drafter: DFlashDraftModel, target: nn.Module, *, batch_size: int, context_length: int, repeats: int
) -> dict[str, Any]:
    device = target.get_input_embeddings().weight.device
    vocabulary = target.get_input_embeddings().weight.shape[0]
    # Any tokens cost the same; these are the same in every run.
    numbers = torch.arange(batch_size * context_length).view(batch_size, -1) * 7919 % vocabulary
    ids = numbers.to(device)
    key = cache_key(target, {"use_cache": True})
    with FeatureCapture(target, drafter.config.target_layer_ids) as capture:
        with capture.recording():
            last = {"logits_to_keep": 1} if target._supports_logits_to_keep() else {}
            cache = target(input_ids=ids, use_cache=True, return_dict=True, **last).get(key)
        if cache is None:
            raise no_cache(target)
        generator = DFlashCandidateGenerator(
            drafter, target, processors=Processors(LogitsProcessorList()), do_sample=False, batch_size=batch_size
        )
        features = capture.take(generator.device)
    positions = torch.arange(context_length, device=generator.device).expand(batch_size, -1)
    generator.context.add(features, positions)
    generator.context.flush()
    rollback = Rollback(cache)
    block = generator.block_size

    def verify(count: int) -> None:
        rollback.remember()
        block_ids = ids[:, :1].expand(-1, count)
        target(input_ids=block_ids, **{key: cache}, use_cache=True, return_dict=True)
        rollback.keep(ran=count, kept=0)

    def draft(count: int) -> None:
        # As after a round that accepted one proposal.
        generator.context.add(features[:, :2], positions[:, -1:] + 1 + torch.arange(2, device=generator.device))
        generator.draft(ids[:, -1:], count, prefixes=lambda: list(ids.split(1)))
        generator.context.lengths = [context_length] * batch_size
        generator.context.cache.crop(context_length)

    most = max(generator.copied_tokens, block) + 1
    return {
        **conditions_of(target),
        "threads": torch.get_num_threads(),
        "batch_size": batch_size,
        "context_length": context_length,
        "draft": _shortest(draft, _sizes(generator.max_proposals), repeats, device),
        "verify": _shortest(verify, _sizes(most), repeats, device),
    }


def _sizes(most: int) -> list[int]:
    """1 to `most`, denser at first."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    return [size for size in sizes if size < most] + [most]


def _shortest(run: Callable[[int], None], sizes: list[int], repeats: int, device: torch.device) -> list[list[float]]:
    """`[size, milliseconds]`, sizes interleaved, so that a slow moment does not hit one of them alone."""
    seconds = dict.fromkeys(sizes, float("inf"))
    for repeat in range(repeats + 1):
        for size in sizes:
            _wait(device)
            started = time.perf_counter()
            run(size)
            _wait(device)
            if repeat:  # the first run warms up
                seconds[size] = min(seconds[size], time.perf_counter() - started)
    costs, cost = [], float("inf")
    for size in reversed(sizes):  # fewer tokens never cost more
        cost = min(cost, seconds[size])
        costs.append([size, round(1000 * cost, 4)])
    return costs[::-1]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
