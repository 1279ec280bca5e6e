"""A second device for machines that have none: its tensors live in CPU memory, and it refuses to meet the CPU's.

Inside `pretend_device()` an operation on tensors of both devices raises as it would on an accelerator; copies between
them, scalars and CPU indices are allowed as there.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

torch.utils.backend_registration._setup_privateuseone_for_python_backend("away")
AWAY = torch.device("away:0")
_COPIES = ("aten._to_copy", "aten.copy_", "aten.index.Tensor", "aten.index_put_", "aten._index_put_impl_")


class AwayTensor(torch.Tensor):
    """What looks like a tensor on `AWAY`."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=AWAY,
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    def __repr__(self):
        return f"AwayTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """For factories, which have no tensor of the device among their arguments."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Unseen(TorchFunctionMode):
    """What happens below the level of the other mode: `torch.tensor` fills its result, `tolist` reads memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.tolist and isinstance(args[0], AwayTensor):
            return args[0].inner.tolist()
        return function(*args, **kwargs)


def _run(function, args, kwargs):
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    away = [each for each in tensors if isinstance(each, AwayTensor)]
    here = [each for each in tensors if not isinstance(each, AwayTensor) and each.dim()]
    if away and here and not str(function).startswith(_COPIES):
        raise RuntimeError(f"Expected all tensors to be on the same device: {function} got {AWAY} and cpu")
    device = kwargs.get("device")
    goes_away = bool(away) if device is None else torch.device(device).type == AWAY.type
    if str(function).startswith(_COPIES[1:]):
        goes_away = isinstance(tensors[0], AwayTensor)
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain_args, plain_kwargs = tree_map(_inner, (args, kwargs))
    output = function(*plain_args, **plain_kwargs)
    if goes_away:
        output = tree_map(lambda each: AwayTensor(each) if isinstance(each, torch.Tensor) else each, output)
    if not away or not goes_away or device is not None:
        return output
    return return_and_correct_aliasing(function, args, kwargs, output)


def _inner(value):
    return value.inner if isinstance(value, AwayTensor) else value


@contextmanager
def pretend_device():
    """A context in which `AWAY` can be used."""
    with _Unseen(), _Mode():
        yield


def send_away(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers to `AWAY`, in place."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter, AwayTensor):
                part._parameters[name] = nn.Parameter(AwayTensor(parameter.detach()), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, AwayTensor):
                part._buffers[name] = AwayTensor(buffer)
    return module
