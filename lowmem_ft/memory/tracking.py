"""Counts the bytes of all tensors that are alive, and the operations between them, as a computation goes.

    with TensorTracker() as tracker:
        tracker.hold("weights", model.parameters())
        with tracker.phase("forward"):
            loss = model(batch)
    print(tracker.peak_bytes, tracker.peaks["forward"], tracker.operations)

It sees storages, not what holds them in memory: the same for tensors with numbers and for fake ones without. So the
peak of a step that is only traced (`memory.estimate`) equals that of the step itself.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class TensorTracker(TorchDispatchMode):
    """Within it, every storage that an operation gives counts from then until it is freed.

    Exactness: to the byte for tensors. What an operator takes while it runs and frees before it ends is not seen, nor
    is what an allocator adds.
    Time: a few microseconds an operation.

    Attributes:
        live_bytes: of all that is alive now.
        peak_bytes: the most that `live_bytes` has been.
        peaks: the same by phase.
        operations: of products and attention, a multiply-add counting two, as `torch.utils.flop_counter` counts.
        written_bytes: of all results.
        read_weights: weights of a quantized base that were read, each time that they were.
        calls: of operations, views apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peaks: dict[str, int] = {}
        self.operations = 0
        self.written_bytes = 0
        self.read_weights = 0
        self.calls = 0
        self._phase: str | None = None
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Peaks within belong to phase `name` too; phases do not nest."""
        before, self._phase = self._phase, name
        self._raise_peaks()
        try:
            yield
        finally:
            self._phase = before

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Count what was there before. Returns the bytes that were not counted already."""
        before = self.live_bytes
        for tensor in tensors:
            self.see(tensor)
        return self.live_bytes - before

    def see(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` as long as it lives, once."""
        for storage in _storages(tensor):
            key = id(storage)
            known = self._alive.get(key)
            if known is not None and known[0]() is storage:
                self._resize(key, storage)
                continue
            size = storage.nbytes()
            self._alive[key] = weakref.ref(storage, partial(self._free, key)), size
            self.live_bytes += size
        self._raise_peaks()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at what it gives."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        count = flop_registry.get(packet)
        if count is not None:
            self.operations += count(*args, **kwargs, out_val=out)
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.operations += _attention_operations(*args[:3])
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.operations += 5 * _attention_operations(*args[1:4]) // 2
        elif packet.__name__ == "dequantize_4bit":
            self.read_weights += out.numel()
        elif packet.__name__ == "gemm_4bit":  # bitsandbytes' own product, where the layer is not a lean one
            self.read_weights += math.prod(args[2])
            self.operations += 2 * out.numel() * args[2][-1]
        new = not _is_view(func)
        self.calls += new
        for tensor in _tensors(out):
            self.written_bytes += tensor.numel() * tensor.element_size() if new else 0
            self.see(tensor)
        return out

    def _resize(self, key: int, storage: Any) -> None:
        ref, size = self._alive[key]
        if storage.nbytes() != size:
            self.live_bytes += storage.nbytes() - size
            self._alive[key] = ref, storage.nbytes()

    def _free(self, key: int, ref: weakref.ref[Any]) -> None:
        known = self._alive.get(key)
        if known is not None and known[0] is ref:
            self.live_bytes -= known[1]
            del self._alive[key]

    def _raise_peaks(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._phase is not None:
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.live_bytes)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """All that a module holds: parameters, buffers, and what bitsandbytes keeps beside a packed weight."""
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        yield from own
        for holder in (getattr(part, "state", None), *own):
            yield from scales_of(holder)


def scales_of(holder: Any) -> Iterator[Tensor]:
    """What bitsandbytes keeps beside a packed weight: on the weight, in its quantization state, or in the layer's."""
    state = getattr(holder, "quant_state", None)
    if state is not None:  # a packed weight shows the tensors of its state as its own, too
        yield from scales_of(state)
        return
    for name in ("absmax", "code", "offset", "SCB", "CB"):
        value = getattr(holder, name, None)
        if isinstance(value, Tensor):
            yield value
    if getattr(holder, "state2", None) is not None:
        yield from scales_of(holder.state2)


def _storages(tensor: Tensor) -> list[Any]:
    """Of the tensor itself, or of what a wrapper such as torchao's is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor.untyped_storage()]
    parts = [getattr(tensor, name) for name in flatten()[0]]
    return [storage for part in parts if isinstance(part, Tensor) for storage in _storages(part)]


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, list | tuple):
        for one in out:
            yield from _tensors(one)


def _is_view(func: Any) -> bool:
    """Whether an operation's result is an argument seen otherwise, and nothing is written."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def _attention_operations(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Of torch's fused kernel on CPU, which its flop counter does not know: two products, as for the others.

    Args:
        query: shape (B, heads, S, D).
        key: shape (B, heads, T, D).
        value: shape (B, heads, T, E).
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])
