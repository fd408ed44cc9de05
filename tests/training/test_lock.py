"""One run a folder, and no stale lock after a kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lowmem_ft.errors import CheckpointError
from lowmem_ft.training.lock import LOCK, RunLock

HOLD = """
import pathlib, sys
from lowmem_ft.training.lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
input()
"""


def test_who_holds_it_is_named(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on {socket.gethostname()} since 20"):
        RunLock(tmp_path)
    lock.release()
    lock.release()
    assert not (tmp_path / LOCK).exists()
    RunLock(tmp_path).release()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match=f"process {holder.pid} "):
        RunLock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert (tmp_path / LOCK).exists()
    RunLock(tmp_path).release()


def test_a_file_that_was_deleted_or_is_garbage_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("garbage")
    lock = RunLock(tmp_path)
    (tmp_path / LOCK).unlink()
    second = RunLock(tmp_path)
    lock.release()
    assert (tmp_path / LOCK).exists()  # it is the second one's
    second.release()


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        RunLock(tmp_path / "none")
