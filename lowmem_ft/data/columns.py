"""Which column is what: the recipe's `map`, the decision of `format: auto`, and the map that would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowmem_ft.data.formats import FORMATS
from lowmem_ft.data.json_text import name_keys
from lowmem_ft.data.messages import BadRecordError
from lowmem_ft.errors import DataError, Problem, nearest

_MISSING = object()
_QUESTIONS = ("prompt", "question", "query", "problem", "instruction", "input", "request", "source")
_ANSWERS = ("completion", "answer", "response", "output", "solution", "target", "reply")
_DOCUMENTS = ("text", "content", "document", "body", "passage", "raw_content")


class ColumnMap:
    """The map of one source, applied to each record.

    A column is a name, or names and list positions with dots between: `instances.0.output`. A name that holds a dot
    itself is found first. A mapped column loses its old name, and one that had the new name before is not read.

    Args:
        mapping: {name the format wants: column in the file}.
        format: a format's name, or auto: which names may be wanted.

    Raises:
        DataError: a name that the format does not want.
    """

    def __init__(self, mapping: Mapping[str, str], format: str) -> None:
        self._mapping = dict(mapping)
        self._found = dict.fromkeys(mapping, 0)
        self._records_cut: dict[str, int] = {}
        self._records = 0
        formats = list(FORMATS.values()) if format == "auto" else [FORMATS[format]]
        wanted = list(dict.fromkeys(name for one in formats for name in (*one.required, *one.optional)))
        for name in mapping:
            if name not in wanted:
                close = nearest(name, wanted)
                names = f"write {close}" if close else f"names are {', '.join(wanted)}"
                swapped = next((new for new, old in mapping.items() if old in wanted and old == mapping[name]), None)
                hint = f" (a map is {{name the format wants: column}}: {mapping[name]}: {name}?)" if swapped else ""
                what = f'data.map: "{name}" is no column of the format {format}'
                raise DataError(Problem("", what, f"In map {names}{hint}"))

    def apply(self, record: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
        """The record under the names that the format wants.

        Args:
            record: as read.
            required: wanted names whose column must be there.

        Raises:
            BadRecordError: such a column is not there.
        """
        if not self._mapping:
            return record
        self._records += 1
        moved = {column if column in record else column.partition(".")[0] for column in self._mapping.values()}
        renamed = {key: value for key, value in record.items() if key not in moved and key not in self._mapping}
        for name, column in self._mapping.items():
            value = self._follow(record, column)
            if value is not _MISSING:
                self._found[name] += 1
                renamed[name] = value
            elif name in required:
                what = f'the column "{column}", which map names for {name}, is missing'
                close = nearest(column, [str(key) for key in record]) or "COLUMN"
                raise BadRecordError(
                    f"{what}; the keys there are {name_keys(record)}", f"Mend data.map: {name}: {close}"
                )
        return renamed

    def preview(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record under the names that are wanted, as far as its columns are there; counts nothing."""
        counted = self._records, dict(self._found), dict(self._records_cut)
        renamed = self.apply(record, ())
        self._records, self._found, self._records_cut = counted
        return renamed

    def _follow(self, record: dict[str, Any], column: str) -> Any:
        if column in record:
            return record[column]
        value: Any = record
        for step in column.split("."):
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                if len(value) > 1:
                    self._records_cut[column] = self._records_cut.get(column, 0) + 1
                value = value[int(step)]
            else:
                return _MISSING
        return value

    def never_found(self) -> list[str]:
        """Wanted names whose column was in none of the records: a misspelt optional column shows here."""
        return [name for name, count in self._found.items() if not count] if self._records else []

    def column(self, name: str) -> str:
        """The column that the map gives for a wanted name."""
        return self._mapping[name]

    def notes(self) -> tuple[str, ...]:
        """What the map leaves unread, for the report: further elements of lists that it takes one element of."""
        return tuple(
            f'map takes one element for "{column}"; in {count} of {self._records} records that list holds more'
            for column, count in self._records_cut.items()
        )


def decide_format(sample: Sequence[tuple[str, dict[str, Any]]], mapping: Mapping[str, str]) -> str:
    """Decides which format the first records are in: the one that most of them fit.

    A record fits a format that finds all its required columns there, not null. With a map, only formats that want every
    mapped name are considered.

    Args:
        sample: place ("data/train.jsonl line 1") and record, after the map.
        mapping: the recipe's map.

    Raises:
        DataError: a record fits two formats, or none fits any.
    """
    names = [
        name for name, one in FORMATS.items() if all(wanted in (*one.required, *one.optional) for wanted in mapping)
    ]
    fits = [[name for name in names if all(record.get(key) is not None for key in FORMATS[name].required)]
            for _, record in sample]  # fmt: skip
    for (where, _), fitting in zip(sample, fits, strict=True):
        if len(fitting) > 1:
            columns = " and ".join(" + ".join(f'"{key}"' for key in FORMATS[name].required) for name in fitting)
            raise DataError(
                Problem(
                    where, f"format: auto finds more than one usable column: {columns}", f"Write format: {fitting[0]}"
                )
            )
    if not any(fits):  # all answers null: the keys alone say what it was meant to be, and each record will be an error
        fits = [
            [name for name in names if all(key in record for key in FORMATS[name].required)] for _, record in sample
        ]
    counts = {name: sum(name in fitting for fitting in fits) for name in names}
    best = max(counts.values(), default=0)
    if not best:
        raise DataError(_no_format(*sample[0], mapping))
    return next(name for fitting in fits for name in fitting if counts[name] == best)


def _no_format(where: str, record: dict[str, Any], mapping: Mapping[str, str]) -> Problem:
    keys = f"the columns {name_keys(record)} are" if record else "an empty record is"
    after = " after the map" if mapping else ""
    proposed = propose_map(record)
    if proposed:
        return Problem(where, f"{keys} in no known format{after}", f"Write {as_written(proposed)}")
    known = "; ".join(f"{name}: {', '.join(one.required)}" for name, one in FORMATS.items())
    return Problem(where, f"{keys} in no known format{after}", f"Rename them, or write a map. The formats are {known}")


def propose_map(record: dict[str, Any]) -> dict[str, str] | None:
    """A map for a record in no known format, by what its columns are called; None where nothing is like it."""
    columns = dict(_columns(record))
    for column, value in columns.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if "role" in value[0] and "content" in value[0]:
                return {"messages": column}
            if "from" in value[0] and "value" in value[0]:
                return {"conversations": column}
    texts = [column for column, value in columns.items() if isinstance(value, str)]
    answer, instruction, given = _like(texts, _ANSWERS), _like(texts, ("instruction",)), _like(texts, ("input",))
    if answer and instruction and given:
        return {"instruction": instruction, "input": given, "output": answer}
    question = _like([column for column in texts if column != answer], _QUESTIONS)
    if question and answer:
        return {"prompt": question, "completion": answer}
    document = _like(texts, _DOCUMENTS) or (texts[0] if len(texts) == len(record) == 1 else None)
    return {"text": document} if document else None


def as_written(mapping: Mapping[str, str]) -> str:
    """A map as a recipe has it: map: {prompt: question}."""
    return f"map: {{{', '.join(f'{name}: {column}' for name, column in mapping.items())}}}"


def _columns(value: Any, before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Columns and those in them, with the path that a map takes; of a list the first element."""
    items = value.items() if isinstance(value, dict) else [("0", value[0])] if isinstance(value, list) and value else []
    for key, inner in items:
        column = f"{before}{key}"
        yield column, inner
        if depth < 3:
            yield from _columns(inner, f"{column}.", depth + 1)


def _like(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The first column whose last part is one of the names, in the order of the names; case does not matter."""
    for name in names:
        for column in columns:
            if column.rpartition(".")[2].lower() == name:
                return column
    return None
