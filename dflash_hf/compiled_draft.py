"""A drafter's forward pass over a static draft cache, in one compiled function with inputs of one shape."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional
from transformers.generation.configuration_utils import CompileConfig

from .draft_cache import StaticDraftCache
from .graphs import Graphs, graphs_of
from .modeling_dflash import DFlashDraftModel
from .transfers import on_device

# Fused attention takes a mask as it is if the number of keys is a multiple of this, and copies it otherwise.
_KEY_MULTIPLE = 8
# Caches that wait for a call of their size.
_MOST_FREE = 4


class CompiledDraft:
    """Draft forward passes of all calls with one drafter. Graphs live as long as the drafter.

    Where rows of the context and of the block go in the cache, and their positions, are computed in the graph from one
    number a row each, so that a round hands over little and launches one graph.

    Args:
        drafter: the draft model.
        compile_config: transformers' arguments of `torch.compile`.
    """

    def __init__(self, drafter: DFlashDraftModel, compile_config: CompileConfig):
        self._drafter = weakref.ref(drafter)  # see CompiledForward
        self._graphs = Graphs(_draft, compile_config)
        self._lock = threading.Lock()
        self._free: OrderedDict[tuple[int, int], StaticDraftCache] = OrderedDict()

    def take_cache(self, *, batch_size: int, columns: int) -> StaticDraftCache:
        """A cache for a call: one of this size that an earlier call gave back, as its addresses are in the graphs.

        Args:
            batch_size: b.
            columns: rows of context and block that each sequence may have.
        """
        columns = -(-(columns + 1) // _KEY_MULTIPLE) * _KEY_MULTIPLE - 1
        with self._lock:
            cache = self._free.pop((batch_size, columns), None)
        drafter = self._drafter()
        if cache is not None and cache.fits(drafter.norm.weight):
            cache.clear()
            return cache
        return StaticDraftCache(drafter.config.num_hidden_layers, batch_size=batch_size, columns=columns)

    def give_back(self, cache: StaticDraftCache) -> None:
        """A later call may use it."""
        with self._lock:
            self._free[cache.batch_size, cache.columns] = cache
            if len(self._free) > _MOST_FREE:
                self._free.popitem(last=False)

    def __call__(
        self,
        block: torch.Tensor,
        features: torch.Tensor,
        anchors: torch.LongTensor,
        *,
        lengths: list[int],
        counts: list[int],
        cache: StaticDraftCache,
    ) -> torch.Tensor:
        """Hidden states `[b, B, H]` of a block.

        Args:
            block: `[b, B, H]`, embeddings.
            features: `[b, n, K * H_t]`, n from 0 to B, of the newest context rows; they follow what the cache holds.
            anchors: `[b, 1]`, absolute positions of the first slots.
            lengths: context rows of each sequence in the cache.
            counts: how many rows of `features` each sequence has, the first ones.
            cache: from `take_cache`, with rows in it.
        """
        numbers = on_device([lengths, counts], block.device)
        features = functional.pad(features, (0, 0, 0, block.shape[1] - features.shape[1]))
        with self._graphs.lock:  # until the result is out of the graph's own memory
            hidden = self._graphs(self._drafter(), block, features, anchors, numbers, cache.buffers, cache.window)
            return hidden.clone()


def _draft(
    drafter: DFlashDraftModel,
    block: torch.Tensor,
    features: torch.Tensor,
    anchors: torch.LongTensor,
    numbers: torch.LongTensor,
    buffers: list[tuple[torch.Tensor, torch.Tensor]],
    window: int | None,
) -> torch.Tensor:
    """As `CompiledDraft.__call__`, with `features [b, B, K * H_t]` and `numbers [2, b]`, the lengths and the counts."""
    lengths, counts = numbers[0, :, None], numbers[1, :, None]
    slots = torch.arange(block.shape[1], device=block.device)[None]
    hidden_column = buffers[0][0].shape[1] - 1
    real = slots < counts
    columns = torch.where(real, lengths + slots, hidden_column)
    features = torch.where(real[..., None], features, 0)  # what is hidden must be finite, or it shows
    ends = lengths + counts
    cache = StaticDraftCache(len(buffers), batch_size=block.shape[0], columns=hidden_column, buffers=buffers)
    cache.window = window
    cache.place(torch.cat([columns, ends + slots], dim=1), row_ends=ends[:, 0] + block.shape[1], end=hidden_column)
    positions = torch.cat([anchors - counts + slots, anchors + slots], dim=1)
    return drafter(block, features, position_ids=positions, cache=cache).last_hidden_state


def compiled_draft(drafter: DFlashDraftModel, compile_config: CompileConfig) -> CompiledDraft:
    """The compiled function of a drafter, made once for each compile configuration.

    Args:
        drafter, compile_config: see `CompiledDraft`.
    """
    return graphs_of(drafter, repr(compile_config.to_dict()), lambda: CompiledDraft(drafter, compile_config))


def can_be_compiled(drafter: DFlashDraftModel, target: nn.Module) -> bool:
    """Whether a configuration that compiles the target's forward pass is one for the drafter too."""
    quantizer = getattr(drafter, "hf_quantizer", None)
    same_kind = drafter.norm.weight.device.type == target.device.type
    return same_kind and (quantizer is None or quantizer.is_compileable)
