"""The records of all sources become examples; what is wrong in them becomes one error, or a counted list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Literal

from lowmem_ft.data.columns import ColumnMap, as_written, decide_format, propose_map
from lowmem_ft.data.formats import FORMATS, Example, make_example
from lowmem_ft.data.json_text import Bad
from lowmem_ft.data.messages import BadRecordError, MissingColumnError
from lowmem_ft.data.sources import LocatedSource, Piece, locate_sources
from lowmem_ft.errors import MOST_PROBLEMS, DataError, Problem
from lowmem_ft.recipe.data_section import Sources

AUTO_RECORDS = 20
MOST_COLLECTED = 1000
MOST_LISTED = 100


@dataclass(frozen=True)
class SourceReport:
    """What reading one source came to.

    Attributes:
        path: the source as in the recipe.
        format: the format every record was held to.
        decided: how `auto` came to it, as a line to print; empty where the recipe gave the format.
        files: files read, as printed to the user.
        records: records seen, good or bad.
        examples: examples made.
        skipped: records left out by `on_bad_record: skip`.
        listed: the first `MOST_LISTED` of those, with place and reason.
        notes: lines to print about what was not read.
    """

    path: str
    format: str
    decided: str
    files: tuple[str, ...]
    records: int
    examples: int
    skipped: int = 0
    listed: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        listed = [[problem.where, problem.what, problem.instead] for problem in self.listed]
        return {**self.__dict__, "files": list(self.files), "listed": listed, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, made: Mapping[str, Any]) -> SourceReport:
        """The report that `to_dict` wrote."""
        listed = tuple(Problem(*texts) for texts in made["listed"])
        return cls(**{**made, "files": tuple(made["files"]), "listed": listed, "notes": tuple(made["notes"])})


def read_examples(
    sources: Sources | Sequence[LocatedSource],
    *,
    default_format: str = "auto",
    default_map: Mapping[str, str] | None = None,
    on_bad_record: Literal["error", "skip"] = "error",
    reports: list[SourceReport] | None = None,
) -> Iterator[Example]:
    """Reads every record of every source, in the order of the recipe.

    Memory: a few records, and the longest one; files are never held whole. After the first fault nothing more comes
    out, but reading goes on to collect up to `MOST_COLLECTED` faults: so the error comes at the end, and only a caller
    that takes all examples sees it.

    Args:
        sources: the value of `data.train` or `data.eval`, or what `locate_sources` made of it.
        default_format: `data.format`, for sources that give none.
        default_map: `data.map`, for sources that give none.
        on_bad_record: `skip` leaves out records that cannot be read; faults of a whole file are errors all the same.
        reports: a list that gets one report a source, when that source has been read.

    Yields:
        Examples. Some may hold nothing to train, such as an empty answer: the template counts those.

    Raises:
        DataError: with file, physical line, what was found and what to write; ten problems printed, the rest counted.
    """
    located = [one for one in sources if isinstance(one, LocatedSource)] if not isinstance(sources, str) else []
    if not located:
        located = locate_sources(sources)  # type: ignore[arg-type]  # not located, so as in the recipe
    faults = _Faults()
    for source in located:
        reading = _Reading(source, faults, on_bad_record == "skip")
        format = source.source.format or default_format
        mapping = source.source.map if source.source.map is not None else (default_map or {})
        try:
            yield from reading.examples(format, mapping)
        except _TooManyError:
            raise faults.error() from None
        except DataError as error:
            faults.found += error.problems
        if reports is not None and not faults.found:
            reports.append(reading.report())
    if faults.found:
        raise faults.error()


class _TooManyError(Exception):
    """More faults than are collected."""


@dataclass
class _Faults:
    found: list[Problem] = field(default_factory=list)
    full: bool = False

    def add(self, problem: Problem) -> None:
        self.found.append(problem)
        if len(self.found) >= MOST_COLLECTED:
            self.full = True
            raise _TooManyError

    def error(self) -> DataError:
        if not self.full:
            return DataError(self.found)
        last = f"reading stopped here, after {MOST_COLLECTED:,} such problems"
        return DataError([*self.found[: MOST_PROBLEMS - 1], Problem(self.found[-1].where, last)])


class _Reading:
    """One pass over one source, and its counts."""

    def __init__(self, source: LocatedSource, faults: _Faults, skip: bool) -> None:
        self._source, self._faults, self._skip = source, faults, skip
        self._format, self._decided = "", ""
        self._columns: ColumnMap | None = None
        self._records = self._examples = self._skipped = 0
        self._listed: list[Problem] = []

    def examples(self, format: str, mapping: Mapping[str, str]) -> Iterator[Example]:
        columns = self._columns = ColumnMap(mapping, format)
        records = self._raw()
        if format == "auto":
            # Bad lines among the first are held back, so that faults come in the order of the file.
            first = list(islice(records, AUTO_RECORDS))
            sample = [
                (piece.where(line), columns.preview(value)) for piece, line, value in first if type(value) is dict
            ]
            records = chain(first, records)
            if sample:
                format = decide_format(sample, mapping)
                self._decided = f"auto decided: {format}, from the keys of the first {len(sample)} records"
        self._format = format
        required = FORMATS[format].required if format in FORMATS else ()
        for piece, line, value in records:
            try:
                if type(value) is not dict:
                    raise BadRecordError(value.what, value.instead)
                example = make_example(columns.apply(value, required), format, piece.shown, line, self._source.index)
            except BadRecordError as error:
                ends_file = type(value) is Bad and value.ends_file
                self._fault(self._explained(error, piece.where(line), value), ends_file)
            else:
                self._examples += 1
                if not self._faults.found:
                    yield example
        self._check_end()

    def _explained(self, error: BadRecordError, where: str, record: Any) -> Problem:
        if not isinstance(error, MissingColumnError):
            return Problem(where, error.what, error.instead)
        if self._decided:
            return Problem(where, f"{error.what} (the file began as {self._format})", error.instead)
        proposed = propose_map(record) or {}
        wanted = FORMATS[self._format]
        if proposed and not self._examples and all(name in (*wanted.required, *wanted.optional) for name in proposed):
            return Problem(where, error.what, f"Write {as_written(proposed)}")
        return Problem(where, error.what, error.instead)

    def _raw(self) -> Iterator[tuple[Piece, int, Any]]:
        for piece in self._source.pieces:
            before = self._records
            for line, value in piece.read():
                self._records += 1
                yield piece, line, value
            if self._records == before:
                what = (
                    "the file is empty (0 bytes)"
                    if not any(_size(path) for path in piece.files)
                    else "it holds no records"
                )
                self._faults.add(Problem(piece.shown, f"{what}: no examples", "Write records into it, or remove it."))

    def _fault(self, problem: Problem, ends_file: bool) -> None:
        if not self._skip or ends_file:
            self._faults.add(problem)
            return
        self._skipped += 1
        if len(self._listed) < MOST_LISTED:
            self._listed.append(problem)

    def _check_end(self) -> None:
        assert self._columns is not None
        if self._faults.found:
            return
        for name in self._columns.never_found():
            column = self._columns.column(name)
            what = f'data.map: the column "{column}", named for {name}, is in none of {self._records} records'
            self._faults.add(Problem(self._source.source.path, what, "Mend or remove it."))
        if self._skipped and not self._examples:
            what = f"all {self._skipped} records are left out by on_bad_record: skip, the first: {self._listed[0]}"
            self._faults.add(Problem(self._source.source.path, what))

    def report(self) -> SourceReport:
        assert self._columns is not None
        return SourceReport(
            path=self._source.source.path,
            format=self._format,
            decided=self._decided,
            files=tuple(piece.shown for piece in self._source.pieces),
            records=self._records,
            examples=self._examples,
            skipped=self._skipped,
            listed=tuple(self._listed),
            notes=self._columns.notes(),
        )


def _size(path: Any) -> int:
    return int(path.stat().st_size)
