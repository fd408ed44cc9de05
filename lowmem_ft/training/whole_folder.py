"""A folder that is there whole or not at all, and that proves it: written aside, synced, listed, renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from lowmem_ft.errors import CheckpointError, Problem
from lowmem_ft.units import format_bytes

MANIFEST = "manifest.json"
PART, OLD = ".part", ".old"
CHUNK_BYTES = 1 << 22


def write_whole(folder: Path, write: Callable[[Path], None], needed_bytes: int) -> int:
    """Make `folder` by `write`. Killed at any moment, it is as before or as after, never between.

    Written to `.NAME.part`; every file synced; the manifest last; then renamed. A folder of this name that was there
    before is kept as `.NAME.old` until the new one has its place; `mend` brings it back after a kill in that moment.

    Args:
        folder: its final name.
        write: fills the folder that it is given.
        needed_bytes: checked against the free space before anything is written.

    Returns:
        Bytes that it takes.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left, and nothing else was touched.
    """
    part, old = _aside(folder, PART), _aside(folder, OLD)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        mend(folder.parent)
        free = shutil.disk_usage(folder.parent).free
        if free < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part.mkdir()
        write(part)
        sizes = _seal(part)
        if folder.exists():
            os.rename(folder, old)
        os.rename(part, folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        return sizes
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(_why_not_written(folder, error, needed_bytes)) from error


def mend(parent: Path) -> None:
    """Clear away what a kill left in `parent`: parts go, and a replaced folder whose successor is not there comes back.

    Call it only where nobody else writes.
    """
    for entry in parent.iterdir() if parent.is_dir() else ():
        if entry.name.startswith(".") and entry.name.endswith(PART):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.startswith(".") and entry.name.endswith(OLD):
            target = parent / entry.name[1 : -len(OLD)]
            if target.exists():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                os.rename(entry, target)


def why_not_whole(folder: Path) -> str | None:
    """What is wrong with a folder, or None where every byte is as it was written. Reads all of it."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        listed = json.loads(text)
        if text != _manifest_text(listed["files"]):
            return f"{MANIFEST} was changed after it was written"
    except FileNotFoundError:
        return f"it has no {MANIFEST}: its writing did not come to an end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, (size, digest) in listed["files"].items():
        path = folder / name
        try:
            here = path.stat().st_size
            if here != size:
                return f"{name} has {here:,} bytes, and {size:,} were written"
            if _digest(path) != digest:
                return f"{name} is not what was written: its checksum differs"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def write_text_whole(path: Path, text: str) -> None:
    """A text file that is there as before or as after."""
    part = _aside(path, PART)
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)
    _sync(path.parent)


def _seal(folder: Path) -> int:
    """Sync every file, then write the manifest. Returns all bytes."""
    files: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        files[path.name] = (path.stat().st_size, _digest(path))
    text = _manifest_text(files)
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(folder)
    return sum(size for size, _ in files.values()) + len(text)


def _manifest_text(files: dict[str, Any]) -> str:
    """The only text that a manifest of these files may have: any other byte is a change."""
    listed = {name: [size, digest] for name, (size, digest) in sorted(files.items())}
    own = xxhash.xxh3_128_hexdigest(json.dumps(listed).encode())
    return json.dumps({"files": listed, "digest": own}, indent=1) + "\n"


def _digest(path: Path) -> str:
    hashed = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()


def _aside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _sync(path: Path) -> None:
    """What was written reaches the disk; for a folder, its names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def _why_not_written(folder: Path, error: OSError | SafetensorError, needed: int) -> Problem:
    what = f"cannot be written: {getattr(error, 'strerror', None) or error}"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(next(p for p in folder.parents if p.exists())).free
        what += f" (it needs {format_bytes(needed)}, and {format_bytes(free)} are free)"
    return Problem(str(folder), what, "Make room there, or name another folder in checkpoint.folder")
