"""`dflash-hf info`: what a drafter is, and whether it fits a target."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from .common import console, reports_errors


@reports_errors
def info(
    drafter: Annotated[str, typer.Argument(help="Drafter: Hub repository or folder.")],
    target: Annotated[str | None, typer.Option(help="Say whether the drafter fits this target.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the drafter's repository.")] = None,
) -> None:
    """Show a drafter's shape, size and cost."""
    import torch

    from dflash_hf import DFlashDraftModel

    model = DFlashDraftModel.from_pretrained(drafter, revision=revision or "main")
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    body = parameters - model.fc.weight.numel()
    # Two operations a weight and slot, plus the projection of about half a block of new context rows.
    operations = 2 * (body * config.block_size + model.fc.weight.numel() * config.block_size / 2)
    layers = ", ".join(
        f"{kind.removesuffix('_attention')}{' (causal block)' if config.layer_is_causal(i) else ''}"
        for i, kind in enumerate(config.layer_types)
    )
    table = Table(show_header=False, title=drafter)
    for name, value in (
        ("family", "z-lab DFlash v1"),
        ("target", config.target_name_or_path or "not recorded"),
        ("target layers", config.num_target_layers or "not recorded"),
        ("thinking", {None: "not recorded", True: "on", False: "off"}[config.enable_thinking]),
        ("taps", ", ".join(map(str, config.target_layer_ids))),
        ("block size", f"{config.block_size} (anchor + {config.block_size - 1} proposals)"),
        ("mask token id", config.mask_token_id),
        ("hidden size", config.hidden_size),
        ("draft layers", f"{config.num_hidden_layers}: {layers}"),
        ("sliding window", config.sliding_window or "none"),
        ("RoPE", f"{config.rope_parameters['rope_type']}, theta {config.rope_parameters['rope_theta']:g}"),
        ("parameters", f"{parameters / 1e6:.1f} M, {size / 1e6:.1f} MB in {str(model.dtype).removeprefix('torch.')}"),
        ("cost of a draft", f"{operations / 1e9:.2f} GFLOP a round, without the target's head"),
    ):
        table.add_row(name, str(value))
    console.print(table)
    if target is not None:
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        from ..target import check_compatibility
        from .common import gguf_file_in

        gguf = gguf_file_in(target, gguf_file)
        target_config = AutoConfig.from_pretrained(target, **({"gguf_file": gguf} if gguf else {}))
        with init_empty_weights(), torch.no_grad():
            shell = AutoModelForCausalLM.from_config(target_config)
        check_compatibility(config, shell)
        console.print(f"fits {target}: yes")
