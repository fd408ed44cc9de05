"""Answers to one prompt or to a file of them, by a run, a checkpoint, an adapter or a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.errors import ExportError, Problem
from lowmem_ft.export.opened import Opened, open_subject
from lowmem_ft.export.prompts import Prompt, user_prompts
from lowmem_ft.export.subject import find_subject
from lowmem_ft.model.generate import PROMPTS_AT_ONCE, Answer, generate_answers


@dataclass(frozen=True)
class Written:
    """What came of a file of prompts.

    Attributes:
        prompts: how many were answered.
        unended: answers that were still going on at the longest length.
        references: prompts with a reference answer.
        exact: answers that are their reference, but for white space around it.
    """

    prompts: int
    unended: int
    references: int
    exact: int

    def line(self) -> str:
        """For people."""
        text = f"{self.prompts:,} answers"
        if self.references:
            text += f", {self.exact:,} of {self.references:,} are their reference ({self.exact / self.references:.0%})"
        return text + (f"; {self.unended:,} were cut at the longest length" if self.unended else "")


def generate(
    path: Path, prompt: str, *, system: str | None = None, max_new_tokens: int = 256, model: str | None = None
) -> tuple[str, str | None]:
    """Answer `prompt` greedily, with the chat template and the quantization of the training.

    Args:
        path: a run, a checkpoint, an adapter or a model.
        prompt: what the user says.
        system: system message, if any.
        max_new_tokens: longest answer.
        model: where the base is, if it is not where it was in training.

    Returns:
        The answers of base plus adapter, and of the base alone; None for a model without an adapter.

    Raises:
        ModelError: it cannot be loaded.
        ExportError: the adapter does not fit its base.
    """
    opened = open_subject(find_subject(path, model))
    prompts = user_prompts([prompt], "prompt", system)
    (answer,) = _answers(opened, prompts, max_new_tokens)
    if not opened.has_adapter:
        return answer.text, None
    (alone,) = _answers(opened, prompts, max_new_tokens, adapter=False)
    return answer.text, alone.text


def answer_file(
    opened: Opened,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_new_tokens: int = 256,
    with_base: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Written:
    """Answer prompts in batches, and write a line of JSON for each, in their order, as soon as its batch is done.

    A line has `prompt` (as the model saw it), `answer`, `ended` (by itself), with a reference `reference` and `exact`,
    and with the base `base`.

    Args:
        opened: who answers.
        prompts: from `read_prompts`.
        out: JSONL; not there yet.
        max_new_tokens: longest answer.
        with_base: answer as the base alone too.
        progress: told how many are done.

    Raises:
        DataError: the template refuses a prompt; nothing is written then.
        ExportError: the file is there already, or cannot be written.
    """
    if with_base and not opened.has_adapter:
        raise ExportError(Problem("--with-base", "there is no base beside a model without an adapter", "Leave it out"))
    for prompt in prompts:
        prompt.ids(opened.encoder)
    done: list[Answer] = []
    try:
        with out.open("x", encoding="utf-8") as stream:
            for start in range(0, len(prompts), PROMPTS_AT_ONCE):
                batch = prompts[start : start + PROMPTS_AT_ONCE]
                answers = _answers(opened, batch, max_new_tokens)
                alone = _answers(opened, batch, max_new_tokens, adapter=False) if with_base else []
                for line in _lines(batch, answers, alone):
                    stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                stream.flush()
                done += answers
                progress(len(done))
    except FileExistsError:
        raise ExportError(Problem(str(out), "is there already, and is not written over", "Name another file")) from None
    except OSError as error:
        raise ExportError(Problem(str(out), f"cannot be written: {error.strerror}", "Name another file")) from error
    known = [answer for answer, prompt in zip(done, prompts, strict=True) if prompt.reference is not None]
    return Written(len(done), sum(not a.ended for a in done), len(known), sum(a.exact for a in known))


def _lines(batch: Sequence[Prompt], answers: Sequence[Answer], alone: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    for index, (prompt, answer) in enumerate(zip(batch, answers, strict=True)):
        line: dict[str, Any] = {"prompt": answer.prompt, "answer": answer.text, "ended": answer.ended}
        if prompt.reference is not None:
            line |= {"reference": prompt.reference, "exact": answer.exact}
        if alone:
            line["base"] = alone[index].text
        yield line


def _answers(opened: Opened, prompts: Sequence[Prompt], max_new_tokens: int, adapter: bool = True) -> list[Answer]:
    with opened.running(adapter):
        return generate_answers(
            opened.model,
            opened.tokenizer,
            [prompt.ids(opened.encoder) for prompt in prompts],
            [prompt.reference or "" for prompt in prompts],
            opened.encoder.stop_token_ids,
            max_new_tokens=max_new_tokens,
            device=opened.device,
        )
