"""DeepSpec's layout for Gemma 4 targets: `Gemma4DSparkModel`, the target's own config with DeepSpec's keys added.

Gemma 4's text config has head sizes and RoPE for each kind of layer; the drafter's layers are all of the global one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import CheckpointError
from . import deepspec
from .common import backbone_fields, backbone_keys, require_backbone, require_expressible, require_keys
from .dspark import MARKOV_EXTRAS

FAMILY = "deepspec_gemma4"
TITLE = "DeepSpec Gemma 4"
KEY_MAPPING: dict[str, str] = {}
TO_DISK: dict[str, str] = {}
IGNORED: tuple[str, ...] = ()

# Of Qwen3's config only; Gemma 4's takes no empty window.
_FOREIGN_KEYS = ("hidden_act", "max_window_layers", "use_sliding_window", "sliding_window")


def matches(on_disk: dict[str, Any]) -> bool:
    """Whether this `config.json` is in DeepSpec's layout for Gemma 4."""
    return "Gemma4DSparkModel" in (on_disk.get("architectures") or [])


def read_config(on_disk: dict[str, Any], tensor_names: Iterable[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `DFlashConfig`; the tensors' names tell whether the layers have a `layer_scalar`.

    Raises:
        CheckpointError: if a key is missing, a layer slides, layers differ from each other, or scores are capped.
    """
    require_backbone(on_disk, title=TITLE)
    keys = (*deepspec.REQUIRED, "layer_types", "hidden_activation", "attention_k_eq_v", "rope_parameters")
    require_keys(on_disk, keys, title=TITLE)
    if on_disk.get("attn_logit_softcapping"):
        raise CheckpointError(
            f"config.json sets attn_logit_softcapping {on_disk['attn_logit_softcapping']}; Gemma 4's attention has "
            "no cap, and dflash_hf does not compute one."
        )
    resolved = _global_heads(on_disk) | {
        "hidden_act": on_disk["hidden_activation"],
        "rope_parameters": _global_rope(on_disk["rope_parameters"]),
    }
    fields = deepspec.read_own(on_disk, backbone_fields(on_disk | resolved))
    return fields | {
        "family": FAMILY,
        "decoder_type": "gemma4",
        "attention_k_eq_v": on_disk["attention_k_eq_v"],
        "layer_scalars": any(name.endswith(".layer_scalar") for name in tensor_names or ()),
        "input_embedding_scale": _embedding_scale(on_disk),
        "final_logit_softcapping": on_disk.get("final_logit_softcapping"),
    }


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a DeepSpec drafter for Gemma 4.

    Raises:
        CheckpointError: for a drafter with other layers, another embedding scale, or not of DeepSpec's kind.
    """
    extras = {"decoder_type", "attention_k_eq_v", "layer_scalars", "input_embedding_scale", "final_logit_softcapping"}
    require_expressible(fields, extras | MARKOV_EXTRAS | deepspec.OWN_EXTRAS, title=TITLE)
    own = deepspec.own_keys(fields, title=TITLE)
    for name, value in (("decoder_type", "gemma4"), ("input_embedding_scale", _embedding_scale(fields))):
        if fields.get(name) != value:
            raise CheckpointError(f"A {TITLE} drafter has {name} {value}, this one has {fields.get(name)}.")
    out = {key: value for key, value in backbone_keys(fields).items() if key not in _FOREIGN_KEYS}
    return {
        **out,
        **own,
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": fields["attention_k_eq_v"],
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        "global_head_dim": fields["head_dim"],
        "num_global_key_value_heads": fields["num_key_value_heads"],
        "hidden_activation": fields["hidden_act"],
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {"full_attention": dict(fields["rope_parameters"])},
    }


def _embedding_scale(sizes: dict[str, Any]) -> float:
    """Gemma's embedding module multiplies its rows by this, and no key says so."""
    return float(sizes["hidden_size"]) ** 0.5


def _global_heads(on_disk: dict[str, Any]) -> dict[str, int]:
    """`head_dim` and `num_key_value_heads` of full attention, in the spelling of before or after transformers 5.2x."""
    names = ("head_dim", "num_key_value_heads")
    layers = on_disk.get("per_layer_config")
    if layers is None:
        require_keys(on_disk, ("global_head_dim",), title=TITLE)
        own_heads = on_disk["attention_k_eq_v"] and on_disk.get("num_global_key_value_heads")
        return dict(zip(names, (on_disk["global_head_dim"], own_heads or on_disk["num_key_value_heads"])))
    require_keys(on_disk, names, title=TITLE)
    base = {name: on_disk[name] for name in names}
    found = [base | layers.get(str(index), {}) for index in range(on_disk["num_hidden_layers"])]
    if any(layer != found[0] for layer in found) or found[0].keys() != base.keys():
        raise CheckpointError(
            f"per_layer_config {layers} gives the draft layers different sizes, or others than heads."
        )
    return found[0]


def _global_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The parameters of full attention, which may be nested by layer type."""
    rope = rope.get("full_attention", rope)
    require_keys(rope, ("rope_theta", "rope_type"), title=TITLE, where="rope_parameters")
    return rope
