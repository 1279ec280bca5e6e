"""Time per round outside the two forward passes: this package's loop against transformers' own, same drafter.

    OMP_NUM_THREADS=1 python examples/round_overhead.py

A tiny random target (hidden 64, 2 layers) and drafter (1 layer, block 16), so that the forward passes do not hide the
rest. Runs alternate; medians of `--repeats` runs after a warm-up. About a minute on one CPU thread.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash_hf import DFlashConfig, DFlashDraftModel

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9}
console = Console()


class Clock:
    """Adds up the time spent inside a module's forward and counts the calls."""

    def __init__(self, module: torch.nn.Module):
        self.seconds, self.calls = 0.0, 0
        inner = module.forward

        @functools.wraps(inner)  # generate reads the signature of forward
        def forward(*args, **kwargs):
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        module.forward = forward


def main(
    new_tokens: Annotated[int, typer.Option(help="Tokens a run.")] = 120,
    repeats: Annotated[int, typer.Option(help="Runs of each loop.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Measure both loops, greedy and sampling."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    drafter = DFlashDraftModel(
        DFlashConfig.from_target(config, mask_token_id=3, num_hidden_layers=1, block_size=16, target_layer_ids=[0, 1])
    ).eval()
    clocks = Clock(target), Clock(drafter)
    prompt = torch.arange(4, 20)[None]
    result = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    table = Table(title="milliseconds a round outside the two forward passes")
    for heading in ("", "transformers' loop", "dflash_hf", "ratio"):
        table.add_column(heading, justify="right")
    for name, options in (("greedy", {"do_sample": False}), ("sampling", SAMPLING)):
        rest: dict[str, list[float]] = {"stock": [], "dflash_hf": []}
        for repeat in range(repeats + 2):
            for loop in rest:
                more = {"speculation_type": "dflash"} if loop == "stock" else {}
                for clock in clocks:
                    clock.seconds, clock.calls = 0.0, 0
                torch.manual_seed(repeat)
                started = time.perf_counter()
                target.generate(prompt, assistant_model=drafter, max_new_tokens=new_tokens, **options, **more)
                total = time.perf_counter() - started
                if repeat >= 2:  # the first two runs warm up
                    rest[loop].append(1000 * (total - sum(clock.seconds for clock in clocks)) / clocks[1].calls)
        stock, ours = (statistics.median(values) for values in rest.values())
        result[name] = {"stock_ms": stock, "dflash_hf_ms": ours, "ratio": ours / stock}
        table.add_row(name, f"{stock:.2f}", f"{ours:.2f}", f"{ours / stock:.2f}")
    console.print(table)
    if json_file is not None:
        temporary = json_file.with_name(json_file.name + ".tmp")
        temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, json_file)


if __name__ == "__main__":
    typer.run(main)
