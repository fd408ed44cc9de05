"""One data file becomes raw records: what kind of file it is, and where each record starts."""

from __future__ import annotations

import csv
import gzip
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from lowmem_ft.data.json_streams import MOST_RECORD_BYTES, Raw, read_json_array, read_json_lines
from lowmem_ft.data.json_text import Bad, bad_bytes, name_keys, shorten

KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""File ending and kind of file; each may be followed by `.gz`."""

ENDINGS = ".jsonl, .json, .csv, .tsv or .parquet, each also with .gz"
_HEAD_BYTES = 4096
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET_ROWS = 256
_ARCHIVES = {
    b"PK\x03\x04": ("a zip archive", "unzip FILE"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "zstd -d FILE"),
    b"\xfd7zXZ\x00": ("compressed with xz", "xz -d FILE"),
    b"BZh": ("compressed with bzip2", "bzip2 -d FILE"),
    b"\x1f\x8b": ("compressed with gzip twice", "gzip -d FILE"),
    b"ARROW1": ("an Arrow file", 'python -c "import pyarrow.feather as f, pyarrow.parquet as p; '
                'p.write_table(f.read_table(\'FILE\'), \'NEW.parquet\')"'),
}  # fmt: skip
_WIDE = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x00\x00\xfe\xff": "UTF-32"}


class _StopError(Exception):
    """Line and `Bad` of a place that its reader cannot go on after."""


def kind_of(path: Path) -> str | None:
    """The kind of a data file by its name: json, csv or parquet; None for another name."""
    return KINDS.get(_ending(path))


def _ending(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return name[name.rfind(".") :] if "." in name else ""


def read_file(path: Path) -> Iterator[Raw]:
    """Reads the raw records of one file; faults come out as `Bad`, never as an exception.

    The content decides where it can: gzip and Parquet are known by their first bytes, whatever the name.
    Memory is bounded by the longest record (`MOST_RECORD_BYTES`), in Parquet by a row group.

    Args:
        path: JSONL, a JSON array, CSV, TSV or Parquet, plain or gzip.

    Yields:
        Physical line from 1 (Parquet: row from 1), and the record as a dict or a `Bad`.
    """
    line = 0
    try:
        with path.open("rb") as plain:
            zipped = plain.peek(2)[:2] == b"\x1f\x8b"
            if path.name.lower().endswith(".gz") and not zipped and plain.peek(1):
                bad = Bad("the name ends in .gz, and the content is not gzip", "Rename it without .gz.", ends_file=True)
                yield 1, bad
                return
            stream = gzip.GzipFile(fileobj=plain, mode="rb") if zipped else plain
            for line, value in _records(path, cast(BinaryIO, stream), zipped):
                yield line, value
    except _StopError as stop:
        yield stop.args
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = f"the gzip data is cut off or damaged here ({shorten(str(error), 80)})"
        yield line + 1, Bad(what, "Download or write the file again.", ends_file=True)
    except OSError as error:
        yield line + 1, Bad(f"the file cannot be read: {error.strerror or error}", "Make it readable.", ends_file=True)


def _records(path: Path, stream: BinaryIO, zipped: bool) -> Iterator[Raw]:
    head = cast(Any, stream).peek(_HEAD_BYTES)[:_HEAD_BYTES]
    if head.startswith(b"PAR1") or (head and kind_of(path) == "parquet"):
        yield from _parquet(stream, zipped)
        return
    bad = _foreign(head)
    if bad is not None:
        yield 1, bad
        return
    if head.startswith(_BYTE_ORDER_MARK):
        stream.read(len(_BYTE_ORDER_MARK))
        head = head[len(_BYTE_ORDER_MARK) :]
    start = head.lstrip()[:1]
    if kind_of(path) == "csv":
        yield from _csv(stream, "\t" if _ending(path) == ".tsv" else ",")
    elif kind_of(path) == "json" or start in (b"{", b"["):
        if start == b"[" and _is_array(path, head.lstrip()):
            yield from read_json_array(stream)
        else:
            yield from read_json_lines(_numbered_lines(stream))
    elif head:
        what = f'"{path.name}" is of no known kind'
        yield 1, Bad(what, f"Give it the ending of what it is: {ENDINGS}", ends_file=True)


def _is_array(path: Path, head: bytes) -> bool:
    """Whether a file that starts with `[` is one array: by its name, or because its first line does not close it."""
    first_line, line_break, _ = head.partition(b"\n")
    return _ending(path) == ".json" or (bool(line_break) and not first_line.rstrip().endswith(b"]"))


def _foreign(head: bytes) -> Bad | None:
    """What is no text at all, or text that is no data, known by the first bytes."""
    if head.startswith(b"version https://git-lfs"):
        return Bad("this is a Git LFS pointer, not the data", "Fetch the data: git lfs pull", ends_file=True)
    for mark, (name, command) in _ARCHIVES.items():
        if head.startswith(mark):
            return Bad(f"the file is {name}; of compressed files only gzip is read", f"Run: {command}", ends_file=True)
    for mark, name in _WIDE.items():
        if head.startswith(mark):
            what = f"the file is {name} (byte 0x{mark[0]:02X} at position 1), not UTF-8"
            return Bad(what, f"Run: iconv -f {name} -t utf-8 FILE > NEW", ends_file=True)
    if b"\x00" in head:
        what = f"the file is binary, not UTF-8 text: byte 0x00 at position {head.index(0) + 1}"
        return Bad(what, f"Give a file of text: {ENDINGS}", ends_file=True)
    shown = head.removeprefix(_BYTE_ORDER_MARK).lstrip()[:60].decode("utf-8", "replace")
    if shown.startswith("<"):
        what = f'this looks like an HTML or XML page, not data: "{shorten(shown)}"'
        return Bad(what, "Download the data file itself (on a hub: the raw or resolve link).", ends_file=True)
    if b"\r" in head and b"\n" not in head and re.search(rb"\r\s*\S", head):
        return Bad("its lines end in a bare carriage return", r"Run: tr '\r' '\n' < FILE > NEW", ends_file=True)
    return None


def _numbered_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines from 1, parted at line feeds alone: U+2028 and U+0085 are letters to an editor's line count and to JSON."""
    line = 0
    while raw := stream.readline(MOST_RECORD_BYTES + 1):
        line += 1
        if len(raw) > MOST_RECORD_BYTES:
            what = f"the line is longer than {MOST_RECORD_BYTES:,} bytes"
            raise _StopError(line, Bad(what, "Write one record a line, or split the record.", ends_file=True))
        yield line, raw


def _csv(stream: BinaryIO, delimiter: str) -> Iterator[Raw]:
    """Rows under a header, all values texts. A row starts on its own line, however many its quoted texts run over."""
    if csv.field_size_limit() < MOST_RECORD_BYTES:
        csv.field_size_limit(MOST_RECORD_BYTES)

    def lines() -> Iterator[str]:
        for line, raw in _numbered_lines(stream):
            try:
                yield raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = bad_bytes(raw[error.start], error.start)
                raise _StopError(line, Bad(bad.what, bad.instead, ends_file=True)) from None

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    end = 0
    try:
        for row in reader:
            start, end = end + 1, reader.line_num
            if not row or (len(row) == 1 and not row[0].strip()):
                continue
            if header is None:
                header = row
                twice = [name for name in header if header.count(name) > 1]
                if twice:
                    yield start, Bad(f'the header names the column "{twice[0]}" twice', "Rename one.", ends_file=True)
                    return
            elif len(row) != len(header):
                what = f"the row has {len(row)} values, and the header {len(header)} columns ({name_keys(header)})"
                yield start, Bad(what, f'Put a value that holds a "{delimiter}" or a line break in double quotes.')
            else:
                yield start, dict(zip(header, row, strict=True))
    except csv.Error as error:
        what = f"not CSV: {shorten(str(error), 80)}, in the row that starts here"
        yield end + 1, Bad(what, 'Close each quoted value, and write a quote inside it as "".', ends_file=True)


def _parquet(stream: BinaryIO, zipped: bool) -> Iterator[Raw]:
    with tempfile.TemporaryFile() as unpacked:
        source: IO[bytes] = stream
        if zipped:  # Parquet is read from its end, and going back in a gzip stream means to unpack it again each time
            shutil.copyfileobj(stream, unpacked, 2**20)
            unpacked.seek(0)
            source = unpacked
        yield from read_parquet(source)


def read_parquet(source: IO[bytes]) -> Iterator[Raw]:
    """Rows of a Parquet file as dicts, numbered from 1. Values that are null in a nested column are left out of it:
    a Parquet column gives every object all keys, so that null and absent cannot be told apart."""
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with closing(pyarrow.parquet.ParquetFile(source, pre_buffer=False)) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row, value in enumerate(rows_of(batch), row + 1):  # noqa: B020
                    yield row, value
    except (pyarrow.ArrowException, OSError) as error:
        what = f"the Parquet file cannot be read: {shorten(str(error), 120)}"
        yield row + 1, Bad(what, "Write or download it again.", ends_file=True)


def rows_of(batch: Any) -> Iterator[Any]:
    """Rows of a pyarrow record batch or table: dicts, or a `Bad` for a text that is not UTF-8."""
    try:
        rows = batch.to_pylist()
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            for index in range(batch.num_rows):
                yield from rows_of(batch.slice(index, 1))
        elif isinstance(error, UnicodeDecodeError):
            yield bad_bytes(error.object[error.start], error.start)
        else:  # for example a timestamp in the year 20000
            yield Bad(f"a value that Python cannot hold: {shorten(str(error), 80)}", "Write it as a text.")
        return
    for row in rows:
        yield {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
