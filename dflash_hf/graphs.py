"""Functions compiled for one model, kept as long as the model and shared by all calls."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.generation.configuration_utils import CompileConfig

# Graphs of all models of a process: a few row counts, each for a few lengths of the static cache. torch's own limit is
# 8; past it a forward pass runs as it is, hooks included.
_MOST_GRAPHS = 64
# What was compiled for each model; gone with the model.
_COMPILED: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Graphs:
    """A function under `torch.compile`, run by one thread at a time.

    Args:
        function: to compile.
        compile_config: transformers' arguments of `torch.compile`.

    Attributes:
        lock: held while it runs; a caller whose preparations belong to the run takes it before them.
    """

    def __init__(self, function: Callable, compile_config: CompileConfig):
        self.lock = threading.RLock()
        self._function = torch.compile(function, **compile_config.to_dict())

    def __call__(self, *inputs: Any) -> Any:
        """Run it. What it returns lies in memory that the next run of a CUDA graph writes into."""
        with self.lock, torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
            if torch.cuda.is_available():
                torch.compiler.cudagraph_mark_step_begin()
            return self._function(*inputs)


def graphs_of(model: nn.Module, key: Any, make: Callable[[], Any]) -> Any:
    """What `make` gave the first time that it was asked for with this model and key."""
    known = _COMPILED.setdefault(model, {})
    if key not in known:
        known[key] = make()
    return known[key]


def fixed_shapes(target: Any, given: CompileConfig | None) -> CompileConfig:
    """The compile configuration of a call, or for None the one that plain generation takes, without dynamic shapes."""
    if given is not None:
        return given
    config = copy.copy(target._default_compile_config())
    config.dynamic = False  # shapes are few already, and graphs of fixed shapes are faster
    return config
