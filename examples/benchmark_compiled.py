"""Compiled generation over a static cache: plain generate against the drafter, both compiled, capture time apart.

    python examples/benchmark_compiled.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --json result.json

For a GPU, where transformers compiles the steps of a static cache into CUDA graphs; the plain side is what a GPU user
compares with. Minutes, most of them for compiling. On a CPU it needs `--every-device` (inductor without CUDA graphs),
to see that it works: `--new-tokens 32 --repeats 1`. Without --target and --drafter: those of quickstart.py.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from quickstart import DRAFTER, QUESTIONS, console, load_target
from rich.table import Table
from transformers import CompileConfig

from dflash_hf import DFlashDraftModel
from dflash_hf.evaluation.comparison import write_result


def timed(model, inputs: dict[str, Any], options: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Output of generate and its wall time."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    output = model.generate(**inputs, **options)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return output, time.perf_counter() - started


def main(
    target: Annotated[str | None, typer.Option(help="Hub repository or folder of the target.")] = None,
    drafter: Annotated[str, typer.Option(help="Hub repository or folder of the drafter.")] = str(DRAFTER),
    prompt: Annotated[list[str] | None, typer.Option(help="Your own question; may be given several times.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens a run.")] = 256,
    repeats: Annotated[int, typer.Option(help="Timed runs of each loop and question.")] = 5,
    backend: Annotated[str, typer.Option(help="Backend of torch.compile.")] = "inductor",
    mode: Annotated[str | None, typer.Option(help="Mode of torch.compile.")] = None,
    every_device: Annotated[bool, typer.Option("--every-device", help="Compile on a CPU too.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Measure four loops: plain and with the drafter, as they are and compiled."""
    model, tokenizer = load_target(target)
    if model.device.type != "cuda" and not every_device:
        raise typer.BadParameter("there is no GPU; --every-device compiles on a CPU")
    draft = DFlashDraftModel.from_pretrained(drafter, dtype=model.dtype).to(model.device)
    config = CompileConfig(backend=backend, dynamic=False, mode=mode if mode or every_device else "reduce-overhead")
    config._compile_all_devices = every_device
    common = {"do_sample": False, "max_new_tokens": new_tokens}
    compiled = {"cache_implementation": "static", "compile_config": config}
    loops = {
        "plain": {},
        "plain, compiled": compiled,
        "DFlash": {"assistant_model": draft},
        "DFlash, compiled": {"assistant_model": draft, **compiled},
    }
    questions = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        for question in prompt or QUESTIONS
    ]
    # One cache length for all runs; otherwise a longer prompt would compile again.
    common["max_length"] = max(inputs["input_ids"].shape[1] for inputs in questions) + common.pop("max_new_tokens")
    result: dict[str, Any] = {name: {"first_run_seconds": 0.0, "seconds": [], "tokens": 0} for name in loops}
    texts: dict[int, list[int]] = {}
    for number, inputs in enumerate(questions):
        length = inputs["input_ids"].shape[1]
        for name, options in loops.items():
            result[name]["first_run_seconds"] += timed(model, inputs, common | options)[1]  # compiles and captures
        runs: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(repeats):  # interleaved
            for name, options in loops.items():
                output, seconds = timed(model, inputs, common | options)
                runs[name].append(seconds)
                result[name]["same_tokens"] = result[name].get("same_tokens", True) and (
                    output[0].tolist() == texts.setdefault(number, output[0].tolist())
                )
        for name in loops:
            result[name]["seconds"].append(statistics.median(runs[name]))
            result[name]["tokens"] += len(texts[number]) - length
    table = Table(title=f"{len(questions)} questions, greedy, {new_tokens} tokens, {model.dtype} on {model.device}")
    for heading in ("loop", "tokens/s", "ratio to plain, compiled", "seconds to compile", "same tokens"):
        table.add_column(heading, justify="right")
    for numbers in result.values():
        steady = sum(numbers["seconds"])
        numbers["tokens_per_second"] = numbers["tokens"] / steady
        numbers["capture_seconds"] = max(numbers["first_run_seconds"] - steady, 0.0)
    baseline = result["plain, compiled"]["tokens_per_second"]
    for name, numbers in result.items():
        numbers["ratio"] = numbers["tokens_per_second"] / baseline
        table.add_row(
            name,
            f"{numbers['tokens_per_second']:.1f}",
            f"{numbers['ratio']:.2f}",
            f"{numbers['capture_seconds']:.1f}",
            "yes" if numbers["same_tokens"] else "no",
        )
    console.print(table)
    result["acceptance_length"] = draft.last_generation_stats.acceptance_length
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    result["machine"] = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    result["machine"] |= {"dtype": str(model.dtype), "backend": backend, "mode": config.mode}
    if json_file is not None:
        write_result(result, json_file)


if __name__ == "__main__":
    typer.run(main)
