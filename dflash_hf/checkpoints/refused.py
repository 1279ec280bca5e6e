"""Families that are recognised and refused, each with what is missing to run it."""

from __future__ import annotations

from typing import Any


def _nested(on_disk: dict[str, Any]) -> dict[str, Any]:
    return on_disk.get("dflash_config") or {}


def _has(on_disk: dict[str, Any], *keys: str) -> bool:
    return any(on_disk.get(key) or _nested(on_disk).get(key) for key in keys)


def refusal(on_disk: dict[str, Any]) -> str | None:
    """Why this published family cannot run, or None if it is not one of these."""
    architectures = on_disk.get("architectures") or []
    if _has(on_disk, "attention_sink_bias", "attention_value_scale"):
        return (
            "This is a MiMo drafter: its attention has a learned sink for each head and scales its values, and the mask "
            "token's embedding lies in a pickled file of its own. dflash_hf has neither."
        )
    if on_disk.get("model_type") == "laguna" or _has(on_disk, "gating") or on_disk.get("sliding_windows"):
        return (
            "This is a Laguna drafter: its attention output is gated (`g_proj`), each tap has a norm of its own "
            "(`aux_hidden_norms`) and every layer a window of its own. dflash_hf does not compute these."
        )
    if _has(on_disk, "has_embed_tokens") or (on_disk.get("quantization_config") or {}).get("quant_algo"):
        return (
            "This is a Nemotron drafter quantised by ModelOpt (W4A16 NVFP4), with an embedding of its own and no head. "
            "transformers cannot unpack NVFP4 weights; dflash_hf needs an unquantised export."
        )
    if any(name.startswith("Gemma4DSpark") for name in architectures):
        return (
            "This is DeepSpec's Gemma4DSparkModel: its layers are Gemma 4's (values are the normed keys, two norms "
            "around each sublayer, scaled embeddings), not the Qwen3 layers that dflash_hf's drafter has. Use the "
            "Qwen3DSparkModel drafters, or z-lab's Gemma 4 drafters."
        )
    projector = _nested(on_disk).get("projector_type", on_disk.get("projector_type"))
    if projector not in (None, "domino", "dspark"):
        return (
            f"projector_type {projector!r} names a drafter family that dflash_hf does not know; run as plain DFlash it "
            "would propose wrong tokens."
        )
    return None
