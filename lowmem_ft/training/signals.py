"""Being told to stop: signals and the time limit, acted on at a step boundary, where the state is whole.

| Told by | What happens | Exit code |
|---|---|---|
| SIGTERM | saved after the running step; an evaluation is broken off and owed to the resumed run | 143 |
| SIGINT (Ctrl-C) | the same | 130 |
| `train.max_seconds` | the same, early enough that the process ends in time | 9 |
| SIGUSR1 | saved after the running step, and the run goes on | |
| a second SIGTERM or SIGINT | the process ends at once; checkpoints that were written are whole | by the signal |
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lowmem_ft.errors import Stopped

TIME_LIMIT_EXIT = 9
_STOPPING = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """Takes the signals of a run while the context is open, and gives the old handlers back.

    Args:
        max_seconds: since the object was made; None for no limit.
        clock: seconds that no clock jump moves.

    Attributes:
        save_wanted: SIGUSR1 came; whoever saves sets it to False.
        save_seconds: how long saving took at most; the time limit leaves three times that.
    """

    def __init__(self, max_seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._max_seconds = clock, max_seconds
        self._start, self._pid = clock(), os.getpid()
        self._asked: Stopped | None = None
        self._at_once = False
        self._old: dict[int, Any] = {}
        self.save_wanted = False
        self.save_seconds = 0.5

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python gives no signals
            for number in (*_STOPPING, signal.SIGUSR1, signal.SIGALRM):
                self._old[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._old:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def asked(self, next_seconds: float = 0.0) -> Stopped | None:
        """Why to leave now, or None.

        Args:
            next_seconds: how long until this can be asked again: with a time limit, what does not fit is not begun.
        """
        left = self._seconds_left()
        if self._asked is None and left is not None and left <= next_seconds:
            self._asked = Stopped("train.max_seconds", TIME_LIMIT_EXIT)
        return self._asked

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What runs within holds nothing that must be saved: a request breaks it off, wherever it is.

        Raises:
            Stopped: in the middle of it.
        """
        if self.asked():
            assert self._asked is not None
            raise self._asked
        left = self._seconds_left()
        self._at_once = True
        try:
            if left is not None and self._old:
                signal.setitimer(signal.ITIMER_REAL, left)
            yield
        finally:
            self._at_once = False
            if left is not None and self._old:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _seconds_left(self) -> float | None:
        if self._max_seconds is None:
            return None
        return self._max_seconds - (self._clock() - self._start) - 3 * self.save_seconds

    def _take(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that was forked: it has nothing to save
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGUSR1:
            self.save_wanted = True
            return
        if number == signal.SIGALRM:
            self._asked = self._asked or Stopped("train.max_seconds", TIME_LIMIT_EXIT)
        elif self._asked is not None and self._asked.exit_code != TIME_LIMIT_EXIT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            self._asked = Stopped(signal.Signals(number).name, 128 + number)
        if self._at_once:
            self._at_once = False
            raise self._asked
