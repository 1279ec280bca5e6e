"""DFlash 2's grouped dynamic causal convolution along a block."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .configuration_dflash import DFlashConfig
from .errors import DFlashError


class GroupedDynamicConvolution(nn.Module):
    """A short causal convolution around a sublayer: one on its input and one on its output.

    `y_t = sum_o (base[side, o, channel] + dynamic_t[side, o, group(channel)]) * x_(t - o)`: the base kernels are
    learned, the dynamic ones projected from the sublayer's normed input at slot t. Rows before slot 0 are zero, so a
    block never looks into the context.

    Source: DFlash 2, z-lab's `dflash` 0.1.0.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        self.block_size = config.block_size
        groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * groups, bias=False)

    def before(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve a sublayer's normed input `[b, B, H]`; returns it and the dynamic kernel for `after`.

        Raises:
            DFlashError: for more slots than a block has; a convolution must not run from one block into the next.
        """
        if states.shape[1] > self.block_size:
            raise DFlashError(
                f"{states.shape[1]} slots in a row, but a block of this drafter has {self.block_size} and its "
                "convolutions must not cross blocks. Run one block a row."
            )
        kernels = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1))
        return self._convolve(states, kernels[..., 0, :, :], self.base_kernel[0]), kernels[..., 1, :, :]

    def after(self, states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Convolve a sublayer's output `[b, B, H]` with the dynamic kernel `[b, B, taps, groups]` of `before`."""
        return self._convolve(states, kernel, self.base_kernel[1])

    def _convolve(self, states: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        grouped = states.unflatten(-1, (-1, self.group_size))
        output = torch.zeros_like(grouped)
        for offset in range(self.taps):
            shifted = functional.pad(grouped[:, : grouped.shape[1] - offset], (0, 0, 0, 0, offset, 0))
            kernel = base[offset].unflatten(-1, (-1, self.group_size)) + dynamic[:, :, offset, :, None]
            output = output + kernel * shifted
        return output.flatten(-2)
