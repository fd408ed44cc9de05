"""Memory is measured by phase."""

from __future__ import annotations

import sys

import pytest
import torch

from lowmem_ft.memory.measure import MemoryMeter, rss_peak_bytes

MIB = 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can reset the high-water mark")
def test_a_phase_has_a_peak_of_its_own() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    with meter.phase("large"):
        torch.ones(64 * MIB, dtype=torch.uint8).add_(1)
    with meter.phase("small"):
        pass
    large, small = meter.phases
    assert [large.phase, small.phase] == ["large", "small"]
    # a block of 64 MiB is mapped by itself and goes back to the system when it is freed
    assert large.rss_bytes - small.rss_bytes > 48 * MIB
    assert meter.peak_bytes() >= large.rss_bytes
    assert large.device_bytes == 0


def test_a_phase_is_recorded_when_it_fails() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    with pytest.raises(RuntimeError), meter.phase("broken"):
        raise RuntimeError
    assert [phase.phase for phase in meter.phases] == ["broken"]


def test_what_is_used_now_is_at_most_the_peak() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    assert 0 < meter.now_bytes() <= rss_peak_bytes() + MIB
