"""Everything that dflash_hf needs from a target model: layers, embedding, head, feature hooks, compatibility check."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .configuration_dflash import DFlashConfig
from .errors import TargetMismatchError
from .packing import PackedLinear

# Embedding tables are padded to a multiple of some power of two; a larger difference is another vocabulary.
VOCABULARY_PADDING = 1024

_LAYER_LIST_NAMES = ("layers", "h", "blocks", "block")


def decoder_layers(target: nn.Module) -> nn.ModuleList:
    """The target's decoder layers, in order.

    Raises:
        TargetMismatchError: if they cannot be found.
    """
    decoder = target.get_decoder()
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    candidates = [
        decoder,
        *(module for name, module in decoder.named_children() if not isinstance(module, nn.ModuleList)),
    ]
    for module in candidates:
        for name in _LAYER_LIST_NAMES:
            layers = getattr(module, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) == count:
                return layers
    raise TargetMismatchError(
        f"No list of {count} decoder layers was found in {type(target).__name__}, so its hidden states cannot be "
        "tapped. dflash_hf needs a decoder-only transformers model."
    )


def embed_tokens(target: nn.Module, token_ids: torch.LongTensor, *, scale: float | None) -> torch.Tensor:
    """Embeddings of draft slots, `[..., H]` for ids `[...]`.

    Args:
        scale: the drafter's `input_embedding_scale`: raw rows of the table times this. None means what the target's
            embedding module returns, with a norm that wraps the embedding (Muse) bypassed.
    """
    return embed_with(target.get_input_embeddings(), token_ids, scale=scale)


def embed_with(embedding: nn.Module, token_ids: torch.LongTensor, *, scale: float | None) -> torch.Tensor:
    """`embed_tokens` for the target's embedding module, which takes `generate`'s loop longer to find than to use."""
    token_ids = token_ids.to(execution_device(embedding))
    if scale is not None and embedding.weight.is_meta:  # offloaded: only a call of the module brings its rows in
        return embedding(token_ids) * (scale / float(getattr(embedding, "scalar_embed_scale", 1.0)))
    if scale is not None:
        rows = functional.embedding(token_ids, embedding.weight)
        return rows if scale == 1.0 else rows * scale
    if hasattr(embedding, "embed_norm"):  # nothing is swapped on the module: other threads may be using it
        return functional.embedding(token_ids, embedding.weight)
    return embedding(token_ids)


def output_head(target: nn.Module) -> nn.Module:
    """The target's output head.

    Raises:
        TargetMismatchError: if it has none.
    """
    head = target.get_output_embeddings()
    if head is None:
        raise TargetMismatchError(
            f"{type(target).__name__} has no output head (get_output_embeddings() is None). Load the target with its "
            "language-model head, for example through AutoModelForCausalLM."
        )
    return head


def output_vocabulary(target: nn.Module) -> int:
    """Width of the target's logits; a quantised head's packed weight does not tell it."""
    head = output_head(target)
    return getattr(head, "out_features", None) or head.weight.shape[0]


class OutputHead:
    """The target's output head with the transform that its own forward applies to the logits, for draft hidden states.

    Args:
        target: the target model.
        config: the drafter's; its own multiplier and softcap, where present, replace the target's transform.
        own: an output head of the drafter's own, which is used instead and knows nothing of the target's transform.
    """

    def __init__(self, target: nn.Module, config: DFlashConfig, own: nn.Module | None = None):
        self.head = output_head(target) if own is None else own
        text = target.config.get_text_config(decoder=True)
        self.multiplier, self.softcap = config.output_multiplier, config.final_logit_softcapping
        if own is None and self.multiplier is None and self.softcap is None:
            self.softcap = getattr(text, "final_logit_softcapping", None)  # Gemma 2 and later
            if getattr(text, "logit_scale", None):  # Cohere
                self.multiplier = text.logit_scale
            elif getattr(text, "output_multiplier", None):  # Muse
                self.multiplier = text.output_multiplier
            elif getattr(text, "logits_scaling", None):  # Granite
                self.multiplier = 1.0 / text.logits_scaling

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draft logits `[..., V]` of `hidden_states [..., H]`, in the head's dtype."""
        weight = self.head.weight
        if weight.is_floating_point() and not torch.is_autocast_enabled(hidden_states.device.type):
            hidden_states = hidden_states.to(weight.dtype)
        return self.transform(self.head(hidden_states))

    @property
    def has_rows(self) -> bool:
        """Whether logits are a plain product with `weight`, here in memory, so that `rows` may stand for the head."""
        weight = self.head.weight
        plain = type(self.head) in (nn.Linear, PackedLinear)
        return plain and type(weight) is nn.Parameter and weight.is_floating_point() and not weight.is_meta

    def rows(self, token_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight rows `[v, H]` and bias `[v]` of some tokens, for logits over a part of the vocabulary."""
        bias = getattr(self.head, "bias", None)
        token_ids = token_ids.to(self.head.weight.device)
        return self.head.weight[token_ids], None if bias is None else bias[token_ids]

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        """Multiplier, then softcap."""
        if self.multiplier is not None and self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None and self.softcap > 0:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes: its weight's device, or that of accelerate's hook where the weight is offloaded."""
    hook = vars(module).get("_hf_hook")  # a getattr that fails costs more than all the rest of it
    device = getattr(hook, "execution_device", None)
    return module.weight.device if device is None else torch.device(device)


def position_limit(target: nn.Module) -> int | None:
    """Positions that a learned position table has; None for rotary targets, which have no such limit."""
    text = target.config.get_text_config(decoder=True)
    if getattr(text, "rope_parameters", None) is not None:
        return None
    return getattr(text, "max_position_embeddings", None)


# A lock for each target's hooks.
_HOOKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class _Recording:
    """`FeatureCapture.recording` without a generator, whose set-up costs more than the rest in a small round."""

    def __init__(self, capture: FeatureCapture):
        self.capture = capture

    def __enter__(self) -> None:
        self.capture.clear()
        self.capture._recording = True

    def __exit__(self, *exc_info) -> None:
        self.capture._recording = False


class FeatureCapture:
    """Reads the tapped hidden states of a target by forward hooks, only inside `recording()`, only for this thread.

    A hook on the layer itself gives the raw state also for the last layer, where `hidden_states[-1]` has the final norm
    applied, and leaves `output_hidden_states` to the user. Forward passes outside `recording()` (of another thread, or
    of a logits processor) are not seen. A target that was compiled runs eagerly inside it: its graphs were
    made without the hooks and would skip them.

    Args:
        target: the target model.
        layer_ids: taps, -1 for the embedding output.

    Attributes:
        runs_eagerly: whether the target was compiled by the user.
        lock: of the target's hooks; held while they change, and by who cannot bear that.
    """

    def __init__(self, target: nn.Module, layer_ids: list[int]):
        self.layers = decoder_layers(target)
        self.lock = _HOOKS.setdefault(target, threading.RLock())
        # Gemma 3n's layers carry several streams [streams, b, n, H]; the active one is the hidden state.
        self._stream = getattr(target.config.get_text_config(decoder=True), "altup_active_idx", None)
        self.layer_ids = list(layer_ids)
        self.runs_eagerly = _is_compiled(target, self.layers[0])
        self._thread = threading.get_ident()
        self._recording = False
        self._states: dict[int, list[torch.Tensor]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> FeatureCapture:
        with self.lock:
            for layer_id in sorted(set(self.layer_ids)):
                if layer_id == -1:
                    hook = self.layers[0].register_forward_pre_hook(self._record_input, with_kwargs=True)
                else:
                    hook = self.layers[layer_id].register_forward_hook(self._recorder(layer_id))
                self._handles.append(hook)
        return self

    def __exit__(self, *exc_info) -> None:
        with self.lock:
            while self._handles:
                self._handles.pop().remove()
        self._states.clear()

    def _active(self) -> bool:
        return self._recording and threading.get_ident() == self._thread

    def _recorder(self, layer_id: int):
        def record(module, inputs, output):
            if self._active():
                self._keep(layer_id, output if isinstance(output, torch.Tensor) else output[0])

        return record

    def _record_input(self, module, inputs, keywords):
        if self._active():
            self._keep(-1, inputs[0] if inputs else keywords["hidden_states"])

    def _keep(self, layer_id: int, state: torch.Tensor) -> None:
        state = state if self._stream is None else state[self._stream]
        self._states.setdefault(layer_id, []).append(state)

    def recording(self) -> AbstractContextManager[None]:
        """Record the target's forward passes that run inside: one, or the chunks of a prefill in order."""
        return self._eager_recording() if self.runs_eagerly else _Recording(self)

    @contextmanager
    def _eager_recording(self) -> Iterator[None]:
        with torch.compiler.set_stance("force_eager"), _Recording(self):
            yield

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """No hooks inside: for a forward pass that gives the states itself (`supply`)."""
        entered = bool(self._handles)
        self.__exit__()
        try:
            yield
        finally:
            if entered:
                self.__enter__()

    def supply(self, states: list[torch.Tensor]) -> None:
        """States of the taps, `[b, n, H_t]` each, from a forward pass without hooks."""
        self._states = {layer_id: [state] for layer_id, state in zip(self.layer_ids, states)}

    def clear(self) -> None:
        """Forget what was recorded."""
        self._states.clear()

    def states(self) -> list[torch.Tensor]:
        """The first recorded state of each tap, which stays recorded.

        Raises:
            TargetMismatchError: if a tapped layer did not run.
        """
        self._require_all()
        return [self._states[layer_id][0] for layer_id in self.layer_ids]

    def _require_all(self) -> None:
        for layer_id in self.layer_ids:
            if layer_id not in self._states:
                raise TargetMismatchError(
                    f"Target layer {layer_id} gave no hidden state in its last forward pass. Hooks do not run inside a "
                    "target that was compiled before; compile it with torch._dynamo.config.skip_nnmodule_hook_guards "
                    "off, or pass the uncompiled model."
                )

    def take(self, device: torch.device) -> torch.Tensor:
        """The recorded states `[b, n, K * H_t]` on `device`, concatenated over the taps; they are forgotten here.

        Raises:
            TargetMismatchError: if a tapped layer did not run.
        """
        states = self._states
        self._require_all()
        taps = [states[layer_id] for layer_id in self.layer_ids]
        taps = [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in taps]
        features = torch.cat([tap.to(device) for tap in taps], dim=-1)
        states.clear()
        return features


def _is_compiled(target: nn.Module, layer: nn.Module) -> bool:
    """Whether `torch.compile` was applied to the target or to a part of it that holds `layer`."""
    path = next(name for name, module in target.named_modules() if module is layer).split(".")
    holders = [target.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    return any(
        module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in holders
    )


def check_compatibility(config: DFlashConfig, target: nn.Module) -> None:
    """Check that a drafter with `config` can read and propose for `target`.

    Raises:
        TargetMismatchError: naming the value, the limit and the remedy.
    """
    text = target.config.get_text_config(decoder=True)
    name = f"{type(target).__name__} {getattr(target.config, '_name_or_path', '') or ''}".strip()
    trained_for = f" It was trained for {config.target_name_or_path}." if config.target_name_or_path else ""
    if text.hidden_size != config.target_hidden_size:
        raise TargetMismatchError(
            f"The drafter reads hidden states of width {config.target_hidden_size}, but {name} has hidden size "
            f"{text.hidden_size}. Use the drafter with the target it was trained for.{trained_for}"
        )
    rows, width = target.get_input_embeddings().weight.shape
    borrowed = [word for word, own in (("embedding", config.own_embedding), ("head", config.own_head)) if not own]
    if borrowed and width != config.hidden_size:
        raise TargetMismatchError(
            f"The drafter has hidden size {config.hidden_size} and borrows {' and '.join(borrowed)} of {name}, whose "
            f"width is {width}. A drafter without both of its own needs the target's width.{trained_for}"
        )
    for layer_id in config.target_layer_ids:
        if layer_id >= text.num_hidden_layers:
            raise TargetMismatchError(
                f"The drafter taps target layer {layer_id}, but {name} has {text.num_hidden_layers} layers (ids 0 to "
                f"{text.num_hidden_layers - 1}). Use the drafter with the target it was trained for.{trained_for}"
            )
    if not config.own_embedding and config.mask_token_id >= rows:
        raise TargetMismatchError(
            f"mask_token_id {config.mask_token_id} is outside the embedding of {name} ({rows} rows). The drafter was "
            f"trained with a larger embedding; use the target it was trained for.{trained_for}"
        )
    if config.vocab_size is not None and abs(rows - config.vocab_size) >= VOCABULARY_PADDING:
        raise TargetMismatchError(
            f"The drafter was trained for a vocabulary of {config.vocab_size} tokens, but {name} has {rows}, which "
            f"padding (less than {VOCABULARY_PADDING} rows) does not explain. Their token ids differ; use the target "
            f"it was trained for.{trained_for}"
        )
