"""Linear layers packed for a CPU: a verification of a few rows costs little more than a single row.

The matrix library behind `nn.Linear` on x86 is poor at 4 to 32 rows, which is what a verification and a draft are.
oneDNN's kernels on weights that were laid out for them beforehand are up to twice as fast there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import UnsupportedGenerationError

# From this many rows on the packed kernel is used. For 1 row the plain one is faster, for 2 and 3 it is as good.
FEWEST_ROWS = 4


class PackedLinear(nn.Linear):
    """An `nn.Linear` that keeps a copy of its weight in oneDNN's layout beside it; `pack_linears` makes them.

    Parameters, state dict and results stay (results to rounding). The plain kernel is used for few rows, under autocast
    or autograd, inside `torch.compile`, and once the layer is moved or cast. A weight that was changed is packed anew.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`: `[..., in_features] -> [..., out_features]`."""
        if torch.compiler.is_compiling() or input.numel() < FEWEST_ROWS * self.in_features or not self._applies(input):
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self.pack(), self.bias, "none", [], "")

    def _applies(self, input: torch.Tensor) -> bool:
        tensors = (input, self.weight) if self.bias is None else (input, self.weight, self.bias)
        return (
            all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
            and not torch.is_autocast_enabled("cpu")
            and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        )

    def pack(self) -> torch.Tensor:
        """The weight in oneDNN's layout."""
        weight = self.weight
        state = (weight.data_ptr(), weight._version)
        packed = self.__dict__.get("_packed")
        if packed is None or packed[0] != state:
            packed = self.__dict__["_packed"] = (state, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8))
        return packed[1]

    def _apply(self, *args, **kwargs):
        self.__dict__.pop("_packed", None)  # moved or cast
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # A packed tensor can be neither copied nor pickled.
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


def pack_linears(model: nn.Module) -> int:
    """Pack all `nn.Linear` layers of a target or a drafter, in place, for generation on a CPU.

    A second copy of every packed weight is kept: memory for them doubles (an output head that shares the embedding's
    weight is packed as well, the embedding is not). `unpack_linears` undoes it. Do not write into the weights through
    `.data` while they are packed; every other change is seen.

    Args:
        model: fp32, on the CPU.

    Returns:
        bytes that the packed copies take.

    Raises:
        UnsupportedGenerationError: if torch has no oneDNN here, the model has adapters of PEFT, is quantised, offloaded
            or compiled, not on the CPU or not fp32, or has no such layers.
    """
    if not torch.backends.mkldnn.is_available():
        raise UnsupportedGenerationError("pack_linears needs oneDNN, which this build of torch does not have.")
    if getattr(model, "peft_config", None):
        raise UnsupportedGenerationError(
            f"{type(model).__name__} has PEFT adapters, which write into weights where packing cannot see it. "
            "Merge them first: model.merge_and_unload()."
        )
    # By its tensors: a model that was dequantised when it was loaded (GGUF) still says that it is quantised.
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        plain = (tensor.is_floating_point() and tensor.element_size() > 1) or tensor.dtype == torch.bool
        if tensor.dim() > 1 and not plain:
            raise UnsupportedGenerationError(
                f"{type(model).__name__} is quantised ({name} is {tensor.dtype}); pack_linears packs fp32 weights only."
            )
    layers = {name: module for name, module in model.named_modules() if type(module) in (nn.Linear, PackedLinear)}
    if not layers:
        raise UnsupportedGenerationError(f"{type(model).__name__} has no nn.Linear layers to pack.")
    for name, layer in layers.items():
        if type(layer.weight) is not nn.Parameter:
            raise UnsupportedGenerationError(
                f"The weight of layer {name} is a {type(layer.weight).__name__}; pack_linears packs plain fp32 weights."
            )
        if hasattr(layer, "_hf_hook") or layer.weight.is_meta:
            raise UnsupportedGenerationError(f"Layer {name} is offloaded; pack_linears needs all weights in memory.")
        if layer.weight.device.type != "cpu" or layer.weight.dtype != torch.float32:
            raise UnsupportedGenerationError(
                f"Layer {name} is {layer.weight.dtype} on {layer.weight.device}; pack_linears is for fp32 on the CPU. "
                "Load the model with dtype=torch.float32 there, or do without: other devices and dtypes gain nothing."
            )
    for layer in layers.values():
        layer.__class__ = PackedLinear
        layer.pack()
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in layers.values())


def unpack_linears(model: nn.Module) -> None:
    """Undo `pack_linears`; nothing happens to a model that is not packed."""
    for module in model.modules():
        if type(module) is PackedLinear:
            module.__dict__.pop("_packed", None)
            module.__class__ = nn.Linear


def linear_of_rows(weight: torch.Tensor, bias: torch.Tensor | None, *, packed: bool) -> nn.Linear:
    """A layer with rows `[v, H]` of another one's weight and `[v]` of its bias, packed or not."""
    layer = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    if packed:
        layer.__class__ = PackedLinear
    return layer
