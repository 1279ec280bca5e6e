"""Measure a drafter on GSM8K test questions: identity with plain generation, acceptance length, both speeds.

    python examples/benchmark_gsm8k.py --data gsm8k_test.jsonl --limit 40 --json result.json

`--data` is a local JSONL file with a `question` column; without it the set comes from the Hub (openai/gsm8k). Target
and drafter as in quickstart.py. Greedy, fp32, 200 new tokens: about 15 minutes on two CPU cores. How much of a block is
verified is chosen by cost; acceptance lengths are stated for whole blocks, which `--whole-blocks` asks for.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from datasets import load_dataset
from quickstart import (
    DRAFTER,
    Drafter,
    Dtype,
    Json,
    Pack,
    Proposals,
    Target,
    WholeVocabulary,
    configure,
    console,
    load_target,
)
from rich.progress import track

from dflash_hf import DFlashDraftModel
from dflash_hf.data.sources import load_rows
from dflash_hf.evaluation.comparison import Comparison, compare, write_result


def main(
    data: Annotated[str | None, typer.Option(help="JSONL file with a `question` column.")] = None,
    limit: Annotated[int, typer.Option(help="Number of questions, from the first.")] = 40,
    target: Target = None,
    drafter: Drafter = str(DRAFTER),
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 200,
    stock: Annotated[bool, typer.Option("--stock", help="Also run transformers' own DFlash loop.")] = False,
    num_assistant_tokens: Proposals = None,
    whole_blocks: Annotated[
        bool, typer.Option("--whole-blocks", help="Verify whole blocks, whatever they cost.")
    ] = False,
    dtype: Dtype = None,
    pack: Pack = None,
    whole_vocabulary: WholeVocabulary = False,
    json_file: Json = None,
) -> None:
    """Run the comparison and print the totals."""
    model, tokenizer = load_target(target, dtype)
    draft = DFlashDraftModel.from_pretrained(drafter, dtype=model.dtype).to(model.device)
    settings = configure(model, draft, pack=pack, whole_vocabulary=whole_vocabulary)
    console.print(settings)
    if num_assistant_tokens is not None:
        draft.generation_config.num_assistant_tokens = num_assistant_tokens
    if whole_blocks:
        draft.generation_config.num_assistant_tokens_schedule = "constant"
    rows = load_rows(data) if data else load_dataset("openai/gsm8k", "main", split="test")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{row['question']}\nSolve the problem step by step."}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        ).to(model.device)
        for row in rows.select(range(min(limit, len(rows))))
    ]

    def progress(number: int, total: Comparison) -> None:
        numbers = total.as_dict()
        console.print(
            f"{number + 1:3d}/{len(prompts)}  identical {total.identical}/{total.prompts}  acceptance length "
            f"{total.stats.acceptance_length:.3f}  plain {numbers['plain_tokens_per_second']:.1f} tokens/s  dflash "
            f"{numbers['dflash_tokens_per_second']:.1f} tokens/s  ratio {numbers['speedup']:.3f}",
            highlight=False,
        )

    total = compare(model, draft, prompts, max_new_tokens=max_new_tokens, on_prompt=progress)
    result = total.as_dict()
    fixed = whole_blocks or num_assistant_tokens is not None
    result["proposals"] = "fixed" if fixed else "by cost"
    result["proposals_per_round"] = sum(total.stats.proposed) / max(len(total.stats.proposed), 1)
    result["copied_rounds"] = total.stats.copied
    result["settings"] = settings
    result["machine"] = {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(model.dtype),
    }
    if stock:
        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        same = 0
        for inputs in track(prompts, description="transformers' own loop", console=console):
            theirs = model.generate(**inputs, **options, assistant_model=draft, speculation_type="dflash")
            same += int(torch.equal(theirs, model.generate(**inputs, **options, assistant_model=draft)))
        result["identical_to_stock_loop"] = same
    console.print_json(data=result)
    if json_file is not None:
        write_result(result, json_file)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    typer.run(main)
