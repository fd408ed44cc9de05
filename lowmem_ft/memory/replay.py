"""A call that can be made again as it was made: with the same random numbers, the same buffers, the same autocast.

What recompute (gradient checkpointing) is made of. Random state is kept only where a call has drawn a number, copies of
buffers only where it has changed them; so a block without dropout and running statistics keeps neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from lowmem_ft.errors import ModelError, Problem

Context = Callable[[], AbstractContextManager[Any]]


def bind(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], Callable[..., Any]]:
    """Take the tensors that may carry a gradient out of a call.

    Args:
        forward: called with `args` and `kwargs`.
        args: by position.
        kwargs: by name.

    Returns:
        The tensors: the first floating one (hidden states) and every other that asks for gradients; and a function of
        them that makes the call. It holds all the rest, masks and positions, and none of them.
    """
    values = [*args, *kwargs.values()]
    names = tuple(kwargs)
    floating = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.is_floating_point()]
    slots = [i for i in floating if i == floating[0] or values[i].requires_grad]
    tensors = [values[i] for i in slots]
    for i in slots:
        values[i] = None

    def call(*tensors: Tensor) -> Any:
        filled = list(values)
        for i, tensor in zip(slots, tensors, strict=True):
            filled[i] = tensor
        by_name = len(filled) - len(names)
        return forward(*filled[:by_name], **dict(zip(names, filled[by_name:], strict=True)))

    return tensors, call


@dataclass(frozen=True)
class _Buffer:
    """One buffer before a call."""

    name: str
    holder: nn.Module
    key: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    def has_changed(self) -> bool:
        if self.holder._buffers.get(self.key) is not self.tensor or _version(self.tensor) != self.version:
            return True
        # torch's batch norm changes its statistics without raising their version (torch 2.13)
        known = not self.tensor.is_meta and not isinstance(self.tensor, FakeTensor)
        return self.copy is not None and known and not torch.equal(self.tensor, self.copy)


class MovingBuffers:
    """Finds which buffers of a module its forward changes, such as running statistics.

    The first call is made with a copy of each; from the second on only those that moved are copied.

    Args:
        module: whose buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.moving: set[str] | None = None

    def look(self) -> list[_Buffer]:
        """The buffers as they are now, with a copy of those that may move."""
        found = []
        for prefix, holder in self.module.named_modules():
            for key, tensor in holder._buffers.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                # before the first call: statistics and counters, but not packed weights
                may_move = tensor.is_floating_point() or tensor.numel() == 1
                copied = may_move if self.moving is None else name in self.moving or isinstance(holder, _NormBase)
                copy = tensor.detach().clone() if copied else None
                found.append(_Buffer(name, holder, key, tensor, _version(tensor), copy))
        return found

    def changed(self, before: list[_Buffer]) -> list[_Buffer]:
        """Of the buffers `before` the call, those it has changed.

        Raises:
            ModelError: one has changed of which there is no copy.
        """
        known = self.moving or set()
        changed = [buffer for buffer in before if buffer.name in known or buffer.has_changed()]
        lost = [buffer.name for buffer in changed if buffer.copy is None]
        if lost:
            what = f"its buffer {lost[0]} changes in some calls only, so a call cannot be made again as it was"
            raise ModelError(
                Problem(type(self.module).__name__, what, 'Write recompute="none", or leave this block out')
            )
        self.moving = known | {buffer.name for buffer in changed}
        return changed


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def _as_before(changed: list[_Buffer]) -> Iterator[None]:
    """The module computes on copies of what its buffers were; what they are now is not touched."""
    now = [buffer.holder._buffers[buffer.key] for buffer in changed]
    for buffer in changed:
        assert buffer.copy is not None  # `MovingBuffers.changed` has refused the others
        buffer.holder._buffers[buffer.key] = buffer.copy.clone()
    try:
        yield
    finally:
        for buffer, tensor in zip(changed, now, strict=True):
            buffer.holder._buffers[buffer.key] = tensor


class _RandomState:
    """State of the generators: the CPU's, and those of the devices that the tensors of a call are on."""

    def __init__(self, devices: set[torch.device]) -> None:
        self.traced = detect_fake_mode() is not None  # nothing is drawn where there are no numbers
        if self.traced:
            return
        self.cpu = torch.get_rng_state()
        self.devices = {device: torch.get_device_module(device).get_rng_state(device) for device in devices}

    def is_now(self) -> bool:
        """Whether no number has been drawn since."""
        if self.traced:
            return True
        # compared as NumPy arrays: not an operation of torch, which a mode of another mechanism would see
        same = bool((self.cpu.numpy() == torch.get_rng_state().numpy()).all())
        return same and all(
            bool((state.numpy() == torch.get_device_module(device).get_rng_state(device).numpy()).all())
            for device, state in self.devices.items()
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, the numbers of then are drawn; afterwards the generators go on from where they were."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.set_rng_state(self.cpu)
            for device, state in self.devices.items():
                module = torch.get_device_module(device)
                stack.callback(module.set_rng_state, module.get_rng_state(device), device)
                module.set_rng_state(state, device)
            yield


def _autocasts(devices: set[torch.device]) -> list[dict[str, Any]]:
    """Autocast as it is now, as arguments of `torch.autocast`, without its cache of cast weights."""
    kinds = ["cpu", *{device.type for device in devices if torch.amp.is_autocast_available(device.type)}]
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": False,
        }
        for kind in kinds
    ]


class Replay:
    """A function that is run once, and any number of times again with the same result, bit for bit.

    Args:
        function: takes tensors.
        buffers: of the module that it belongs to.
        first: context of the first run.
        again: context of every further run.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        buffers: MovingBuffers,
        first: Context = nullcontext,
        again: Context = nullcontext,
    ) -> None:
        self._function = function
        self._buffers = buffers
        self._contexts = first, again
        self._ran = False

    def __call__(self, *tensors: Tensor) -> Any:
        """Run it."""
        return self._run_again(tensors) if self._ran else self._run_first(tensors)

    def _run_first(self, tensors: tuple[Tensor, ...]) -> Any:
        devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
        self._autocasts = _autocasts(devices)
        random = _RandomState(devices)
        before = self._buffers.look()
        with self._contexts[0]():
            output = self._function(*tensors)
        self._changed = self._buffers.changed(before)
        self._random = None if random.is_now() else random
        self._ran = True
        return output

    def _run_again(self, tensors: tuple[Tensor, ...]) -> Any:
        with ExitStack() as stack:
            for autocast in self._autocasts:
                stack.enter_context(torch.autocast(**autocast))
            if self._random is not None:
                stack.enter_context(self._random.again())
            if self._changed:
                stack.enter_context(_as_before(self._changed))
            stack.enter_context(self._contexts[1]())
            return self._function(*tensors)

    @property
    def kept_random_state(self) -> bool:
        """Whether the first run has drawn a random number."""
        return self._ran and self._random is not None
