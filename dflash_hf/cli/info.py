"""`dflash-hf info`: what a drafter is, what a round with it costs, and whether it fits a target."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from .common import console, reports_errors

# Tables of which a round reads a few rows only.
_LOOKED_UP = (
    "embed_tokens.",
    "candidate_selector.predecessor",
    "candidate_selector.successor",
    "markov_head.markov_w1.",
)
# Run once a proposal, not once a slot.
_PER_PROPOSAL = ("candidate_selector.hidden_projection.", "markov_head.", "prefix_gru.", "embed_proj.", "lm_head.")
_UNUSED = ("confidence_head.",)


@reports_errors
def info(
    drafter: Annotated[str, typer.Argument(help="Drafter: Hub repository or folder.")],
    target: Annotated[str | None, typer.Option(help="Say whether the drafter fits this target.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the drafter's repository.")] = None,
) -> None:
    """Show a drafter's family, shape, size and cost."""
    from dflash_hf import DFlashDraftModel

    model = DFlashDraftModel.from_pretrained(drafter, revision=revision or "main")
    table = Table(show_header=False, title=drafter)
    for name, value in (*_facts(model), *_costs(model)):
        table.add_row(name, str(value))
    console.print(table)
    if target is not None:
        from ..target import check_compatibility

        check_compatibility(model.config, _shell(target, gguf_file))
        console.print(f"fits {target}: yes")


def _facts(model: Any) -> list[tuple[str, Any]]:
    from ..checkpoints import FAMILIES

    config = model.config
    rule = ", counted from the anchor" if config.window_rule == "anchor" else ""
    layers = ", ".join(
        f"{kind.removesuffix('_attention')}{' (causal block)' if config.layer_is_causal(i) else ''}"
        for i, kind in enumerate(config.layer_types)
    )
    kind = " of Gemma 4's kind" if config.decoder_type == "gemma4" else ""
    head = "the target's"
    if config.own_head:
        rows = config.draft_vocab_size
        head = "its own" if rows is None else f"its own, {rows} of {config.vocab_size} tokens"
    frequent = model.frequent_token_ids
    facts = [
        ("family", FAMILIES[config.family].TITLE),
        ("target", config.target_name_or_path or "not recorded"),
        ("target layers", config.num_target_layers or "not recorded"),
        ("thinking", {None: "not recorded", True: "on", False: "off"}[config.enable_thinking]),
        ("taps", ", ".join(map(str, config.target_layer_ids))),
        (
            "block size",
            f"{config.block_size}: {config.block_size - config.first_slot} proposals, from slot {config.first_slot} on",
        ),
        ("mask token id", config.mask_token_id),
        ("hidden size", config.hidden_size),
        ("draft layers", f"{config.num_hidden_layers}{kind}: {layers}"),
        ("sliding window", f"{config.sliding_window}{rule}" if config.sliding_window else "none"),
        ("RoPE", f"{config.rope_parameters['rope_type']}, theta {config.rope_parameters['rope_theta']:g}"),
        ("embedding", "its own" if config.own_embedding else "the target's"),
        ("output head", head),
        ("proposes", f"the {len(frequent)} most frequent tokens" if frequent is not None else "any token of its head"),
    ]
    if config.conv_kernel_size is not None:
        facts.append(("convolutions", f"{config.conv_kernel_size} taps, groups of {config.conv_group_size} channels"))
    if config.selector_rank is not None:
        facts.append(("correction", f"candidate selector, top {config.selector_top_k}, rank {config.selector_rank}"))
    elif config.markov_rank is not None:
        facts.append(("correction", f"{config.markov_head_type} Markov head, rank {config.markov_rank}"))
    elif config.gru_hidden_dim is not None:
        facts.append(("correction", f"GRU over the block, width {config.gru_hidden_dim}"))
    return facts


def _costs(model: Any) -> list[tuple[str, str]]:
    """Size, and what one full round costs without the verification: two operations a weight and row."""
    config = model.config
    width = model.fc.weight.element_size()
    proposals = config.block_size - config.first_slot
    new_rows = config.block_size / 2  # of context, about
    parameters = size = operations = read = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        parameters, size = parameters + count, size + count * parameter.element_size()
        if name.startswith(_LOOKED_UP + _UNUSED):
            continue
        read += count * parameter.element_size()
        if parameter.dim() != 2:
            continue
        if name.startswith("fc."):
            rows = new_rows
        elif name.startswith(_PER_PROPOSAL):
            rows = proposals
        else:  # keys and values of the context are projected next to the block's
            rows = config.block_size + (new_rows if ".k_proj." in name or ".v_proj." in name else 0)
        operations += 2 * count * rows
    facts = [
        ("parameters", f"{_scaled(parameters)} in {str(model.dtype).removeprefix('torch.')}, {_scaled(size)}B"),
        ("a draft reads", f"{_scaled(read)}B of weights"),
        ("a draft computes", f"{_scaled(operations)}FLOP"),
    ]
    if not config.own_head and config.vocab_size is not None:
        frequent = model.frequent_token_ids
        head = (config.vocab_size if frequent is None else len(frequent)) * config.hidden_size
        facts.append(("  and the target's head", f"{_scaled(head * width)}B, {_scaled(2 * head * proposals)}FLOP"))
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    facts.append(("its cache", f"{_scaled(cache * width)}B a token of context"))
    return facts


def _scaled(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g} "


def _shell(target: str, gguf_file: str | None) -> Any:
    """The target without weights: its shapes are enough."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from .common import gguf_file_in

    gguf = gguf_file_in(target, gguf_file)
    config = AutoConfig.from_pretrained(target, **({"gguf_file": gguf} if gguf else {}))
    with init_empty_weights(), torch.no_grad():
        return AutoModelForCausalLM.from_config(config)
