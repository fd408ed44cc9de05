"""What memory is used: of the process, and on CUDA of the device. Peaks by phase."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True)
class PhasePeak:
    """Highest use within one phase of a run.

    Attributes:
        phase: its name.
        rss_bytes: peak resident set of the process.
        device_bytes: peak of tensors on the CUDA device, 0 without one.
    """

    phase: str
    rss_bytes: int
    device_bytes: int


@dataclass
class MemoryMeter:
    """Peaks by phase, and what is used now.

    On Linux the kernel's high-water mark is reset at each phase's start, so a phase's peak is its own. Where that is
    not allowed (or elsewhere), a phase's peak is the highest so far.

    Args:
        device: `cpu`, or the CUDA device that is watched too.
    """

    device: torch.device
    phases: list[PhasePeak] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything within belongs to phase `name`."""
        _reset_rss_peak()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:
            self.phases.append(PhasePeak(name, rss_peak_bytes(), self._device_peak()))

    def now_bytes(self) -> int:
        """Bytes in use now, where the budget counts: on the CUDA device, else of the process."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return int(psutil.Process().memory_info().rss)

    def peak_bytes(self) -> int:
        """Highest bytes so far over all phases, and the one that is running."""
        if self.device.type == "cuda":
            return max([self._device_peak(), *(p.device_bytes for p in self.phases)])
        return max([rss_peak_bytes(), *(p.rss_bytes for p in self.phases)])

    def _device_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0


def rss_peak_bytes() -> int:
    """Peak resident set of this process since its start, or since the last phase began where that can be told."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_rss_peak() -> None:
    """Linux: the high-water mark falls to what is resident now (proc(5), clear_refs). Elsewhere nothing happens."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
