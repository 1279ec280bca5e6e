"""Memory of this process, for the benchmark scripts; needs nothing but Python (and Linux for exact peaks)."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> float:
    """Start a new peak from what is resident now, and return that, in MB (elsewhere than on Linux: the peak so far)."""
    if _RESET.exists():
        _RESET.write_text("5")
        return _status("VmRSS")
    return peak_mb()


def peak_mb() -> float:
    """Most memory resident since `reset_peak`, in MB.

    (`ru_maxrss` starts at what the parent process had when it was forked, so it serves only where /proc does not exist;
    its unit is that of Linux.)
    """
    if _STATUS.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _status(key: str) -> float:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return int(lines[key].split()[0]) / 1024
