"""The audit as lines on a terminal: trained text in colour, or in [[ ]] where there is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowmem_ft.data.audit import Audit, ShownExample, SplitAudit
from lowmem_ft.data.cache import LeftOutCount
from lowmem_ft.data.template import IN_PART
from lowmem_ft.units import format_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

TRAINED_STYLE = "bold green"
_BAR_WIDTH = 40
_MOST_LETTERS = 400
_PLACES = 3
# Not printable by Unicode's categories, and needed: the line end, and the joiners of emoji and of Indic scripts.
_HARMLESS = "\n\u200c\u200d"


def render(audit: Audit, console: Console) -> None:
    """Prints the audit. Letters that the console cannot encode, and control characters, are printed as escapes.

    Args:
        audit: what to print.
        console: where; without colour the trained text stands in [[ ]].
    """
    colour = console.color_system is not None and not console.no_color
    for line in audit_lines(audit, colour=colour, encoding=console.encoding):
        console.print(line, soft_wrap=True, highlight=False)


def audit_lines(audit: Audit, *, colour: bool, encoding: str = "utf-8") -> list[Text]:
    """The audit as lines with styles.

    Args:
        audit: what to say.
        colour: mark trained text by colour; else by [[ ]].
        encoding: of where it goes.
    """
    from rich.text import Text

    lines = [Text(_printable(line, encoding)) for line in audit.formats]
    for split in (audit.train, audit.eval):
        if split is not None:
            lines += [Text(_printable(line, encoding)) for line in _split_lines(split, audit)]
            lines += [Text(_printable(line, encoding)) for line in _bar_lines(split, encoding)]
    if audit.eval is not None:
        of = f"{format_count(audit.eval.sequences)} evaluation sequences"
        lines.append(Text(f"overlap: {format_count(audit.overlap)} of {of} are trained too"))
    lines += [Text(_printable(f"note: {note}", encoding)) for note in audit.notes]
    for example in audit.train.shown:
        lines += _example_lines(example, colour, encoding)
    return lines


def _split_lines(split: SplitAudit, audit: Audit) -> Iterable[str]:
    kept, read = format_count(split.kept), format_count(split.records)
    sequences = f", as {format_count(split.sequences)} sequences" if split.sequences != split.kept else ""
    left_out = format_count(split.records - split.kept)
    yield f"{split.setting}: {read} records read, {kept} kept{sequences}, {left_out} left out"
    for one in split.left_out:
        yield f"  left out, {_left_out(one)}"
    for one in split.in_part:
        yield f"  in part left out, {_left_out(one)}"
    trained = f"{format_count(split.trained_tokens)} ({100 * split.trained_tokens / split.tokens:.1f} %)"
    yield f"  tokens: {format_count(split.tokens)}, of which trained: {trained}"
    shape = ", ".join(f"{percent} %: {length}" for percent, length in split.percentiles)
    yield f"  lengths in tokens: {shape}, longest: {split.longest_tokens}"
    of = f"of {format_count(split.sequences)} sequences"
    yield f"  end token {audit.end} trained: in {format_count(split.ended)} {of}"
    if audit.begin:
        twice = f", twice in {format_count(split.begun_twice)}" if split.begun_twice else ", never twice"
        yield f"  {audit.begin} at the beginning: in {format_count(split.begun)} {of}{twice}"
    if split.unknown_tokens:
        yield f"  unknown tokens: {format_count(split.unknown_tokens)}, which the tokenizer cannot spell"
    yield f"  exact duplicates: {format_count(split.duplicates)}"


def _left_out(one: LeftOutCount) -> str:
    places = ", ".join(f"{first.file} line {first.line}" for first in one.first[:_PLACES])
    more = ", ..." if one.count > _PLACES else ""
    longest = f", the longest {one.longest_tokens} tokens" if one.longest_tokens else ""
    return f"{one.reason.removeprefix(IN_PART)}: {format_count(one.count)}{longest} ({places}{more})"


def _bar_lines(split: SplitAudit, encoding: str) -> Iterable[str]:
    block = "\u2588" if _encodes("\u2588", encoding) else "#"
    most = max(count for _, _, count in split.bars)
    width = len(str(split.bars[-1][1]))
    for low, high, count in split.bars:
        bar = block * (-(-count * _BAR_WIDTH // most))
        yield f"  {low:>{width}} to {high:>{width}}  {bar} {format_count(count)}"


def _example_lines(example: ShownExample, colour: bool, encoding: str) -> list[Text]:
    from rich.text import Text

    marked = "in colour" if colour else "in [[ ]]"
    body = Text()
    for stretch in example.stretches:
        text = _printable(_clipped(stretch.text), encoding)
        if stretch.trained and colour:
            body.append(text, TRAINED_STYLE)
        else:
            body.append(f"[[{text}]]" if stretch.trained else text)
    title = f"example {example.where}, {example.tokens} tokens, what is trained {marked}:"
    lines = [Text(_printable(title, encoding))]
    for line in body.split("\n", allow_blank=True):
        lines.append(Text("  ") + line)
    return lines


def _clipped(text: str) -> str:
    if len(text) <= _MOST_LETTERS:
        return text
    half = _MOST_LETTERS // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


def _encodes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _printable(text: str, encoding: str) -> str:
    """`text` with control characters as escapes, so that data cannot steer the terminal."""
    if not text.isprintable():
        text = "".join(
            letter if letter.isprintable() or letter in _HARMLESS else letter.encode("unicode_escape").decode()
            for letter in text
        )
    return text if _encodes(text, encoding) else text.encode("ascii", "backslashreplace").decode()
