"""Being told to stop: noted in a step, acted on at once where nothing would be lost, and the old handlers come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lowmem_ft.errors import Stopped
from lowmem_ft.training.signals import StopRequests

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_step_waits_for_its_end(number: signal.Signals, code: int) -> None:
    with StopRequests() as stop:
        assert stop.asked() is None
        os.kill(os.getpid(), number)
        asked = stop.asked()
    assert asked is not None
    assert (asked.exit_code, asked.why) == (code, number.name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_nothing_would_be_lost_it_acts_at_once(number: signal.Signals) -> None:
    reached: list[int] = []

    def interrupted(stop: StopRequests) -> None:
        with stop.at_once():
            os.kill(os.getpid(), number)
            time.sleep(5)
            reached.append(1)

    with StopRequests() as stop, pytest.raises(Stopped, match=number.name):
        interrupted(stop)
    assert reached == []


def test_what_was_asked_before_acts_when_it_begins() -> None:
    with StopRequests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped), stop.at_once():
            pytest.fail("was begun")


def test_sigusr1_asks_for_a_save_and_not_for_a_stop() -> None:
    with StopRequests() as stop:
        with stop.at_once():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.save_wanted
        assert stop.asked() is None


def test_the_handlers_from_before_come_back() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]

    def fail() -> None:
        with StopRequests(max_seconds=100) as stop, stop.at_once():
            assert [signal.getsignal(number) for number in NUMBERS] != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [signal.getsignal(number) for number in NUMBERS] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_at_once(number: signal.Signals) -> None:
    program = f"""
import os, time
from lowmem_ft.training.signals import StopRequests
with StopRequests():
    os.kill(os.getpid(), {int(number)})
    print("first", flush=True)
    os.kill(os.getpid(), {int(number)})
    time.sleep(20)
    print("second")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-number, "first\n")


def test_a_forked_worker_ends_as_if_nobody_listened() -> None:
    with StopRequests() as stop:
        pid = os.fork()
        if pid == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert stop.asked() is None


def test_the_time_limit_leaves_room_for_saving_and_for_the_next_step() -> None:
    clock = Clock()
    stop = StopRequests(max_seconds=100, clock=clock)
    stop.save_seconds = 5.0
    clock.now += 70
    assert stop.asked(next_seconds=14) is None
    asked = stop.asked(next_seconds=15)
    assert asked is not None
    assert (asked.exit_code, asked.why) == (9, "train.max_seconds")


def test_the_time_limit_breaks_off_what_runs_at_once() -> None:
    begun = time.monotonic()
    with StopRequests(max_seconds=0.2) as stop:
        stop.save_seconds = 0.0
        with pytest.raises(Stopped, match="max_seconds"), stop.at_once():
            time.sleep(10)
        assert time.monotonic() - begun < 5
        os.kill(os.getpid(), signal.SIGTERM)  # the first signal: it does not leave at once
        asked = stop.asked()
    assert asked is not None
    assert asked.exit_code == 143


def test_no_limit_and_no_signal_ask_for_nothing() -> None:
    assert StopRequests().asked(next_seconds=1e9) is None
