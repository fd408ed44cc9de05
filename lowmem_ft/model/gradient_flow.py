"""Proves before the first step that everything that is meant to train does: one backward, and what did not arrive.

from lowmem_ft import check_gradient_flow
print(check_gradient_flow(model, batch).line())
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_ft.errors import ModelError, Problem

MOST_NAMES = 6
STEP = 1e-3
"""How far a weight is moved for the second backward; large enough to change a 16-bit weight around 0.1."""

Run = Callable[[], Tensor] | Mapping[str, Any]


@dataclass(frozen=True)
class GradientFlow:
    """What gradients reached.

    Attributes:
        reached: trained tensors whose gradient is finite.
        zero: names of those whose gradient was zero twice, as this batch gives them nothing to learn.
        not_routed: names of those in experts that this batch was not routed to; nothing is known of them.
    """

    reached: int
    zero: tuple[str, ...] = ()
    not_routed: tuple[str, ...] = ()

    def line(self) -> str:
        """The result, for people."""
        everything = "all " if not self.not_routed else ""
        text = f"gradients reach {everything}{self.reached:,} trained tensors"
        if self.zero:
            text += f"; zero for this batch: {_some(self.zero)}"
        if self.not_routed:
            text += f"; {len(self.not_routed):,} more are in experts that this batch was not routed to"
        return text


@dataclass
class _Seen:
    """A forward and backward. `calls`: of each module with trained weights, whether gradients were on in each call."""

    loss: float
    loss_has_graph: bool
    gradients: dict[str, Tensor | None]
    calls: dict[str, list[bool]] = field(default_factory=dict)

    def zeros(self) -> list[str]:
        """Names of parameters whose gradient is there and zero."""
        return [name for name, grad in self.gradients.items() if grad is not None and not bool(grad.any())]


def check_gradient_flow(model: nn.Module, run: Run) -> GradientFlow:
    """Run forward and backward once or twice; every trained parameter must get a finite gradient.

    In the first pass the gradient of LoRA's first factor is zero, as the second factor starts at zero. So where a
    gradient is zero, the other trained weights take one tiny step and a second pass looks again.

    Exactness: afterwards the model is what it was, bit for bit: values, `requires_grad`, `.grad`, training mode,
    and the state of torch's random numbers. Buffers that a forward pass changes (batch statistics) are not restored.
    Memory: one forward and backward of the batch, the gradients of the trained weights, and a copy of these weights.

    Args:
        model: with its adapters; prepared for training, not wrapped for data-parallel training.
        run: a function that computes the loss from a forward pass of `model`, a scalar, inside its own autocast where
            it needs one; or a batch for `model(**batch)`, whose result has a `loss`. One short row is enough.

    Returns:
        What was reached, with a line for people.

    Raises:
        ModelError: nothing trains, a gradient is missing or not finite; names the modules and the likely cause.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        what = "has no parameter that trains"
        raise ModelError(Problem(type(model).__name__, what, "Add adapters after prepare_for_kbit_training"))
    with _restored(model, trained):
        first = _run_once(model, trained, run)
        _check(model, trained, first)
        zero = first.zeros()
        if zero and len(zero) < len(trained):
            with _moved(trained, first):
                second = _run_once(model, trained, run)
                _check(model, trained, second)
            still = set(second.zeros())
            zero = [name for name in zero if name in still]
    missing = tuple(_plain(name) for name, gradient in first.gradients.items() if gradient is None)
    if len(zero) + len(missing) == len(trained):
        what = f"the loss is {first.loss:.4g}, and all gradients are zero"
        raise ModelError(Problem(type(model).__name__, what, "Give a batch with labels that are trained (not -100)"))
    return GradientFlow(len(trained) - len(missing), tuple(_plain(name) for name in zero), missing)


@contextlib.contextmanager
def _restored(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """The model trains within; gradients, training mode and random numbers are put back."""
    modes = {module: module.training for module in model.modules()}
    gradients = {name: parameter.grad for name, parameter in trained.items()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            model.train()
            yield
    finally:
        for name, parameter in trained.items():
            parameter.grad = gradients[name]
        for module, mode in modes.items():
            module.training = mode
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _moved(trained: Mapping[str, nn.Parameter], seen: _Seen) -> Iterator[None]:
    """Weights with a gradient take a tiny step against its sign; they are put back bit for bit."""
    moving = {name: gradient for name, gradient in seen.gradients.items() if gradient is not None and gradient.any()}
    before = {name: trained[name].detach().clone() for name in moving}
    try:
        with torch.no_grad():
            for name, gradient in moving.items():
                trained[name].sub_(gradient.sign(), alpha=STEP)
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                trained[name].copy_(value)


def _run_once(model: nn.Module, trained: Mapping[str, nn.Parameter], run: Run) -> _Seen:
    for parameter in trained.values():
        parameter.grad = None
    torch.clear_autocast_cache()  # it holds 16-bit copies of the weights before they moved
    calls: dict[str, list[bool]] = {}
    hooks = []
    for name in {_owner(model, parameter_name) for parameter_name in trained}:
        calls[name] = []

        def note(module: nn.Module, args: Any, seen: list[bool] = calls[name]) -> None:
            seen.append(torch.is_grad_enabled())

        hooks.append(model.get_submodule(name).register_forward_pre_hook(note))
    try:
        loss = run() if callable(run) else model(**run).loss
        if loss is None:
            raise ModelError(Problem(type(model).__name__, "gave no loss for this batch", "Add labels to the batch"))
        if loss.requires_grad:
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    gradients = {name: parameter.grad for name, parameter in trained.items()}
    return _Seen(float(loss.detach()), loss.requires_grad, gradients, calls)


def _owner(model: nn.Module, parameter_name: str) -> str:
    """The module that is called for a parameter: the adapted layer where it belongs to an adapter, else its own."""
    path = parameter_name.split(".")[:-1]
    for end in range(len(path), 0, -1):
        if hasattr(model.get_submodule(".".join(path[:end])), "adapter_layer_names"):
            return ".".join(path[:end])
    return ".".join(path)


def _check(model: nn.Module, trained: Mapping[str, nn.Parameter], seen: _Seen) -> None:
    """Raises with one problem for each cause."""
    causes: dict[tuple[str, str], list[str]] = {}
    for name, gradient in seen.gradients.items():
        if gradient is None:
            cause = _why_missing(model, _owner(model, name), seen)
        elif not bool(torch.isfinite(gradient).all()):
            cause = _why_not_finite(model, trained[name], seen)
        else:
            continue
        if cause is not None:
            names = causes.setdefault(cause, [])
            owner = _plain(_owner(model, name))
            if owner not in names:
                names.append(owner)
    if causes:
        raise ModelError([Problem(_some(names), what, instead) for (what, instead), names in causes.items()])


def _why_missing(model: nn.Module, owner: str, seen: _Seen) -> tuple[str, str] | None:
    """What is the matter and the way out; None where this batch was only not routed there."""
    module = model.get_submodule(owner)
    calls = seen.calls[owner]
    if not calls:
        if module is _head(model):
            what = "no gradient: the loss reads the head's weight and never calls the head, as fused losses do"
            return what, "Take lm_head out of the targets, or use a loss that calls it (lowmem_ft.chunked_loss)"
        if _has_called_sibling(owner, seen):
            return None
        what = "no gradient: the model never calls it for this batch, or reads its weight past the adapter"
        return what, "Take it out of the targets"
    if getattr(module, "disable_adapters", False):
        return "no gradient: its adapters are switched off", "Call enable_adapter_layers, or leave disable_adapter()"
    if not any(calls):
        if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
            what = "no gradient: reentrant checkpointing got an input that asks for none, so it computed without them"
            instead = 'Call prepare_for_kbit_training(model), or pass {"use_reentrant": False}'
            return what, f"{instead}, or call model.enable_input_require_grads()"
        return "no gradient: it runs inside torch.no_grad()", "Remove no_grad from the forward pass"
    what = "no gradient, though it is called: what it computes does not reach the loss"
    return what, "Look for detach() behind it, another active adapter, or take it out of the targets"


def _why_not_finite(model: nn.Module, parameter: nn.Parameter, seen: _Seen) -> tuple[str, str]:
    if not bool(torch.isfinite(parameter).all()):
        return "it holds values that are not finite", "Load or initialize it anew"
    for name, other in model.named_parameters():
        if other.is_floating_point() and not bool(torch.isfinite(other).all()):
            what = f"gradient is not finite: {_plain(name)} holds values that are not"
            return what, "The weights of the base are damaged, or overflowed in a cast to fp16: use bfloat16"
    what = f"gradient is not finite, with a loss of {seen.loss:.4g}"
    return what, "Numbers overflow: use bf16 instead of fp16, or cast the norms to fp32"


def _has_called_sibling(owner: str, seen: _Seen) -> bool:
    """Whether the same layer of another expert was called: which experts run is for the router to say."""
    found = re.fullmatch(r"(.*\bexperts\.)\d+(\..*|)", owner)
    if not found:
        return False
    pattern = re.compile(re.escape(found[1]) + r"\d+" + re.escape(found[2]))
    return any(calls for name, calls in seen.calls.items() if pattern.fullmatch(name))


def _head(model: nn.Module) -> nn.Module | None:
    get_base: Any = getattr(model, "get_base_model", None)
    base: Any = get_base() if callable(get_base) else model
    try:
        return base.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _plain(name: str) -> str:
    """Without what peft puts around names."""
    return name.removeprefix("base_model.model.").replace(".default", "")


def _some(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
