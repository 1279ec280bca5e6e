"""Plain generation and generation with a drafter on the same prompts, side by side."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..generation.statistics import GenerationStats
from ..modeling_dflash import DFlashDraftModel


@dataclass
class Comparison:
    """Sums over prompts; ratios are properties.

    Attributes:
        prompts, identical: prompts run, and those whose token ids were the same.
        plain_tokens, plain_seconds: new tokens and wall time of plain generation.
        dflash_tokens, dflash_seconds: the same with the drafter, prefill included in both.
        stats: the rounds of all prompts, in order.
    """

    prompts: int = 0
    identical: int = 0
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    dflash_tokens: int = 0
    dflash_seconds: float = 0.0
    stats: GenerationStats = field(default_factory=GenerationStats)

    def as_dict(self) -> dict[str, Any]:
        """The numbers that a report needs."""
        plain = self.plain_tokens / self.plain_seconds if self.plain_seconds else 0.0
        dflash = self.dflash_tokens / self.dflash_seconds if self.dflash_seconds else 0.0
        stats, rounds = self.stats, max(self.stats.rounds, 1)
        rest = stats.total_seconds - stats.prefill_seconds - stats.draft_seconds - stats.verify_seconds
        return {
            "prompts": self.prompts,
            "identical_prompts": self.identical,
            "same_tokens": self.identical == self.prompts,
            "acceptance_length": self.stats.acceptance_length,
            "rounds": self.stats.rounds,
            "new_tokens": self.dflash_tokens,
            "plain_tokens_per_second": plain,
            "dflash_tokens_per_second": dflash,
            "speedup": dflash / plain if plain else 0.0,
            "draft_ms_per_round": 1000 * stats.draft_seconds / rounds,
            "verify_ms_per_round": 1000 * stats.verify_seconds / rounds,
            "rest_ms_per_round": 1000 * rest / rounds,
            "plain_ms_per_token": 1000 / plain if plain else 0.0,
        }


def compare(
    target: nn.Module,
    drafter: DFlashDraftModel,
    prompts: Iterable[dict[str, torch.Tensor]],
    *,
    max_new_tokens: int,
    warm_up: bool = True,
    generate_options: dict[str, Any] | None = None,
    streamer: Any = None,
    on_prompt: Any = None,
) -> Comparison:
    """Generate greedily for each prompt, plain and with the drafter, and compare ids and wall time.

    Args:
        prompts: inputs of `generate`, `input_ids [1, L]` and the like.
        max_new_tokens: for both.
        warm_up: run 8 tokens of the first prompt both ways before anything is timed.
        generate_options: further options for both.
        streamer: receives the text of the runs with the drafter.
        on_prompt: called with (prompt number, totals so far) after each prompt.
    """
    options = {"do_sample": False, **(generate_options or {})}
    total = Comparison()
    for number, inputs in enumerate(prompts):
        length = inputs["input_ids"].shape[1]
        if warm_up and number == 0:
            target.generate(**inputs, **options, max_new_tokens=8)
            target.generate(**inputs, **options, max_new_tokens=8, assistant_model=drafter)
        plain, plain_seconds = _timed(target, inputs, options | {"max_new_tokens": max_new_tokens})
        drafted, dflash_seconds = _timed(
            target,
            inputs,
            options | {"max_new_tokens": max_new_tokens, "assistant_model": drafter, "streamer": streamer},
        )
        total.prompts += 1
        total.identical += int(torch.equal(plain, drafted))
        total.plain_tokens += plain.shape[1] - length
        total.plain_seconds += plain_seconds
        total.dflash_tokens += drafted.shape[1] - length
        total.dflash_seconds += dflash_seconds
        total.stats.add(drafter.last_generation_stats)
        if on_prompt is not None:
            on_prompt(number, total)
    return total


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write numbers as JSON, under a temporary name first, so that an earlier result is never half overwritten."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _timed(target: nn.Module, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, float]:
    device = inputs["input_ids"].device
    _synchronize(device)
    started = time.perf_counter()
    output = target.generate(**inputs, **options)
    _synchronize(device)
    return output, time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    # A timing must not end before the accelerator has.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
