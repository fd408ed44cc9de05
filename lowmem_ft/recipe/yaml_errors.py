"""What PyYAML found, said for people: the line where the mistake is, not the line where the parser gave up."""

from __future__ import annotations

import re

import yaml

CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
"""What a YAML text may not hold as it is: control characters, line separators that editors do not show, a byte order
mark that is not at the start."""

_NO_CHARACTER = re.compile(r"\\U(?!000|0010)[0-9a-fA-F]{8}")


def explain(error: yaml.YAMLError | ValueError | OverflowError, text: str) -> tuple[int, str, str]:
    """The line (from 1), what is wrong there, and what to write instead."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        found = _NO_CHARACTER.search(text)
        line = text.count("\n", 0, found.start()) + 1 if found else 1
        return line, "a number in an escape or a directive here is out of range", "Write the character itself"
    problem, context = error.problem or "", error.context or ""
    line = error.problem_mark.line + 1
    opened = error.context_mark.line + 1 if error.context_mark else line
    if "quoted scalar" in context and ("end of stream" in problem or "document separator" in problem):
        return opened, "a quote opens here and is never closed", "Add the closing quote"
    if "'\\t'" in problem:
        return line, "a tab stands here, and YAML indents and separates with spaces", "Replace the tab by spaces"
    quote = _long_quote(text, line)
    if quote and not context.startswith("while scanning"):
        what = f"a quote opens here and closes only on line {line}, in the middle of something else"
        return quote, what, "Close it on its own line"
    if context in ("while parsing a flow sequence", "while parsing a flow mapping"):
        if "${" in text.split("\n")[line - 1]:
            return line, "a ${...} inside [ ] or { } ends the list or mapping", 'Put it in quotes: "${...}"'
        kind, end = ("list", "]") if "sequence" in context else ("mapping", "}")
        seen = f" (seen on line {line})" if line != opened else ""
        return opened, f"the {kind} that opens here lacks a comma or its closing {end}{seen}", f"Add the , or the {end}"
    return opened if "expected ':'" in problem else line, *_said(problem, context)


def _said(problem: str, context: str) -> tuple[str, str]:
    start = re.search("character '(.)' that cannot start", problem)
    if start:
        return f"a text cannot begin with {start[1]} without quotes", f'Write "{start[1]}..." in quotes'
    if "mapping values are not allowed" in problem:
        return (
            "a second `key: value` begins here inside another value",
            "Indent it like its neighbours, put a space after the colon above it, or quote a text with `: ` in it",
        )
    if "expected ':'" in problem:
        return "this line is not `key: value`", "Put a colon and a space after the key"
    if "sequence entries are not allowed" in problem:
        return "a list item (- ) begins here inside another value", "Put the item on a line of its own"
    if "unknown escape" in problem:
        return "a backslash in double quotes begins an escape, and this is none", "Use single quotes, or write \\\\"
    if "<stream end>" in problem:
        return "the text ends inside a list or mapping", "Add the closing ] or }"
    if "expected the node content" in problem:
        found = problem.rsplit("found ", 1)[-1]
        return f"a value is missing before {found}", "Write the value, or put the text in quotes"
    if context in ("while parsing a block mapping", "while parsing a block collection"):
        return (
            "this does not fit what is above it: its indentation differs, or text follows a closing quote or bracket",
            "Indent the keys of a section alike, and quote the whole text",
        )
    if "incompatible YAML" in problem:
        return "this names a YAML version other than 1", "Remove the %YAML line"
    return f"this is not YAML ({problem})", "Write key: value, one a line"


def _long_quote(text: str, line: int) -> int | None:
    """The line of the last quote that opens on an earlier line than `line` and closes on it."""
    opened = None
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.ScalarToken) and token.style in ("'", '"'):
                start, end = token.start_mark.line + 1, token.end_mark.line + 1
                if start < end == line:
                    opened = start
    except (yaml.YAMLError, ValueError, OverflowError):
        pass
    return opened
