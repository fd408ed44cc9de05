"""What a recipe names as data becomes pieces to read: a file, the shards of a folder or glob, a hub data set."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from lowmem_ft.data.files import ENDINGS, kind_of, read_file, rows_of
from lowmem_ft.data.json_streams import Raw
from lowmem_ft.data.json_text import shorten
from lowmem_ft.errors import DataError, Problem, nearest
from lowmem_ft.recipe.data_section import Source, Sources

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_ROWS = 256


@dataclass(frozen=True)
class Piece:
    """A part of a source that is read in one go: one file, or one split of a hub data set.

    Attributes:
        shown: its name as printed to the user.
        files: the files whose bytes are its content.
        unit: what its records are counted in: "line", or "row" where there are no lines.
        read: gives its raw records, from the start, each time it is called.
    """

    shown: str
    files: tuple[Path, ...]
    read: Callable[[], Iterator[Raw]]
    unit: str = "line"

    def where(self, number: int) -> str:
        """The place of a record, as in "data/train.jsonl line 14"."""
        return f"{self.shown} {self.unit} {number}"


@dataclass(frozen=True)
class LocatedSource:
    """A source of the recipe and what was found for it.

    Attributes:
        source: as in the recipe.
        index: its place in the recipe's list, from 0.
        pieces: in the order in which they are read: natural order of their names, so that part-2 comes before part-10.
    """

    source: Source
    index: int
    pieces: tuple[Piece, ...]


def as_sources(sources: Sources) -> list[Source]:
    """The value of `data.train` or `data.eval` as a list of sources."""
    listed = sources if isinstance(sources, list) else [sources]
    return [Source(path=source) if isinstance(source, str) else source for source in listed]


def locate_sources(sources: Sources) -> list[LocatedSource]:
    """Finds the files and hub data sets of a recipe; reads no record.

    Args:
        sources: the value of `data.train` or `data.eval`, with absolute paths or hub ids. Relative paths are relative
            to the current folder.

    Raises:
        DataError: naming every source that is not there or cannot be told.
    """
    located: list[LocatedSource] = []
    problems: list[Problem] = []
    for index, source in enumerate(as_sources(sources)):
        try:
            located.append(LocatedSource(source, index, tuple(_locate(source))))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return located


def is_hub_id(path: str) -> bool:
    """Whether a path of a source is a hub data set id: `owner/name`, no data file's ending, and nothing local."""
    return bool(_HUB_ID.fullmatch(path)) and kind_of(Path(path)) is None and not os.path.lexists(path)


def shown_name(path: Path) -> str:
    """A path as printed to the user: relative where it lies in the current folder, and printable."""
    absolute = Path(os.path.abspath(path))
    with contextlib.suppress(ValueError):
        absolute = absolute.relative_to(Path.cwd())
    return os.fsencode(absolute).decode("utf-8", "backslashreplace")


def digest_sources(located: Sequence[LocatedSource], **options: Any) -> str:
    """Hash of all that decides which examples come out: bytes and names of the files, formats, maps and `options`.

    Reads every byte once (about 1 s a GB from the page cache) and holds 1 MiB.

    Args:
        located: the sources.
        **options: further settings of reading, such as default_format; anything with a stable `repr`.

    Raises:
        DataError: a file cannot be read.
    """
    digest = xxhash.xxh3_128()
    _update(digest, sorted(options.items()))
    for source in located:
        hub = (source.source.config, source.source.split)
        _update(digest, (source.source.format, sorted((source.source.map or {}).items()), hub))
        for piece in source.pieces:
            _update(digest, piece.shown)
            for path in piece.files:
                _update(digest, _hash_file(path))
    return digest.hexdigest()


def _update(digest: Any, part: Any) -> None:
    digest.update(repr(part).encode() + b"\n")


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    except OSError as error:
        raise DataError(Problem(shown_name(path), f"cannot be read: {error.strerror}", "Make it readable.")) from None
    return digest.hexdigest()


def _locate(source: Source) -> list[Piece]:
    path = Path(source.path).expanduser()
    here = os.path.lexists(path)
    if not here and is_hub_id(source.path):
        return [_hub_piece(source)]
    for name, given in (("split", source.split), ("config", source.config)):
        if given is not None:
            what = f'{name} "{given}" is given for local files, which have none'
            raise DataError(Problem(source.path, what, f"Remove {name}, or give the path of the file that you mean"))
    if here and path.is_dir():
        files = _in_folder(path)
    elif here:
        files = [path]
    elif glob.has_magic(str(path)):
        files = _of_glob(path)
    else:
        raise DataError(_not_found(path))
    _check_files(files, path)
    return [
        Piece(shown_name(file), (file,), partial(read_file, file), "row" if kind_of(file) == "parquet" else "line")
        for file in files
    ]


def _not_found(path: Path) -> Problem:
    folder = path.parent
    if not folder.is_dir():
        return Problem(shown_name(path), f"there is no such file, and no folder {shown_name(folder)}", "Mend the path.")
    close = nearest(path.name, sorted(entry.name for entry in folder.iterdir()))
    instead = f"Did you mean {close}?" if close else "Mend the path; it is relative to the recipe file."
    return Problem(shown_name(path), f"there is no such file ({Path(os.path.abspath(path))})", instead)


def _natural(path: Path) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _in_folder(folder: Path) -> list[Path]:
    """The shards of a folder; hidden files and those that start with `_`, which tools leave beside shards, are none."""
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith((".", "_"))]
    except OSError as error:
        raise DataError(Problem(shown_name(folder), f"cannot be read: {error.strerror}", "Make it readable.")) from None
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    if folders:
        what = f"the folder holds folders ({_first(folders)}), and only files in it are read"
        raise DataError(Problem(shown_name(folder), what, f"Write a glob, for example: {folder}/**/*.jsonl"))
    if not entries:
        raise DataError(Problem(shown_name(folder), "the folder holds no files", f"Put shards there: {ENDINGS}"))
    return sorted(entries, key=_natural)


def _of_glob(pattern: Path) -> list[Path]:
    found = [Path(name) for name in glob.glob(str(pattern), recursive=True)]
    files = sorted((path for path in found if not path.is_dir()), key=_natural)
    if not files:
        what = "the glob matches folders only" if found else "the glob matches no file"
        raise DataError(Problem(shown_name(pattern), what, "Mend it; ** goes into folders."))
    return files


def _check_files(files: list[Path], given: Path) -> None:
    """Several files must be of one kind: a stray README or metadata file must not be read as data, nor passed over."""
    for path in files:
        if not path.is_file():
            what = "is a link to nothing" if path.is_symlink() and not path.exists() else "is not a regular file"
            raise DataError(Problem(shown_name(path), what, "Give a file; a pipe cannot be read twice."))
    if len(files) < 2 and given in files:
        return
    endings: dict[str, str] = {}
    for path in files:
        if kind_of(path) is None:
            what = f'holds "{path.name}", which is of no known kind ({ENDINGS})'
            raise DataError(
                Problem(shown_name(given), what, f"Move it away, or write a glob: {files[0].parent}/*.jsonl")
            )
        endings.setdefault(path.name.lower().removesuffix(".gz").rpartition(".")[2], path.name)
    if len(endings) > 1:
        what = f"holds files of several kinds: {_first(list(endings.values()))}"
        ending = next(iter(endings))
        instead = f"Write a glob, for example: {files[0].parent}/*.{ending}, or a list of paths."
        raise DataError(Problem(shown_name(given), what, instead))


def _first(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _hub_piece(source: Source) -> Piece:
    data = _load_from_hub(source)
    files = tuple(Path(cached["filename"]) for cached in data.cache_files)
    return Piece(f"{source.path} ({data.split})", files, partial(_hub_rows, data), "row")


def _hub_rows(data: Any) -> Iterator[Raw]:
    row = 0
    for table in data.with_format("arrow").iter(batch_size=_HUB_ROWS):
        for value in rows_of(table):
            row += 1
            yield row, value


def _load_from_hub(source: Source) -> Any:
    import datasets

    where = f"hub data set {source.path}"
    try:
        data = datasets.load_dataset(source.path, source.config, split=source.split)
    except Exception as error:  # the hub's clients raise many kinds, and none of them says what to do
        raise DataError(
            Problem(
                where,
                f"it cannot be loaded: {shorten(str(error), 200)}",
                f"Ways: go online and start again; or on a machine with a network run `hf download --repo-type dataset "
                f"{source.path} --local-dir data` and give the path of its files; or copy that machine's Hugging Face "
                f"cache here and set HF_HUB_OFFLINE=1.",
            )
        ) from error
    if isinstance(data, Mapping):
        if len(data) != 1:
            names = ", ".join(str(name) for name in data)
            raise DataError(Problem(where, f"it has the splits {names}", f"Write split: {next(iter(data), 'train')}"))
        (data,) = data.values()
    return data
