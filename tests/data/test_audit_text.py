"""The audit as printed: marked with or without colour, and printable on any terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lowmem_ft.data.audit import Audit, make_audit
from lowmem_ft.data.audit_text import audit_lines
from lowmem_ft.data.formats import Example
from tests.data.test_audit import RECORDS, completion, encoder, tokens


def audit(*more: Example) -> Audit:
    made = encoder()
    return make_audit(tokens(made, [*more, *RECORDS]), tokens(made, RECORDS[:1]), made, notes=["a note"])


def test_the_plain_audit_says_every_count() -> None:
    text = "\n".join(audit().lines())
    for part in (
        "data.train: 6 records read, 4 kept, as 5 sequences, 2 left out",
        "left out, longer than max_tokens: 1, the longest",
        "left out, empty answer: 1 (d.jsonl line 4)",
        "of which trained: ",
        "end token </s> trained: in 4 of 5 sequences",
        "<s> at the beginning: in 4 of 5 sequences, never twice",
        "exact duplicates: 1",
        "overlap: 1 of 1 evaluation sequences are trained too",
        "note: a note",
        "example d.jsonl line 1, ",
        "<s>one[[dogs</s>]]",
    ):
        assert part in text, text


def test_without_colour_brackets_mark_and_with_colour_a_style() -> None:
    made = audit()
    plain = io.StringIO()
    made.render(Console(file=plain, width=20))
    assert "one[[dogs</s>]]" in plain.getvalue()
    assert "\x1b" not in plain.getvalue()
    coloured = io.StringIO()
    made.render(Console(file=coloured, force_terminal=True, color_system="standard", no_color=False))
    assert "one\x1b[1;32mdogs</s>\x1b[0m" in coloured.getvalue()
    assert "[[" not in coloured.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_text_prints_on_any_terminal(encoding: str) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    audit(completion(1, "\x1b[2Jred [bold]x[/] \u202e", "\U0001f469\u200d\U0001f467 \u00e9\ttab\nline")).render(
        Console(file=file)
    )
    file.flush()
    text = raw.getvalue().decode(encoding)
    assert "\x1b" not in text
    assert "\\x1b[2Jred [bold]x[/] \\u202e" in text
    assert ("\U0001f469\u200d\U0001f467" in text) == (encoding == "utf-8")
    assert ("\u2588" in text) == (encoding == "utf-8")


def test_long_stretches_are_cut_in_the_middle_with_the_number_of_letters() -> None:
    made = encoder(max_tokens=4096)
    lines = make_audit(tokens(made, [completion(1, "ab" * 500, "dogs")]), None, made).lines()
    assert any("... 603 characters ..." in line for line in lines)


def test_examples_are_lines_of_their_own() -> None:
    lines = audit_lines(audit(completion(1, "a\nb", "c")), colour=True)
    assert [line.plain for line in lines if line.plain.startswith("  ")][-3:]
    assert all("\n" not in line.plain for line in lines)
