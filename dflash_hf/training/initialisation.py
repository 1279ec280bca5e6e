"""A new drafter that starts from its target's own layers."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import DFlashError
from ..modeling_dflash import DFlashDraftModel
from ..target import decoder_layers

_MATRICES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


@torch.no_grad()
def initialise_from_target(drafter: DFlashDraftModel, target: nn.Module) -> None:
    """Copy the target's last layers and its final norm into the drafter; `fc` passes the last tap through.

    Query and key norms of targets without them stay at 1. Measured on SmolLM2-135M this gave AdamW no head start worth
    having and slowed Muon down, so it is off by default.

    Args:
        drafter: changed in place.
        target: of the Llama layout (separate q, k, v, o and gate, up, down projections).

    Raises:
        DFlashError: if the target has fewer layers, other shapes or other names; the drafter is unchanged then.
    """
    layers = list(decoder_layers(target))
    count = len(drafter.layers)
    if count > len(layers):
        raise DFlashError(f"init_from_target: the drafter has {count} layers, the target {len(layers)}.")
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for draft_layer, layer in zip(drafter.layers, layers[-count:]):
        for name in _MATRICES:
            _pair(copies, name, draft_layer.get_submodule(name), _find(layer, name).weight)
        before_mlp = "pre_feedforward_layernorm" if hasattr(layer, "pre_feedforward_layernorm") else None
        norms = {"input_layernorm": "input_layernorm", "post_attention_layernorm": before_mlp}
        for name, theirs in norms.items():
            _pair(copies, name, draft_layer.get_submodule(name), _gain(_find(layer, theirs or name), name))
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            norm = getattr(layer.self_attn, name.split(".")[1], None)
            if norm is not None:
                _pair(copies, name, draft_layer.get_submodule(name), _gain(norm, name))
    final = getattr(target.get_decoder(), "norm", None)
    if final is not None:
        _pair(copies, "norm", drafter.norm, _gain(final, "norm"))
    for parameter, value in copies:
        parameter.copy_(value)
    width = drafter.config.target_hidden_size
    if width == drafter.config.hidden_size:
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -width:].copy_(torch.eye(width))


def _find(layer: nn.Module, name: str) -> nn.Module:
    try:
        return layer.get_submodule(name)
    except AttributeError as error:
        raise DFlashError(
            f"init_from_target: the target's {type(layer).__name__} has no {name}, so its layers do not fit into a "
            "drafter. Leave the option out."
        ) from error


def _pair(copies: list, name: str, module: nn.Module, value: torch.Tensor) -> None:
    if module.weight.shape != value.shape:
        raise DFlashError(
            f"init_from_target: {name} has shape {tuple(value.shape)} in the target and {tuple(module.weight.shape)} "
            "in the drafter. Give the drafter the target's geometry (DFlashConfig.from_target), or leave the option "
            "out."
        )
    copies.append((module.weight, value))


def _gain(norm: nn.Module, name: str) -> torch.Tensor:
    """The factor by which a norm scales a vector of RMS 1: its weight, or 1 + weight for Gemma's."""
    if norm.weight.dim() != 1 or getattr(norm, "bias", None) is not None:
        raise DFlashError(f"init_from_target: the target's {name} is a {type(norm).__name__}, not an RMS norm.")
    return norm(torch.ones_like(norm.weight, dtype=torch.float32))
