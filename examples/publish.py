"""Turn a training run into a publishable folder: bf16 weights and a model card, and push it if a repository is named.

    python examples/publish.py --drafter out --output my-drafter --base-model HuggingFaceTB/SmolLM2-135M-Instruct \
        --benchmark result.json --training-command "dflash-hf train ..."

Seconds on a CPU. `--benchmark` takes what examples/benchmark_gsm8k.py or `dflash-hf evaluate --json` wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from dflash_hf import DFlashDraftModel
from dflash_hf.model_card import card_data, fill_card, training_curve, write_card


def read_benchmark(file: Path) -> dict:
    """A benchmark's numbers; those of `dflash-hf evaluate` under the names that a card knows."""
    numbers = json.loads(file.read_text())
    if "generation_acceptance_length" in numbers:
        return {name: numbers[f"generation_{name}"] for name in ("prompts", "rounds", "acceptance_length")}
    return numbers


def main(
    drafter: Annotated[Path, typer.Option(help="Output folder of dflash-hf train.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    base_model: Annotated[str, typer.Option(help="Hub id of the target.")],
    training_command: Annotated[str, typer.Option(help="The command that trained it, for the card.")],
    training_description: Annotated[str, typer.Option(help="A sentence on data and machine, for the card.")] = "",
    benchmark: Annotated[list[Path] | None, typer.Option(help="JSON of a benchmark, for the card; one a task.")] = None,
    benchmark_command: Annotated[list[str] | None, typer.Option(help="The command that measured it; one each.")] = None,
    benchmark_description: Annotated[list[str] | None, typer.Option(help="A sentence on it; one each.")] = None,
    training_dataset: Annotated[str | None, typer.Option(help="Hub id of the training data.")] = None,
    dataset_name: Annotated[list[str] | None, typer.Option(help="Name of a benchmark's dataset; one each.")] = None,
    dataset_type: Annotated[list[str] | None, typer.Option(help="Hub id of it; one each.")] = None,
    license: Annotated[str, typer.Option(help="License of the weights.")] = "apache-2.0",
    dtype: Annotated[str, typer.Option(help="Stored dtype.")] = "bfloat16",
    repo_id: Annotated[str | None, typer.Option(help="Push to this Hub repository.")] = None,
) -> None:
    """Write the folder."""
    model = DFlashDraftModel.from_pretrained(drafter, dtype=getattr(torch, dtype))
    model.config.target_name_or_path = base_model
    model.save_pretrained(output)
    names = {
        "command": benchmark_command or [""],
        "description": benchmark_description or [""],
        "dataset_name": dataset_name or ["GSM8K"],
        "dataset_type": dataset_type or ["openai/gsm8k"],
    }
    files = benchmark or []
    for option, values in names.items():
        if files and len(values) != len(files):
            raise typer.BadParameter(
                f"{len(files)} benchmarks need {len(files)} values each; {option} has {len(values)}"
            )
    measured = [
        read_benchmark(file) | {option: values[number] for option, values in names.items()}
        for number, file in enumerate(files)
    ]
    state = json.loads((drafter / "trainer_state.json").read_text())
    name = repo_id or output.name
    card = fill_card(
        data=card_data(
            name=name,
            base_model=base_model,
            license=license,
            datasets=[training_dataset] if training_dataset else None,
            benchmarks=measured,
        ),
        config=model.config,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=dtype,
        frequent_tokens=model.num_frequent_tokens,
        training={
            "command": training_command,
            "description": training_description,
            "curve": training_curve(state["log_history"]),
        },
        benchmarks=measured,
    )
    write_card(card, output / "README.md")
    if repo_id is not None:
        model.push_to_hub(repo_id, card=card)


if __name__ == "__main__":
    typer.run(main)
