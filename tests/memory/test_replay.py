"""A call is made again with the random numbers, buffers and autocast of the first time; kept only where needed."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from lowmem_ft.errors import ModelError
from lowmem_ft.memory.replay import MovingBuffers, Replay, bind

X = torch.randn(6, 4)


def test_a_call_without_random_numbers_keeps_no_random_state() -> None:
    replay = Replay(nn.Dropout(0.5).eval(), MovingBuffers(nn.Identity()))
    replay(X)
    assert not replay.kept_random_state


@pytest.mark.parametrize("draw", [nn.Dropout(0.5).train(), lambda x: x + torch.rand(4), lambda x: x * torch.randn(())])
def test_random_numbers_are_drawn_again_and_the_generator_goes_on_undisturbed(draw: nn.Module) -> None:
    torch.manual_seed(3)
    replay = Replay(draw, MovingBuffers(nn.Identity()))
    first = replay(X)
    assert replay.kept_random_state
    wanted = torch.rand(5)
    torch.manual_seed(3)
    assert torch.equal(Replay(draw, MovingBuffers(nn.Identity()))(X), first)
    for _ in range(3):
        assert torch.equal(replay(X), first)
    assert torch.equal(torch.rand(5), wanted)


def test_running_statistics_are_updated_once_and_read_as_they_were() -> None:
    class Scaled(nn.Module):
        """Answers by the statistics that it then changes, as power iterations do."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            out = self.norm(x) + self.mean
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)  # replaced, not changed in place
            return out

    module, plain = Scaled().train(), Scaled().train()
    buffers = MovingBuffers(module)
    for turn in range(3):
        replay = Replay(module, buffers)
        wanted = plain(X + turn)
        for _ in range(3):
            assert torch.equal(replay(X + turn), wanted)
    assert buffers.moving == {"mean", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    pairs = list(zip(module.buffers(), plain.buffers(), strict=True))
    assert len(pairs) == 4
    assert all(torch.equal(a, b) for a, b in pairs)


def test_after_the_first_call_only_buffers_that_move_are_copied() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Module())
    module[1].register_buffer("packed", torch.zeros(100, dtype=torch.uint8))
    module[1].register_buffer("scale", torch.zeros(100))
    buffers = MovingBuffers(module)
    assert {b.name for b in buffers.look() if b.copy is not None} == {
        "1.scale",
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }
    Replay(module[0].train(), buffers)(X)
    assert {b.name for b in buffers.look() if b.copy is not None} == {
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }


def test_a_buffer_that_moves_in_some_calls_only_is_refused() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                self.seen += 1
            return x

    module = Sometimes()
    buffers = MovingBuffers(module)
    Replay(module, buffers)(-torch.ones(2))
    with pytest.raises(ModelError, match=r"Sometimes: its buffer seen changes in some calls only.*Write recompute="):
        Replay(module, buffers)(torch.ones(2))


def test_a_batch_norm_that_is_thawed_later_is_no_such_case() -> None:
    module, plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    buffers = MovingBuffers(module)
    for training in (False, True, False, True):
        wanted = plain.train(training)(X)
        replay = Replay(module.train(training), buffers)
        assert torch.equal(replay(X), wanted)
        assert torch.equal(replay(X), wanted)
    assert torch.equal(module.running_var, plain.running_var)


def test_autocast_is_that_of_the_first_run() -> None:
    linear = nn.Linear(4, 4)
    replay = Replay(linear, MovingBuffers(linear))
    with torch.autocast("cpu", torch.bfloat16):
        first = replay(X)
    assert replay(X).dtype == first.dtype == torch.bfloat16
    plain = Replay(linear, MovingBuffers(linear))
    plain(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert plain(X).dtype == torch.float32


def test_bound_calls_hold_none_of_the_tensors_they_give_out() -> None:
    hidden, other, mask = torch.zeros(2), torch.ones(2, requires_grad=True), torch.ones(2)

    def forward(*args: object, **kwargs: object) -> object:
        return args, kwargs

    tensors, call = bind(forward, (None, hidden, 3), {"mask": mask, "memory": other, "name": "x"})
    assert [id(tensor) for tensor in tensors] == [id(hidden), id(other)]
    alive = weakref.ref(hidden)
    args, kwargs = call(torch.tensor([5.0, 6.0]), other)
    assert args[0] is None and args[1].tolist() == [5.0, 6.0] and args[2] == 3  # noqa: PT018
    assert kwargs == {"mask": mask, "memory": other, "name": "x"}
    del hidden, tensors
    assert alive() is None
