"""Milliseconds a round, split into draft, verification and the rest: this package, transformers' own loop, z-lab's.

    OMP_NUM_THREADS=1 python examples/benchmark_round.py

The same weights in every loop, runs interleaved, medians of `--repeats` runs after a warm-up. By default a tiny random
target (hidden 64, 2 layers) and drafter (1 layer, block 16), so that the forward passes do not hide the rest: about a
minute on one CPU thread. z-lab's loop is measured where its package is installed (pip install --no-deps dflash==0.1.0).
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.evaluation.comparison import write_result

SAMPLING = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
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


def tiny_pair() -> tuple[torch.nn.Module, DFlashDraftModel]:
    """A random target and a drafter that fits it."""
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
    shape = {"num_hidden_layers": 1, "block_size": 16, "target_layer_ids": [0, 1]}
    drafter = DFlashDraftModel(DFlashConfig.from_target(config, mask_token_id=3, **shape))
    # The other loops verify whole blocks; a random drafter would not be asked again by cost.
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    return AutoModelForCausalLM.from_config(config).eval(), drafter.eval()


def loops(target, drafter, new_tokens: int) -> dict[str, tuple[Callable, Clock]]:
    """Each loop as `run(prompt, sampling options or {})`, with the clock of the drafter that it uses."""
    ours = Clock(drafter)

    def generate(prompt, sampling, **more):
        options = {"do_sample": bool(sampling), "max_new_tokens": new_tokens, **sampling, **more}
        return target.generate(prompt, **options)

    found = {
        "transformers": (
            lambda p, s: generate(p, s, assistant_model=drafter, speculation_type="dflash"),
            ours,
        ),
        "dflash_hf": (lambda p, s: generate(p, s, assistant_model=drafter), ours),
    }
    if importlib.util.find_spec("dflash") is not None:
        from dflash.model import DFlashDraftModel as ZLabDraftModel
        from dflash.model import dflash_generate

        with tempfile.TemporaryDirectory() as folder:
            drafter.save_pretrained(folder)
            theirs = ZLabDraftModel.from_pretrained(folder, dtype=drafter.dtype).eval()

        def zlab(prompt, sampling):
            options = sampling or {"temperature": 0.0}
            return dflash_generate(theirs, target, prompt, new_tokens, None, **options)

        found["z-lab 0.1.0"] = (zlab, Clock(theirs))
    return found


def main(
    new_tokens: Annotated[int, typer.Option(help="Tokens a run.")] = 120,
    repeats: Annotated[int, typer.Option(help="Runs of each loop.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Measure all loops, greedy and sampling."""
    target, drafter = tiny_pair()
    verify = Clock(target)
    prompt = torch.arange(4, 20)[None]
    result = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    for name, sampling in (("greedy", {}), ("sampling", SAMPLING)):
        measured = measure(loops(target, drafter, new_tokens), verify, prompt, sampling, repeats)
        baseline = measured["transformers"]["rest_ms"]
        table = Table(title=f"{name}: milliseconds a round")
        for heading in ("loop", "draft", "verification", "rest", "rest / transformers'"):
            table.add_column(heading, justify="right")
        for loop, numbers in measured.items():
            numbers["rest_ratio"] = numbers["rest_ms"] / baseline
            cells = (numbers["draft_ms"], numbers["verify_ms"], numbers["rest_ms"], numbers["rest_ratio"])
            table.add_row(loop, *(f"{cell:.2f}" for cell in cells))
        console.print(table)
        result[name] = measured
    if json_file is not None:
        write_result(result, json_file)


def measure(found, verify: Clock, prompt, sampling, repeats: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved runs of every loop."""
    runs: dict[str, list[tuple[float, float, float]]] = {loop: [] for loop in found}
    for repeat in range(repeats + 2):
        for loop, (run, draft) in found.items():
            for clock in (verify, draft):
                clock.seconds, clock.calls = 0.0, 0
            torch.manual_seed(repeat)
            started = time.perf_counter()
            run(prompt, sampling)
            total = time.perf_counter() - started
            if repeat >= 2:  # the first two runs warm up
                parts = (draft.seconds, verify.seconds, total - draft.seconds - verify.seconds)
                runs[loop].append(tuple(1000 * seconds / draft.calls for seconds in parts))
    names = ("draft_ms", "verify_ms", "rest_ms")
    return {
        loop: {part: statistics.median(column) for part, column in zip(names, zip(*rows))}
        for loop, rows in runs.items()
    }


if __name__ == "__main__":
    typer.run(main)
