"""A target's forward pass and its tapped hidden states in one compiled function.

Hooks that are added to a compiled model are skipped by its graphs, so the states have to be outputs of the graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from transformers.generation.configuration_utils import CompileConfig

from .graphs import Graphs, graphs_of
from .target import FeatureCapture


class _AlwaysCapture(FeatureCapture):
    """Records every forward pass while it is entered; nothing in it depends on the moment, so that it can be traced."""

    def _active(self) -> bool:
        return True


class CompiledForward:
    """The target with its taps, compiled. Graphs live as long as the target and are used by every later call.

    Args:
        target: the target model.
        layer_ids: taps, -1 for the embedding output.
        compile_config: transformers' arguments of `torch.compile`.
    """

    def __init__(self, target: nn.Module, layer_ids: list[int], compile_config: CompileConfig):
        # Not the target itself: this object is kept in a dictionary that the target's end has to clear.
        self._target = weakref.ref(target)
        self._capture = _AlwaysCapture(target, layer_ids)
        self._graphs = Graphs(_forward, compile_config)

    def __call__(self, capture: FeatureCapture, inputs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        """Run it.

        Args:
            capture: of the call that is running; its hooks are out of the way meanwhile.
            inputs: of the target's forward.

        Returns:
            the model's outputs, and a state `[b, n, H_t]` for each tap.
        """
        # A compiled function reads the hooks; other threads' calls may come and go only before and after it.
        with self._capture.lock, self._graphs.lock, capture.suspended(), self._capture:
            outputs, states = self._graphs(self._target(), self._capture, inputs)
            # The next run of a CUDA graph writes into the same memory.
            outputs.logits = outputs.logits.clone()
            return outputs, [state.clone() for state in states]


def _forward(target: nn.Module, capture: _AlwaysCapture, inputs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    capture.clear()
    outputs = target(**inputs, return_dict=True)
    return outputs, capture.states()


def compiled_forward(target: nn.Module, layer_ids: list[int], compile_config: CompileConfig) -> CompiledForward:
    """The compiled function of a target, made once for each tap list and compile configuration.

    Args:
        target, layer_ids, compile_config: see `CompiledForward`.
    """
    key = (tuple(layer_ids), repr(compile_config.to_dict()))
    return graphs_of(target, key, lambda: CompiledForward(target, layer_ids, compile_config))
