"""The type in which a processor multiplies: 16 bits where it has instructions for them, else fp32.

An x86 CPU without AVX512-BF16 or AMX multiplies bf16 matrices seven to nine times slower than fp32 ones (torch 2.13,
one core: 9 against 63 to 81 GFLOP/s). There the operands are widened for the product and the result is rounded back, so
what is kept stays in 16 bits. A processor with such instructions sums 16-bit products in fp32 as well: the result is
equal up to summation order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

SLICE_BYTES = 32 * 2**20
"""Most bytes of a widened slice of a large weight."""

HALVES = (torch.bfloat16, torch.float16)

MOST_ROWS = 512
"""Most rows of one 16-bit product on CPU whose result has `IN_PARTS` columns; see `multiply`."""

IN_PARTS = range(256, 1024)
FEWEST_TERMS = 384


_traced_kind: ContextVar[str | None] = ContextVar("lowmem_traced_kind", default=None)


@contextmanager
def traced_as(kind: str) -> Iterator[None]:
    """Within, a step that is traced without numbers takes the ways that it would take on a device of this kind."""
    token = _traced_kind.set(kind)
    try:
        yield
    finally:
        _traced_kind.reset(token)


def device_kind(device: torch.device) -> str:
    """`cpu` or `cuda`: where a computation on `device` runs, or, in a trace, where it would run."""
    return _traced_kind.get() or device.type


@cache
def cpu_multiplies_in_16_bits() -> bool:
    """Whether this CPU has instructions for bf16 products. Other architectures than x86 are left to torch."""
    able = torch.cpu.get_capabilities()
    x86 = able.get("architecture") in ("x86_64", "AMD64", "i386")
    return not x86 or bool(able.get("avx512_bf16")) or bool(able.get("amx_bf16"))


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that two operands of `dtype` are multiplied in on `device`: fp32, or `dtype` itself.

    Found from what the processor says that it can do, never by timing: the same machine always answers the same, so a
    resumed run computes as the first one did.
    """
    if device_kind(device) != "cpu" or dtype not in HALVES:
        return dtype
    return dtype if cpu_multiplies_in_16_bits() else torch.float32


def widen(tensor: Tensor) -> Tensor:
    """`tensor` in the type in which its device multiplies; itself where that is its own."""
    return tensor.to(product_dtype(tensor.dtype, tensor.device))


def in_given_types(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function multiply in the types of its operands, as autocast would not. Its device is that of the first
    tensor it is given.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(value for value in args if isinstance(value, Tensor)).device.type
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The type of autocast where it is on for the tensor's device, else the tensor's own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    """`rows @ matrix` in their type; on CPU a 16-bit product of middle width in parts of `MOST_ROWS` rows.

    Exactness: equal up to summation order. Time: oneDNN gives some tall products to one core of two (torch 2.13, AMX, 2
    cores, 576 to 1,024 rows; TFLOP/s as one / in parts: 576 by 576 numbers 1.1 to 1.2 / 1.5 to 1.8, 1,536 by 576 1.2 /
    1.6 to 2.0). Others it shares out, and parts cost: 576 by 192 1.5 to 1.8 / 0.9 to 1.3, 576 by 1,536 2.2 / 1.7.

    Args:
        rows: shape (T, K).
        matrix: shape (K, N), of the same type.

    Returns:
        Shape (T, N).
    """
    (count, terms), width = rows.shape, matrix.shape[1]
    in_parts = count > MOST_ROWS and width in IN_PARTS and terms >= FEWEST_TERMS
    if not in_parts or rows.device.type != "cpu" or rows.dtype not in HALVES:
        return rows @ matrix
    out = rows.new_empty(count, width)
    for start in range(0, count, MOST_ROWS):
        part = slice(start, start + MOST_ROWS)
        torch.mm(rows[part], matrix, out=out[part])
    return out


@in_given_types
def times_transposed(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight.T` for a frozen weight, with operands in the type of `rows`.

    Memory: where it must widen, slices of the weight of at most `SLICE_BYTES`.

    Args:
        rows: shape (T, H).
        weight: shape (V, H), any float type.

    Returns:
        Shape (T, V), in the type in which the device multiplies: fp32 where operands are widened.
    """
    if _as_it_is(weight, rows.dtype):
        return rows.to(weight.dtype) @ weight.t()
    wide = widen(rows)
    out = wide.new_empty(rows.shape[0], weight.shape[0])
    for part in _slices(weight, wide.dtype):
        torch.mm(wide, weight[part].to(rows.dtype).to(wide.dtype).t(), out=out[:, part])
    return out


@in_given_types
def times(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows @ weight` for a frozen weight, with operands in `dtype`.

    Args:
        rows: shape (T, V).
        weight: shape (V, H), any float type.
        dtype: of both operands before they are widened.

    Returns:
        Shape (T, H), in the type in which the device multiplies.
    """
    if _as_it_is(weight, dtype):
        return rows.to(weight.dtype) @ weight
    wide = rows.to(product_dtype(dtype, rows.device))
    out = wide.new_zeros(rows.shape[0], weight.shape[1])
    for part in _slices(weight, wide.dtype):
        out.addmm_(wide[:, part], weight[part].to(dtype).to(wide.dtype))
    return out


def _slices(weight: Tensor, dtype: torch.dtype) -> list[slice]:
    """Ranges of rows whose copy in `dtype` takes at most `SLICE_BYTES`."""
    rows = max(1, SLICE_BYTES // (weight.shape[1] * dtype.itemsize))
    return [slice(start, min(start + rows, weight.shape[0])) for start in range(0, weight.shape[0], rows)]


_exact = WeakIdKeyDictionary()  # weight -> its version, the narrow type, whether it holds no more than that can


def _as_it_is(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product in `dtype` can read the weight itself: it has the type in which the device multiplies, and no
    more digits than `dtype`. An fp32 weight that was cast from bf16 is such a one; that is looked at once a weight.
    """
    wide = product_dtype(dtype, weight.device)
    if weight.dtype != wide or wide == dtype:
        return weight.dtype == wide
    known = _exact.get(weight)
    if known is None or known[:2] != (weight._version, dtype):
        exact = all(torch.equal(weight[part].to(dtype).to(wide), weight[part]) for part in _slices(weight, wide))
        known = _exact[weight] = (weight._version, dtype, exact)
    return bool(known[2])
