"""Converting a drafter into the layout of another family of engines, where the layout can say what it computes.

Tensors keep their values and names; what changes is the config, and which of the target's tables are stored. What a
layout cannot say is refused with the reason, never approximated.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ..checkpoints import FAMILIES
from ..configuration_dflash import DFlashConfig
from ..errors import CheckpointError, TargetMismatchError
from ..inherited import target_embedding_scale
from ..model_card import write_card
from ..modeling_dflash import DFlashDraftModel
from ..publishing import default_card

LAYOUTS = ("speculators", "dflash")

# A window that is read in another way gives the same draft only if it never bites; longer ones are tried out.
_LONGEST_TRIED_CONTEXT = 8192


@dataclass
class ExportReport:
    """What was written.

    Attributes:
        source_family, family: identifiers of the families, as in `DFlashConfig.family`.
        output: the folder.
        dropped: names of tensors that are not stored any more, because they equal the target's.
        context_rows: length of the context in the draft that was compared.
        difference: largest absolute difference of the two drafts' hidden states.
    """

    source_family: str
    family: str
    output: Path
    dropped: list[str] = field(default_factory=list)
    context_rows: int = 0
    difference: float = 0.0


def export_drafter(
    source: str | os.PathLike,
    *,
    to: str,
    output: str | os.PathLike,
    target: str | None = None,
    revision: str | None = None,
) -> ExportReport:
    """Write a drafter in another layout, load what was written and compare one draft with the original's.

    Args:
        source: folder or Hub repository of the drafter.
        to: `speculators` (vLLM's speculators 0.9.0) or `dflash` (z-lab's, also of DFlash 2).
        output: folder that does not exist yet or is empty; it appears complete and verified, or not at all.
        target: the drafter's target, a folder or Hub repository, where the drafter does not record it. Only its config
            is read, unless the drafter stores an embedding or a head of its own: those are compared with the target's.
        revision: of the drafter's repository.

    Raises:
        CheckpointError: if the layout cannot say what the drafter computes, a fact is missing, or the written drafter
            does not give the same draft.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} exists already. Name a folder that does not, so that nothing is overwritten.")
    drafter = DFlashDraftModel.from_pretrained(source, dtype="auto", revision=revision or "main").eval()
    config = drafter.config
    family = family_for(config, to)
    if family == config.family:
        raise CheckpointError(f"{source} is in that layout already ({FAMILIES[family].TITLE}); copy it as it is.")
    if getattr(config, "quantization_config", None):
        raise CheckpointError(f"{source} is quantised; its packed weights mean nothing elsewhere. Export the original.")
    target = target or config.target_name_or_path
    target_config = None if target is None else AutoConfig.from_pretrained(target)
    dropped = [] if target is None else _equal_to_the_targets(drafter, target)
    fields = converted_fields(config, family=family, target=target, target_config=target_config, dropped=dropped)
    written = FAMILIES[family].write_config(fields)
    if family == "speculators" and target_config is not None:
        written["speculators_config"]["verifier"]["architectures"] = list(target_config.architectures or [])
    state = {name: tensor for name, tensor in drafter.state_dict().items() if name not in dropped}
    exported = DFlashDraftModel(DFlashConfig(**FAMILIES[family].read_config(written, state))).to(drafter.dtype)
    exported.load_state_dict(state)
    exported.generation_config = drafter.generation_config
    exported.frequent_token_ids = drafter.frequent_token_ids
    report = ExportReport(source_family=config.family, family=family, output=output, dropped=dropped)
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    try:
        exported.save_pretrained(folder)
        _verify(drafter, folder, report)
        write_card(default_card(exported, name=output.name, folder=folder), folder / "README.md")
        folder.chmod(0o755)  # mkdtemp's folders are private
        os.replace(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def family_for(config: DFlashConfig, to: str) -> str:
    """The family of the layout `to` that a drafter would be written in.

    Raises:
        CheckpointError: for another name than those of `LAYOUTS`.
    """
    if to not in LAYOUTS:
        raise CheckpointError(f"{to!r} is no layout to export to. Choose one of {', '.join(LAYOUTS)}.")
    if to == "speculators":
        return "speculators"
    return "zlab" if config.conv_kernel_size is None else "dflash2"


def converted_fields(
    config: DFlashConfig,
    *,
    family: str,
    target: str | None,
    target_config: PreTrainedConfig | None,
    dropped: list[str],
) -> dict[str, Any]:
    """Fields of the same drafter in another family.

    Args:
        config: of the drafter.
        family: to convert to.
        target, target_config: its name and config, where known.
        dropped: tables that will be the target's own again.

    Raises:
        CheckpointError: for what readers of the two layouts take differently, or for a fact that is missing.
    """
    fields = config.to_dict() | {"family": family, "source_config": None, "target_name_or_path": target}
    text = None if target_config is None else target_config.get_text_config(decoder=True)
    title = FAMILIES[family].TITLE
    if text is not None:
        fields["num_target_layers"] = text.num_hidden_layers
        fields["vocab_size"] = fields["vocab_size"] or text.vocab_size
    for key, names in (("own_embedding", "embed_tokens.weight"), ("own_head", "lm_head.weight")):
        if names in dropped:
            fields[key] = False
    if fields["own_embedding"] or (fields["own_head"] and fields["draft_vocab_size"] is None):
        kept = "embed_tokens.weight" if fields["own_embedding"] else "lm_head.weight"
        reason = "which differs from the target's" if text is not None else "and the target is not known"
        raise CheckpointError(
            f"The drafter stores {kept} of its own, {reason}; readers of {title} take the target's. "
            + ("It cannot be exported." if text is not None else "Name the target (--target) to compare them.")
        )
    if text is None and (family == "speculators" or fields["num_target_layers"] is None or not fields["vocab_size"]):
        raise CheckpointError(
            f"{title} needs to know the drafter's target, which its config does not record. Name it with --target."
        )
    if fields["target_hidden_size"] != fields["hidden_size"]:
        raise CheckpointError(
            f"The drafter has width {fields['hidden_size']} and reads states of width {fields['target_hidden_size']}; "
            f"readers of {title} know one width only."
        )
    if text is not None and text.hidden_size != fields["target_hidden_size"]:
        raise TargetMismatchError(
            f"{target} has hidden size {text.hidden_size}, but the drafter reads {fields['target_hidden_size']}. Name "
            "the target that it was trained for."
        )
    if fields["sample_from_anchor"] and family in ("zlab", "dflash2"):
        raise CheckpointError(
            f"Slot 0 of this drafter proposes the token after the anchor (sample_from_anchor); in {title} slot 0 is "
            "silent, and every proposal would be shifted by one."
        )
    if fields["draft_vocab_size"] is not None and family != "speculators":
        raise CheckpointError(
            f"The drafter proposes {fields['draft_vocab_size']} of {fields['vocab_size']} tokens through a head of its "
            f"own (tensors d2t, t2d and lm_head); {title} has no place for a trimmed vocabulary."
        )
    if fields["num_target_layers"] - 1 in fields["target_layer_ids"]:
        raise CheckpointError(
            f"The drafter taps the target's last layer ({fields['num_target_layers'] - 1}). Readers disagree whether "
            "the final norm is applied to that state, so the exported drafter would read something else."
        )
    if fields["input_embedding_scale"] is None:
        fields["input_embedding_scale"] = 1.0 if config.own_embedding else target_embedding_scale(text)
    _convert_window(fields, rule="anchor" if family == "speculators" else "query", title=title)
    return fields


def _convert_window(fields: dict[str, Any], *, rule: str, title: str) -> None:
    if "sliding_attention" not in fields["layer_types"]:
        return
    window, longest = fields["sliding_window"], fields["max_position_embeddings"]
    if fields["window_rule"] != rule and window < longest:
        raise CheckpointError(
            f"The drafter's sliding window of {window} counts from {_COUNTS_FROM[fields['window_rule']]}, in {title} "
            f"from {_COUNTS_FROM[rule]}: the drafts differ as soon as the context is longer than the window. Only a "
            f"window that covers every position ({longest} here) can be converted."
        )
    fields["window_rule"] = rule


_COUNTS_FROM = {"query": "each slot", "anchor": "the anchor"}


def _equal_to_the_targets(drafter: DFlashDraftModel, target: str) -> list[str]:
    """Names of the drafter's own tables that hold exactly the target's values."""
    own = {"embed_tokens.weight": drafter.embed_tokens}
    if drafter.config.draft_vocab_size is None:
        own["lm_head.weight"] = drafter.lm_head
    own = {name: module.weight for name, module in own.items() if module is not None}
    if not own:
        return []
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    theirs = {
        "embed_tokens.weight": model.get_input_embeddings().weight,
        "lm_head.weight": model.get_output_embeddings().weight,
    }
    return [name for name, table in own.items() if torch.equal(table, theirs[name].to(table.dtype))]


def _verify(drafter: DFlashDraftModel, folder: Path, report: ExportReport) -> None:
    again = DFlashDraftModel.from_pretrained(folder, dtype=drafter.dtype).eval()
    config = drafter.config
    rows = 40
    if "sliding_attention" in config.layer_types:
        rows = min(config.sliding_window + 2 * config.block_size, config.max_position_embeddings - config.block_size)
    report.context_rows = max(1, min(rows, _LONGEST_TRIED_CONTEXT))
    for name in ("target_layer_ids", "block_size", "mask_token_id", "sample_from_anchor"):  # a draft cannot tell
        if getattr(again.config, name) != getattr(config, name):
            raise CheckpointError(
                f"The exported drafter has {name} = {getattr(again.config, name)}, the original "
                f"{getattr(config, name)}. Nothing was written."
            )
    ours, theirs = (_draft(model, report.context_rows) for model in (drafter, again))
    report.difference = (ours[0].float() - theirs[0].float()).abs().max().item()
    kept = {name: tensor for name, tensor in drafter.state_dict().items() if name not in report.dropped}
    same_weights = all(torch.equal(tensor, kept[name]) for name, tensor in again.state_dict().items())
    if not same_weights or report.difference > 1e-5 or not torch.equal(ours[1], theirs[1]):
        raise CheckpointError(
            f"The exported drafter does not draft as the original does: hidden states differ by {report.difference:g}. "
            "Nothing was written."
        )


@torch.no_grad()
def _draft(drafter: DFlashDraftModel, context_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One draft on random features: hidden states of the proposing slots, and greedy proposals of a random head."""
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    width = len(config.target_layer_ids) * config.target_hidden_size
    context = torch.randn(1, context_rows, width, generator=generator)
    block = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    head = torch.randn(config.hidden_size, 512, generator=generator)
    hidden = drafter(noise_embeds=block, context_hidden_states=context).last_hidden_state
    hidden = hidden[:, config.first_slot :]
    return hidden, (hidden.float() @ head).argmax(dim=-1)
