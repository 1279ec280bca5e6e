"""Families that are recognised and refused, each with what is missing to run it."""

from __future__ import annotations

from typing import Any

_MIMO = (
    "a MiMo drafter: its attention has a learned sink for each head and scales its values, and the mask token's "
    "embedding lies in a pickled file of its own. dflash_hf has neither."
)
_LAGUNA = (
    "a Laguna drafter: its attention output is gated (`g_proj`), each tap has a norm of its own (`aux_hidden_norms`) "
    "and every layer a window of its own. dflash_hf does not compute these."
)
_NEMOTRON = (
    "a Nemotron drafter quantised by ModelOpt (W4A16 NVFP4), with an embedding of its own and no head. transformers "
    "cannot unpack NVFP4 weights; dflash_hf needs an unquantised export."
)
_UNKNOWN = "a drafter family that dflash_hf does not know; run as plain DFlash it would propose wrong tokens."


def refusal(on_disk: dict[str, Any]) -> str | None:
    """Why this published family cannot run, naming the key that tells it, or None if it is not one of these."""
    nested = on_disk.get("dflash_config") or {}
    if on_disk.get("model_type") == "laguna":
        return f"model_type 'laguna': this is {_LAGUNA}"
    signs = {
        "attention_sink_bias": _MIMO,
        "attention_value_scale": _MIMO,
        "gating": _LAGUNA,
        "sliding_windows": _LAGUNA,
        "has_embed_tokens": _NEMOTRON,
    }
    for key, family in signs.items():
        if nested.get(key):
            return f"dflash_config.{key} = {nested[key]!r}: this is {family}"
        if on_disk.get(key):
            return f"config.json sets `{key}` = {on_disk[key]!r}: this is {family}"
    algorithm = (on_disk.get("quantization_config") or {}).get("quant_algo")
    if algorithm:
        return f"quantization_config.quant_algo is {algorithm!r}: this is {_NEMOTRON}"
    projector = nested.get("projector_type", on_disk.get("projector_type"))
    if projector not in (None, "domino", "dspark"):
        return f"projector_type {projector!r} names {_UNKNOWN}"
    return None
