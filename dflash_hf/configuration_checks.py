"""Checks of the parts of a configuration that only some families have; `DFlashConfig.check` calls them."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .checkpoints import FAMILIES
from .errors import DFlashConfigError

WINDOW_RULES = ("query", "anchor")
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
DECODER_TYPES = ("qwen3", "gemma4")

# Fields that only make sense together, and what they describe.
_GROUPS = {
    ("conv_kernel_size", "conv_group_size"): "DFlash 2's convolutions",
    ("selector_rank", "selector_top_k"): "DFlash 2's candidate selector",
    ("markov_rank", "markov_head_type"): "DSpark's Markov head",
    ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"): "Domino's GRU",
}


def check_extras(config: Any) -> None:
    """Check family, window rule, vocabulary, convolutions and the heads that correct draft logits.

    Raises:
        DFlashConfigError: naming the value, the limit and the remedy.
    """
    _check_choice("family", config.family, tuple(FAMILIES))
    _check_choice("window_rule", config.window_rule, WINDOW_RULES)
    _check_decoder(config)
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    _check_choice("rope_type", rope_type, ("default", *ROPE_INIT_FUNCTIONS))
    present = []
    for names, what in _GROUPS.items():
        values = [getattr(config, name) for name in names]
        if all(value is None for value in values):
            continue
        present.append(what)
        for name, value in zip(names, values):
            if value is None:
                raise DFlashConfigError(f"{name} is not set, but {what} needs {' and '.join(names)}. Set all of them.")
            if isinstance(value, int) and value < (0 if name == "pure_draft_prefix_len" else 1):
                raise DFlashConfigError(f"{name} is {value}; {what} needs at least 1. Leave it unset to do without.")
    heads = [what for what in present if "convolutions" not in what]
    if len(heads) > 1:
        raise DFlashConfigError(f"{heads[0]} and {heads[1]} both correct the draft logits. Configure one of them.")
    if config.conv_group_size is not None and config.hidden_size % config.conv_group_size:
        raise DFlashConfigError(
            f"hidden_size {config.hidden_size} is not a multiple of conv_group_size {config.conv_group_size}."
        )
    if config.markov_head_type is not None:
        _check_choice("markov_head_type", config.markov_head_type, MARKOV_HEAD_TYPES)
    if config.confidence_head_with_markov and config.markov_rank is None:
        raise DFlashConfigError("confidence_head_with_markov is true, but there is no Markov head (markov_rank).")
    _check_vocabulary(config, bool(heads))


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DFlashConfigError(f"{name} {value!r} is not one of {', '.join(allowed)}.")


def _check_decoder(config: Any) -> None:
    _check_choice("decoder_type", config.decoder_type, DECODER_TYPES)
    if config.decoder_type == "qwen3":
        for name in ("attention_k_eq_v", "layer_scalars"):
            if getattr(config, name):
                raise DFlashConfigError(
                    f"{name} is true, which only Gemma 4's layers can be. Set decoder_type 'gemma4'."
                )
        return
    if config.conv_kernel_size is not None:
        raise DFlashConfigError("DFlash 2's convolutions (conv_kernel_size) are for decoder_type 'qwen3' only.")
    if set(config.layer_types) != {"full_attention"}:
        raise DFlashConfigError(
            f"layer_types is {config.layer_types}; a drafter with Gemma 4's layers has full attention on all of them."
        )
    for name in ("own_embedding", "own_head", "sample_from_anchor"):
        if not getattr(config, name):
            raise DFlashConfigError(
                f"{name} is false, but the only layout for Gemma 4's layers, DeepSpec's, has it. Set it to true."
            )


def _check_vocabulary(config: Any, has_head: bool) -> None:
    if config.vocab_size is None and (has_head or config.own_embedding or config.own_head):
        raise DFlashConfigError("vocab_size is not set, but the drafter has tables of one row a token. Set it.")
    if config.selector_top_k is not None and config.selector_top_k > config.vocab_size:
        raise DFlashConfigError(
            f"selector_top_k is {config.selector_top_k}, more than the vocabulary of {config.vocab_size} tokens."
        )
    if config.draft_vocab_size is None:
        return
    if not config.own_head:
        raise DFlashConfigError(
            f"draft_vocab_size is {config.draft_vocab_size}, but own_head is false: a trimmed vocabulary needs a head "
            "of its own."
        )
    if not 1 <= config.draft_vocab_size < config.vocab_size:
        raise DFlashConfigError(
            f"draft_vocab_size is {config.draft_vocab_size}; a trimmed vocabulary has 1 to {config.vocab_size - 1} "
            "tokens. Leave it unset for the whole vocabulary."
        )
    if config.selector_top_k is not None:
        raise DFlashConfigError("A candidate selector scores the whole vocabulary; draft_vocab_size cannot be set.")
