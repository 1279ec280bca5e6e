"""Numbers of the host on a device."""

from __future__ import annotations

import torch


def on_device(values: list, device: torch.device) -> torch.LongTensor:
    """Integers as an int64 tensor; on CUDA without waiting for what the device has to do before."""
    numbers = torch.tensor(values, dtype=torch.long)
    # The driver copies a small pageable source before the call returns, so it may be freed at once.
    return numbers if device.type == "cpu" else numbers.to(device, non_blocking=device.type == "cuda")
