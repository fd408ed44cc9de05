"""Trying a run answers with the adapter and with the base alone; a file of prompts is answered line by line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from lowmem_ft.data.template import make_encoder
from lowmem_ft.errors import DataError, ExportError, ModelError
from lowmem_ft.export import generate as module
from lowmem_ft.export.generate import answer_file, generate
from lowmem_ft.export.opened import Opened, open_subject
from lowmem_ft.export.prompts import Prompt, user_prompts
from lowmem_ft.export.subject import find_subject
from lowmem_ft.train import main
from tests.export.trained import trained_in
from tests.flow.recipes import write_run


def test_the_trained_model_answers_as_at_the_end_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    recipe = write_run(tmp_path / "work")
    assert main([str(recipe), "train.lr=0.05", "train.steps=8"]) == 0
    run = tmp_path / "work" / "runs" / "tiny"
    trained, base = generate(run, "hello eval 0", max_new_tokens=4)
    first = {
        step: json.loads((run / f"answers-{step:06d}.jsonl").read_text().splitlines()[0])["text"] for step in (0, 8)
    }
    assert (trained, base) == (first[8], first[0])
    assert trained != base
    assert generate(run / "adapter", "hello eval 0", max_new_tokens=4) == (trained, base)
    assert generate(run / "checkpoints" / "step-000008", "hello eval 0", max_new_tokens=4) == (trained, base)


def test_a_run_without_an_adapter_names_its_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "recipe.yaml").write_text((tmp_path / "mine.yaml").read_text())
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"no adapter yet.*checkpoints/step-000002"):
        generate(tmp_path, "hello")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_subject(find_subject(trained_in(tmp_path_factory.mktemp("generate"))))


def prompts(*texts: str, reference: str | None = None) -> list[Prompt]:
    return [Prompt(p.where, p.messages, reference=reference) for p in user_prompts(texts, "here")]


def lines_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_batches_answer_as_single_prompts_do_and_keep_their_order(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts("hello dogs dogs dogs", "hello", "there 0", "hello hello", "there dogs")
    monkeypatch.setattr(module, "PROMPTS_AT_ONCE", 2)
    done: list[int] = []
    written = answer_file(opened, asked, tmp_path / "a.jsonl", max_new_tokens=4, with_base=True, progress=done.append)
    assert done == [2, 4, 5]
    for prompt, line in zip(asked, lines_of(tmp_path / "a.jsonl"), strict=True):
        alone = tmp_path / f"{len(str(prompt.messages))}-{abs(hash(str(prompt.messages)))}.jsonl"
        answer_file(opened, [prompt], alone, max_new_tokens=4)
        (single,) = lines_of(alone)
        assert {**line, "base": None} == {**single, "base": None}
        assert str(prompt.messages[-1]["content"]) in str(line["prompt"])
        assert "base" not in single
    assert (written.prompts, written.references) == (5, 0)


def test_references_are_compared(opened: Opened, tmp_path: Path) -> None:
    asked = prompts("hello", reference="nothing like it")
    written = answer_file(opened, asked, tmp_path / "a.jsonl", max_new_tokens=2)
    (line,) = lines_of(tmp_path / "a.jsonl")
    assert (line["reference"], line["exact"]) == ("nothing like it", False)
    assert (written.references, written.exact, written.unended) == (1, 0, 1)
    assert written.line() == "1 answers, 0 of 1 are their reference (0%); 1 were cut at the longest length"


def test_nothing_is_written_over_and_nothing_for_a_bad_prompt(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(ExportError, match="is there already"):
        answer_file(opened, prompts("hello"), tmp_path / "a.jsonl", max_new_tokens=2)
    assert (tmp_path / "a.jsonl").read_text() == "mine"
    with pytest.raises(ExportError, match="cannot be written"):
        answer_file(opened, prompts("hello"), tmp_path / "none" / "a.jsonl", max_new_tokens=2)
    (tmp_path / "t.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + opened.encoder.template_text
    )
    encoder = make_encoder(opened.tokenizer, template=str(tmp_path / "t.jinja"), max_tokens=99)
    asked = [*prompts("hello"), *user_prompts(["hello"], "here", "a system message")]
    with pytest.raises(DataError, match="no"):
        answer_file(replace(opened, encoder=encoder), asked, tmp_path / "b.jsonl", max_new_tokens=2)
    assert not (tmp_path / "b.jsonl").exists()


def test_a_model_answers_alone(tmp_path: Path) -> None:
    trained_in(tmp_path)
    answer, base = generate(tmp_path / "base", "hello", max_new_tokens=3)
    assert answer
    assert base is None
    with pytest.raises(ExportError, match="no base beside a model"):
        answer_file(open_subject(find_subject(tmp_path / "base")), prompts("x"), tmp_path / "a.jsonl", with_base=True)


def test_a_folder_without_a_run_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(ModelError, match=r"holds no run, adapter or model, only: notes"):
        generate(tmp_path, "hello")
    with pytest.raises(ModelError):
        generate(tmp_path / "none", "hello")
