"""Model cards: card data and template filling, through huggingface_hub. Pure; callers write the result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

# Beside the modules in an installed wheel; in the repository it lies with the cards.
_TEMPLATES = (
    Path(__file__).with_name("model_card_template.md"),
    Path(__file__).resolve().parent.parent / "model_cards" / "TEMPLATE.md",
)


_TAGS = ("dflash", "speculative-decoding", "block-diffusion", "draft-model")
_METRICS = (
    ("acceptance_length", "Acceptance length"),
    ("dflash_tokens_per_second", "Tokens per second"),
    ("speedup", "Speed relative to plain"),
)

# The last line of a card that this package wrote: a digest of the rest, so that an edit by hand shows.
_SEAL = "<!-- dflash_hf card {digest} -->"


def write_card(card: ModelCard, path: Path) -> None:
    """Write a card with its seal, under a temporary name first.

    Args:
        card: from `fill_card`.
        path: the README.md.
    """
    write_text(path, sealed(card))


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name first, so that what was there is never half overwritten."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def sealed(card: ModelCard) -> str:
    """The card's text with the seal as its last line."""
    body = str(card).rstrip() + "\n"
    return body + _seal_of(body) + "\n"


def is_untouched(text: str) -> bool:
    """Whether a card is exactly as `write_card` left it; nobody's words are lost by writing it anew."""
    body, newline, last = text.rstrip("\n").rpartition("\n")
    return last == _seal_of(body + newline)


def _seal_of(body: str) -> str:
    return _SEAL.format(digest=hashlib.sha256(body.encode()).hexdigest()[:16])


def card_for_repository(
    *, generated: str, local: str | None, remote: str | None, overwrite: bool = False
) -> tuple[str | None, str | None]:
    """Which text to upload as README.md, so that nobody's words are lost.

    Args:
        generated: the card that this package would write, with its seal.
        local: README.md of the folder that is uploaded; None if it has none.
        remote: README.md of the repository; None if it has none.
        overwrite: replace the repository's card even if a person edited it.

    Returns:
        `(text, warning)`: text is None where the repository's own card stays; warning says so where that may surprise.
    """
    edited = local if local is not None and not is_untouched(local) else None
    if remote is None or overwrite or is_untouched(remote) or edited == remote:
        return edited or generated, None
    kept = "The repository's README.md was written or edited by a person and stays as it is"
    if edited is not None:
        kept += ", although the local README.md differs"
    return None, f"{kept}. Pass overwrite_card=True to replace it."


def card_data(
    *,
    name: str,
    base_model: str | None,
    license: str | None = None,
    language: str | list[str] | None = None,
    datasets: list[str] | None = None,
    tags: Sequence[str] = (),
    benchmarks: Sequence[dict[str, Any]] = (),
) -> ModelCardData:
    """Metadata of a drafter's card.

    Args:
        name: repository or display name.
        base_model: the target; left out where it is no Hub id.
        license: SPDX identifier of the weights.
        language: ISO codes.
        datasets: Hub ids of the training data.
        tags: further tags; those of a drafter are there anyway.
        benchmarks: one dictionary a task: `dataset_name`, `dataset_type` (Hub id), numbers of `evaluation.comparison`
            and optionally `settings` (such as the temperature). Acceptance length and speed become model-index results.
    """
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=benchmark["dataset_type"],
            dataset_name=benchmark["dataset_name"],
            metric_args=benchmark.get("settings"),
            metric_type=metric,
            metric_name=label,
            metric_value=round(benchmark[metric], 3),
        )
        for benchmark in benchmarks
        for metric, label in _METRICS
        if metric in benchmark
    ]
    return ModelCardData(
        base_model=hub_id(base_model),
        datasets=datasets,
        eval_results=results or None,
        language=language,
        library_name="dflash_hf",
        license=license,
        model_name=name,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([*_TAGS, *tags])),
    )


def hub_id(name: str | None) -> str | None:
    """`name` if it can be a Hub repository; None for folders, whose paths are nobody's business and no metadata."""
    if name is None or os.path.exists(name) or name.count("/") > 1:
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def training_curve(log_history: list[dict[str, Any]], *, rows: int = 12) -> list[dict[str, Any]]:
    """Evaluations in a Trainer's `log_history`, about `rows` of them, with loss and time of the training before."""
    curve, loss, minutes = [], None, None
    for entry in log_history:
        loss, minutes = entry.get("loss", loss), entry.get("training_minutes", minutes)
        if "eval_loss" in entry:
            point = {"step": entry["step"], "loss": "" if loss is None else f"{loss:.3f}"}
            point["minutes"] = "" if minutes is None else f"{minutes:.1f}"
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
    layout: str = "dflash",
    frequent_tokens: int | None = None,
    training: dict[str, Any] | None = None,
    benchmarks: Sequence[dict[str, Any]] = (),
) -> ModelCard:
    """The card of a drafter.

    Args:
        data: from `card_data`.
        config: the drafter's `DFlashConfig`.
        num_parameters: of the drafter.
        dtype: of the stored weights.
        layout: of the stored files, from `layout_of`; decides which engines the card tells how to serve them.
        frequent_tokens: tokens in the drafter's index, if it has one.
        training: `description`, `command`, `data` and `curve`; what has no facts is left out.
        benchmarks: as for `card_data`, with `description` and `command`.
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
        proposals=config.block_size - config.first_slot,
        taps=", ".join(map(str, config.target_layer_ids)),
        num_target_layers=config.num_target_layers,
        mask_token_id=config.mask_token_id,
        enable_thinking=config.enable_thinking,
        input_embedding_scale=config.input_embedding_scale,
        dtype=dtype,
        layout=layout,
        frequent_tokens=frequent_tokens,
        training=training,
        benchmarks=benchmarks,
    )


def layout_of(on_disk: dict[str, Any]) -> str:
    """Whose layout a `config.json` is in, as far as serving goes: `dflash` (z-lab's), `speculators` or `other`."""
    if "speculators_model_type" in on_disk:
        return "speculators"
    known = {"DFlashDraftModel", "DFlash2DraftModel"} & set(on_disk.get("architectures") or ())
    return "dflash" if known else "other"
