from __future__ import annotations

import gc

import bitsandbytes as bnb
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_ft.memory.tracking import TensorTracker, tensors_of

KIB = 1024


def test_live_bytes_follow_what_is_made_and_freed() -> None:
    with TensorTracker() as tracker:
        first = torch.zeros(KIB)
        second = first + 1
        assert tracker.live_bytes == 2 * 4 * KIB
        del first
        assert tracker.live_bytes == 4 * KIB
        third = second[:10]
        del second
        assert tracker.live_bytes == 4 * KIB, "a view keeps the whole storage"
        del third
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 2 * 4 * KIB


def test_what_is_changed_in_place_counts_once() -> None:
    with TensorTracker() as tracker:
        tensor = torch.zeros(KIB)
        tensor.add_(1).mul_(2)
        tensor[3:7] = 5
        assert tracker.peak_bytes == 4 * KIB + 4, "the number 5 becomes a tensor of one element"


def test_what_was_there_before_is_held_once() -> None:
    tensor = torch.zeros(KIB)
    views = [tensor, tensor[5:], tensor.view(2, -1)]
    with TensorTracker() as tracker:
        assert tracker.hold(views) == 4 * KIB
        assert tracker.hold(views) == 0
        del tensor, views
        gc.collect()
    assert tracker.live_bytes == 0


def test_a_phase_has_its_own_peak() -> None:
    with TensorTracker() as tracker:
        kept = torch.zeros(KIB)
        with tracker.phase("large"):
            torch.zeros(10 * KIB)
        with tracker.phase("small"):
            torch.zeros(KIB)
        del kept
    assert tracker.peaks == {"large": 11 * 4 * KIB, "small": 2 * 4 * KIB}


def test_operations_are_those_of_products_and_attention() -> None:
    left, right = torch.randn(8, 16), torch.randn(16, 4, requires_grad=True)
    query = torch.randn(1, 2, 32, 8)
    with TensorTracker() as tracker:
        (left @ right).sum().backward()
        assert tracker.operations == 2 * (2 * 8 * 16 * 4)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert tracker.operations == 2 * (2 * 8 * 16 * 4) + 2 * (2 * 2 * 32 * 32 * 8)


def test_quantized_weights_are_counted_when_they_are_read() -> None:
    layer = bnb.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16).to("cpu")
    rows = torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)
    with TensorTracker() as tracker:
        layer(rows).sum().backward()
    assert tracker.read_weights == 2 * 64 * 128


def test_all_that_hangs_on_a_packed_weight_is_found() -> None:
    layer = bnb.nn.Linear4bit(256, 256, bias=False, compress_statistics=True, quant_type="nf4").to("cpu")
    found = {id(tensor) for tensor in tensors_of(layer)}
    state = layer.weight.quant_state
    assert {id(t) for t in (layer.weight, state.absmax, state.code, state.offset, state.state2.absmax)} <= found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_without_numbers_has_the_peak_of_the_computation(dtype: torch.dtype) -> None:
    def step() -> TensorTracker:
        first = torch.nn.Linear(64, 256, dtype=dtype)
        second = torch.nn.Linear(256, 8, dtype=dtype)
        rows = torch.zeros(100, 64, dtype=dtype)
        with TensorTracker() as tracker:
            tracker.hold([*first.parameters(), *second.parameters(), rows])
            second(torch.nn.functional.silu(first(rows))).logsumexp(-1).sum().backward()
        return tracker

    real = step()
    with FakeTensorMode():
        traced = step()
    assert (traced.peak_bytes, traced.operations) == (real.peak_bytes, real.operations)
    assert real.operations > 0
