"""Peak memory of a training step for 128, 256 and 512 anchors at a vocabulary of 151,936.

    python examples/benchmark_memory.py --json memory.json

Random weights of SmolLM2-135M's width (576) with Qwen3's vocabulary, one row of 1,024 tokens, block 16, 3 draft layers,
fp32, forward and backward; each case in a process of its own, since a process keeps its peak. "All logits" is what the
logits of every slot would take once (a plain cross-entropy holds about three such tensors). One to two minutes a case
on one CPU core. Recorded: a step adds 907, 1,270 and 2,089 MB where all logits would be 1,107, 2,212 and 4,426 MB once;
what grows are the draft layers' activations.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from datasets import Dataset
from measuring import peak_mb, reset_peak
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_hf import DFlashConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.evaluation.comparison import write_result


def one_step(anchors: int, vocabulary: int, length: int, chunk: int) -> dict[str, float]:
    """Memory of this process before a step and its peak within, in MB."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
    )
    config = DFlashConfig.from_target(target.config, mask_token_id=5, num_hidden_layers=3, block_size=16)
    ids = torch.randint(0, vocabulary, (length,)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        trainer = DFlashTrainer(
            model=DFlashDraftModel(config),
            target_model=target,
            args=DFlashTrainingArguments(
                folder, num_anchors=anchors, max_length=length, head_chunk_rows=chunk, report_to="none", use_cpu=True
            ),
            train_dataset=Dataset.from_dict({"input_ids": [ids], "loss_mask": [[1] * length]}),
        )
        batch = trainer.data_collator([trainer.train_dataset[0]])
        before = reset_peak()
        trainer.compute_loss(trainer.model, batch).backward()
    rows = len(batch["active_rows"])
    return {
        "anchors": anchors,
        "labelled_slots": rows,
        "before_mb": before,
        "peak_mb": peak_mb(),
        "all_logits_mb": rows * vocabulary * 4 / 2**20,
    }


def main(
    vocabulary: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 151_936,
    length: Annotated[int, typer.Option(help="Tokens of the row.")] = 1024,
    chunk: Annotated[int, typer.Option(help="head_chunk_rows.")] = 256,
    anchors: Annotated[list[int] | None, typer.Option(help="Anchors; may be given several times.")] = None,
    one: Annotated[int | None, typer.Option(hidden=True)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Measure each case in a process of its own."""
    if one is not None:
        print(json.dumps(one_step(one, vocabulary, length, chunk)))
        return
    table = Table("anchors", "labelled slots", "before a step", "peak", "step adds", "all logits once")
    results = []
    for count in anchors or [128, 256, 512]:
        command = [sys.executable, __file__, "--one", str(count), "--vocabulary", str(vocabulary)]
        command += ["--length", str(length), "--chunk", str(chunk)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        results.append(result)
        sizes = (result["before_mb"], result["peak_mb"], result["peak_mb"] - result["before_mb"])
        sizes += (result["all_logits_mb"],)
        table.add_row(str(count), str(result["labelled_slots"]), *(f"{size:,.0f} MB" for size in sizes))
    Console().print(table)
    if json_file is not None:
        write_result({"vocabulary": vocabulary, "length": length, "chunk_rows": chunk, "cases": results}, json_file)


if __name__ == "__main__":
    typer.run(main)
