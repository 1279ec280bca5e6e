"""What a training run leaves beside the weights: its curve, and the drafter's card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState

from ..model_card import card_data, fill_card, is_untouched, training_curve, write_card
from .arguments import DFlashTrainingArguments
from .curve import curve_svg


def write_curve(log_history: list[dict[str, Any]], path: Path) -> None:
    """Write `curve_svg` of a run to `path`, if anything was logged twice."""
    svg = curve_svg(log_history)
    if svg is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(svg, encoding="utf-8")
    os.replace(temporary, path)


def write_training_card(
    *,
    drafter: nn.Module,
    args: DFlashTrainingArguments,
    state: TrainerState,
    name: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    datasets: list[str] | None = None,
) -> None:
    """Write the drafter's card into `args.output_dir`, unless a README.md is there that a person wrote or edited.

    Args:
        drafter: the trained drafter.
        args, state: of the run.
        name: of the drafter; the folder's by default.
        license: of the drafter.
        base_model: the target; by default the one that the drafter's config records.
        datasets: Hub names.
    """
    path = Path(args.output_dir) / "README.md"
    if path.exists() and not is_untouched(path.read_text(encoding="utf-8")):
        return
    base_model = base_model or drafter.config.target_name_or_path or "unknown"
    card = fill_card(
        data=card_data(
            name=name or Path(args.output_dir).name, base_model=base_model, license=license, datasets=datasets
        ),
        config=drafter.config,
        num_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        dtype=str(next(drafter.parameters()).dtype).removeprefix("torch."),
        training={
            "description": (
                f"{state.global_step} updates of {args.train_batch_size * args.gradient_accumulation_steps} "
                f"{'packed rows' if args.packing else 'examples'} a process on {args.world_size} process(es), up to "
                f"{args.num_anchors} blocks an example, {args.optimizer}, learning rate {args.learning_rate:g}, "
                f"seed {args.seed}."
            ),
            "curve": training_curve(state.log_history),
        },
    )
    write_card(card, path)
