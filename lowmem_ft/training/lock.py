"""One run a folder: a lock that the system gives back whatever ends the process, with who holds it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from lowmem_ft.errors import CheckpointError, Problem

LOCK = "run.lock"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class RunLock:
    """The lock of a run folder, held until `release`. `flock(2)`: the kernel frees it when the process is gone, so a
    killed run leaves no stale lock. File systems without such locks give none, and the file says only who is there.

    Args:
        folder: exists.

    Raises:
        CheckpointError: another process holds it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._handle: int | None = None
        while self._handle is None:
            self._handle = self._take()
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat()}
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, (json.dumps(who) + "\n").encode(), 0)

    def release(self) -> None:
        """Let go. Twice is once."""
        if self._handle is not None:
            if self._is_ours(self._handle):
                self.path.unlink()  # while it is held: whoever opened it sees below that it is gone
            os.close(self._handle)
            self._handle = None

    def _take(self) -> int | None:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                what = f"is in use by {_holder(handle)}"
                os.close(handle)
                instead = "Wait for that run, stop it, or write output: with another folder"
                raise CheckpointError(Problem(str(self.path.parent), what, instead)) from None
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
        if self._is_ours(handle):
            return handle
        os.close(handle)  # its holder took the file away between our opening and our locking it
        return None

    def _is_ours(self, handle: int) -> bool:
        try:
            there, ours = os.stat(self.path), os.fstat(handle)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _holder(handle: int) -> str:
    try:
        who = json.loads(os.pread(handle, 4096, 0))
        return f"process {who['pid']} on {who['host']} since {who['since'][:19]} UTC"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
