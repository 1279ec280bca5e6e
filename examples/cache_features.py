"""Compute a target's features once and train from them: the commands, and what they save.

    dflash-hf regenerate --target TARGET --data gsm8k_train.jsonl --output answers.jsonl --limit 64 \\
        --prompt-column question --max-new-tokens 220
    python examples/cache_features.py --data answers.jsonl --store features

SmolLM2-135M-Instruct, 64 answers of about 300 tokens (question included), five taps, bf16: 109 MB (5,760 bytes a
token), about a minute for the features and two for the eight updates on two free CPU cores. An offline update takes
0.38 of an online one there, and the losses agree to the rounding of bf16 (1.0012 1.2228 1.2603 1.2379 online, 1.0012
1.2227 1.2602 1.2378 offline). The same from the command line, with equal --target and --data in both:

    dflash-hf cache-features --target TARGET --data answers.jsonl --output features
    dflash-hf train --target TARGET --data answers.jsonl --features features --output out --mask-token-id 3
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from quickstart import DRAFTER, console, load_target
from rich.progress import Progress
from transformers.trainer_callback import PrinterCallback

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.data.chat import prepare_dataset
from dflash_hf.data.features import build_feature_store
from dflash_hf.data.sources import load_rows


def main(
    data: Annotated[str, typer.Option(help="The target's answers: a file of `dflash-hf regenerate`.")],
    store: Annotated[Path, typer.Option(help="Folder for the features.")],
    limit: Annotated[int, typer.Option(help="Examples, from the first.")] = 64,
    target: Annotated[str | None, typer.Option(help="Hub repository or folder of the target.")] = None,
    drafter: Annotated[str, typer.Option(help="Hub repository or folder of the drafter.")] = str(DRAFTER),
    steps: Annotated[int, typer.Option(help="Updates to time, online and offline.")] = 4,
) -> None:
    """Build the store, then run the same few updates with the target in every step and without it."""
    model, tokenizer = load_target(target)
    taps = DFlashDraftModel.from_pretrained(drafter).config.target_layer_ids
    rows = load_rows(data)
    rows = prepare_dataset(rows.select(range(min(limit, len(rows)))), tokenizer, max_length=512)
    tokens = sum(map(len, rows["input_ids"]))
    started = time.perf_counter()
    with Progress(console=console) as progress:
        task = progress.add_task("features", total=len(rows))
        features = build_feature_store(
            store / "train",
            target=model,
            dataset=rows,
            layer_ids=taps,
            tokenizer=tokenizer,
            on_start=lambda needed, free: console.print(f"{needed / 1e6:.0f} MB to write, {free / 1e9:.1f} GB free"),
            on_progress=lambda done, _: progress.update(task, completed=done),
        )
    seconds = time.perf_counter() - started
    size = sum(shard["bytes"] for shard in features.manifest.shards)
    console.print(f"{tokens} tokens in {seconds:.0f} s, {size / 1e6:.0f} MB, {size / tokens:.0f} bytes a token")
    for kind, folder in (("online", None), ("offline", str(store))):
        trainer = DFlashTrainer(
            model=DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32),
            target_model=model,
            args=DFlashTrainingArguments(
                output_dir=str(store / "run"),
                features_dir=folder,
                max_steps=steps,
                warmup_steps=0,
                max_length=512,
                num_anchors=32,
                per_device_train_batch_size=8,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=rows,
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
        losses = [f"{entry['loss']:.4f}" for entry in trainer.state.log_history if "loss" in entry]
        console.print(f"{kind:8} {seconds / steps:.2f} s an update, losses {' '.join(losses)}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
