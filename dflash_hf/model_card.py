"""Model cards: card data and template filling, through huggingface_hub. Pure; callers write the result."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

# Beside the modules in an installed wheel; in the repository it lies with the cards.
_TEMPLATES = (
    Path(__file__).with_name("model_card_template.md"),
    Path(__file__).resolve().parent.parent / "model_cards" / "TEMPLATE.md",
)


# The last line of a card that this package wrote: a digest of the rest, so that an edit by hand shows.
_SEAL = "<!-- dflash_hf card {digest} -->"


def write_card(card: ModelCard, path: Path) -> None:
    """Write a card with its seal, under a temporary name first.

    Args:
        card: from `fill_card`.
        path: the README.md.
    """
    body = str(card).rstrip() + "\n"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(body + _seal_of(body) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def is_untouched(text: str) -> bool:
    """Whether a card is exactly as `write_card` left it; nobody's words are lost by writing it anew."""
    body, newline, last = text.rstrip("\n").rpartition("\n")
    return last == _seal_of(body + newline)


def _seal_of(body: str) -> str:
    return _SEAL.format(digest=hashlib.sha256(body.encode()).hexdigest()[:16])


def card_data(
    *,
    name: str,
    base_model: str,
    license: str | None = None,
    datasets: list[str] | None = None,
    benchmark: dict[str, Any] | None = None,
) -> ModelCardData:
    """Metadata of a drafter's card.

    Args:
        name: repository or display name.
        base_model: the target, a Hub id.
        license: SPDX identifier of the weights.
        datasets: Hub ids of the training data.
        benchmark: numbers of `evaluation.comparison`, with `dataset_name` and `dataset_type`; they become model-index
            results.
    """
    results = None
    if benchmark is not None:
        common = {
            "task_type": "text-generation",
            "dataset_type": benchmark["dataset_type"],
            "dataset_name": benchmark["dataset_name"],
        }
        results = [
            EvalResult(metric_type=metric, metric_name=label, metric_value=round(benchmark[metric], 3), **common)
            for metric, label in (("acceptance_length", "Acceptance length"), ("speedup", "Speed relative to plain"))
        ]
    return ModelCardData(
        base_model=base_model,
        datasets=datasets,
        eval_results=results,
        library_name="dflash_hf",
        license=license,
        model_name=name,
        pipeline_tag="text-generation",
        tags=["dflash", "speculative-decoding", "block-diffusion", "draft-model"],
    )


def training_curve(log_history: list[dict[str, Any]], *, rows: int = 12) -> list[dict[str, Any]]:
    """Evaluations in a Trainer's `log_history`, thinned to about `rows`, each with the training loss before it."""
    curve, loss = [], None
    for entry in log_history:
        loss = entry.get("loss", loss)
        if "eval_loss" in entry:
            point = {"step": entry["step"], "loss": "" if loss is None else f"{loss:.3f}"}
            for key in ("eval_loss", "eval_block_acceptance_length", "eval_slot_accuracy"):
                point[key] = f"{entry[key]:.3f}"
            if not curve or curve[-1]["step"] != point["step"]:
                curve.append(point)
    stride = max(1, -(-len(curve) // rows))
    # Counted from the end, so that the last evaluation is always there.
    return curve[::-1][::stride][::-1]


def fill_card(
    *,
    data: ModelCardData,
    config: Any,
    num_parameters: int,
    dtype: str,
    training: dict[str, Any] | None = None,
    benchmark: dict[str, Any] | None = None,
) -> ModelCard:
    """The card of a drafter.

    Args:
        data: from `card_data`.
        config: the drafter's `DFlashConfig`.
        num_parameters: of the drafter.
        dtype: of the stored weights.
        training: `description`, `command` and `curve`; sections without facts are left out.
        benchmark: `description`, `command` and the numbers of `evaluation.comparison`.
    """
    template = next(path for path in _TEMPLATES if path.exists())
    return ModelCard.from_template(
        data,
        template_path=str(template),
        name=data.model_name,
        base_model=data.base_model,
        layers=config.num_hidden_layers,
        parameters=f"{num_parameters / 1e6:.1f} M",
        block_size=config.block_size,
        proposals=config.block_size - 1,
        taps=", ".join(map(str, config.target_layer_ids)),
        num_target_layers=config.num_target_layers,
        mask_token_id=config.mask_token_id,
        enable_thinking=config.enable_thinking,
        dtype=dtype,
        training=training,
        benchmark=benchmark,
    )
