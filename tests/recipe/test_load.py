from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowmem_ft.errors import MOST_PROBLEMS, RecipeError
from lowmem_ft.recipe.adapter_section import AdapterSection
from lowmem_ft.recipe.data_section import DataSection, Source
from lowmem_ft.recipe.load import LARGEST_FILE_BYTES, dump_recipe, load_recipe
from lowmem_ft.recipe.schema import CheckpointSection, EvalSection, ModelSection, PrepareSection, Recipe
from lowmem_ft.recipe.train_section import MemorySection, TrainSection

from .conftest import SMALLEST, Load, Refuse

BASE = """\
# what is tuned
model:
  path: ./model
  quantization: nf4
data:
  train: ./train.jsonl
  eval: eval.jsonl
  max_tokens: 512
adapter:
  rank: 8
  targets: [q_proj, v_proj]
train:
  lr: 3.0e-4
  epochs: 2
  batch_size: 4
  micro_batch_tokens: auto
  schedule: linear
  shuffle: true
  precision: bf16
checkpoint:
  folder: kept
  every_steps: 20
  keep: 3
"""


def changed(old: str, new: str) -> str:
    assert BASE.count(old) == 1, old
    return BASE.replace(old, new)


ACCEPTED: dict[str, tuple[str, str, Any]] = {
    "as it stands": (BASE, "train.lr", 3e-4),
    "exponent without a dot": (changed("3.0e-4", "3e-4"), "train.lr", 3e-4),
    "exponent with a plus": (changed("every_steps: 20", "every_steps: 2E+1"), "checkpoint.every_steps", 20),
    "no for false": (changed("shuffle: true", "shuffle: no"), "train.shuffle", False),
    "ON for true": (changed("shuffle: true", "shuffle: ON"), "train.shuffle", True),
    "number in quotes": (changed("batch_size: 4", "batch_size: '4'"), "train.batch_size", 4),
    "whole number with a dot": (changed("rank: 8", "rank: 8.0"), "adapter.rank", 8),
    "part of an epoch": (changed("epochs: 2", "epochs: 0.5"), "train.epochs", 0.5),
    "hexadecimal": (changed("rank: 8", "rank: 0x10"), "adapter.rank", 16),
    "octal of YAML 1.2": (changed("rank: 8", "rank: 0o10"), "adapter.rank", 8),
    "empty section": (changed("  rank: 8\n  targets: [q_proj, v_proj]\n", ""), "adapter.rank", 16),
    "null for off": (changed("precision: bf16", "max_grad_norm: null"), "train.max_grad_norm", None),
    "none is a word": (changed("quantization: nf4", "quantization: none"), "model.quantization", "none"),
    "byte order mark at the start": ("\ufeff" + BASE, "adapter.rank", 8),
    "lines of an old Mac": (BASE.replace("\n", "\r"), "adapter.rank", 8),
    "lines of Windows": (BASE.replace("\n", "\r\n"), "adapter.rank", 8),
    "one document with its marks": (f"%YAML 1.2\n---\n{BASE}...\n", "adapter.rank", 8),
    "anchor and alias": (changed("rank: 8", "rank: &r 8\n  alpha: *r"), "adapter.alpha", 8.0),
    "merge key": (changed("keep: 3", "<<: {keep: 5, every_steps: 9}"), "checkpoint.every_steps", 20),
    "number as a quoted name": (changed("# what is tuned", 'name: "2024"'), "name", "2024"),
    "date as a name": (changed("# what is tuned", "name: 2024-05-01"), "name", "2024-05-01"),
}

# The text, then for each problem in order: the line (0: the file as a whole), the key, and words of the message.
REFUSED: dict[str, tuple[str | bytes, list[tuple[int, str, list[str]]]]] = {
    "misspelt key": (
        changed("epochs: 2", "epochs: 2\n  warmup_ration: 0.1"),
        [(15, "train.warmup_ration", ["warmup_ratio: 0.1"])],
    ),
    "key in the wrong section": (BASE + "lr: 1e-4\n", [(24, "lr", ["train: {lr: 1e-4}"])]),
    "key of another tool": (
        changed("precision: bf16", "fp16: true\n  bf16: true"),
        [(19, "train.fp16", ["precision: fp16"]), (20, "train.bf16", ["precision: bf16"])],
    ),
    "truth value where a word belongs": (
        changed("schedule: linear", "schedule: off"),
        [(17, "train.schedule", ["off", "false", "cosine, linear, constant", "quotes"])],
    ),
    "truth value in quotes": (changed("shuffle: true", 'shuffle: "no"'), [(18, "train.shuffle", ["without quotes"])]),
    "truth value as a name": (changed("# what is tuned", "name: off"), [(1, "name", ['name: "off"'])]),
    "repeated key": (
        changed("epochs: 2", "epochs: 2\n  lr: 1.0"),
        [(15, "train.lr", ["twice", "line 13", "line 15"])],
    ),
    "repeated section": (BASE + "model: {path: ./model}\n", [(24, "model", ["line 2", "line 24"])]),
    "base 60": (
        changed("every_steps: 20", "every_steps: 1:30"),
        [(22, "checkpoint.every_steps", ["1:30", "base 60", "whole number"])],
    ),
    "octal of YAML 1.1": (changed("rank: 8", "rank: 010"), [(10, "adapter.rank", ["octal", "rank: 10"])]),
    "underscores": (changed("rank: 8", "rank: 1_6"), [(10, "adapter.rank", ["separators", "rank: 16"])]),
    "not finite": (changed("lr: 3.0e-4", "lr: .inf"), [(13, "train.lr", ["not finite"])]),
    "not a number": (changed("lr: 3.0e-4", "lr: .nan"), [(13, "train.lr", ["not finite"])]),
    "text for a list": (
        changed("[q_proj, v_proj]", "q_proj, v_proj"),
        [(11, "adapter.targets", ["one text", "targets: [q_proj, v_proj]"])],
    ),
    "two documents": (BASE + "---\ntrain: {lr: 1.0}\n", [(24, "", ["second document"])]),
    "empty file": ("", [(0, "", ["empty"])]),
    "only a comment": ("# later\n", [(0, "", ["empty"])]),
    "a list": ("- model\n- data\n", [(1, "", ["list", "sections"])]),
    "a text": ("just words\n", [(1, "", ["text", "sections"])]),
    "out of range, all at once": (
        BASE.replace("512", "0").replace("rank: 8", "rank: 0").replace(": auto", ": -1").replace("size: 4", "size: 0"),
        [
            (8, "data.max_tokens", ["0", "at least 2", "max_tokens: 1024"]),
            (10, "adapter.rank", ["0", "at least 1", "rank: 16"]),
            (15, "train.batch_size", ["0", "at least 1"]),
            (16, "train.micro_batch_tokens", ["-1", "at least 1", "auto"]),
        ],
    ),
    "fraction of a rank": (changed("rank: 8", "rank: 8.5"), [(10, "adapter.rank", ["8.5", "whole number"])]),
    "keep none": (changed("keep: 3", "keep: 0"), [(23, "checkpoint.keep", ["at least 1", "keep: 2"])]),
    "empty value": (changed("lr: 3.0e-4", "lr:"), [(13, "train.lr", ["empty", "lr: 0.0002"])]),
    "two ends of the run": (
        changed("epochs: 2", "epochs: 2\n  steps: 10"),
        [(15, "train.steps", ["epochs", "steps", "train.epochs on line 14"])],
    ),
    "data that is not there": (
        changed("./train.jsonl", "./trian.jsonl"),
        [(6, "data.train", ["./trian.jsonl", os.sep + "trian.jsonl", "train: ./train.jsonl"])],
    ),
    "model that is not there": (changed("./model\n", "./modle\n"), [(3, "model.path", ["./modle", "path: ./model"])]),
    "unclosed quote": (changed("quantization: nf4", 'quantization: "nf4'), [(4, "", ["quote", "never closed"])]),
    "quote closed too late": (
        changed("quantization: nf4", "quantization: 'nf4") + "name: 'x'\n",
        [(4, "", ["quote", "line 24"])],
    ),
    "unclosed list": (changed("v_proj]", "v_proj"), [(11, "", ["list", "]"])]),
    "tab": (changed("  quantization", "\tquantization"), [(4, "", ["tab", "spaces"])]),
    "no space after the colon": (changed("lr: 3.0e-4", "lr:3.0e-4"), [(14, "", ["space after the colon"])]),
    "section without spaces": (SMALLEST + "train:\n  lr:3e-4\n", [(5, "train", ["space after the colon"])]),
    "section as a list": (SMALLEST + "train:\n  - lr: 1\n", [(5, "train", ["without dashes"])]),
    "indentation": (changed("  epochs: 2", "   epochs: 2"), [(14, "", ["Indent"])]),
    "not UTF-8": (BASE.encode() + b"name: caf\xe9\n", [(24, "", ["0xe9", "UTF-8"])]),
    "UTF-16": (BASE.encode("utf-16"), [(1, "", ["UTF-16", "UTF-8"])]),
    "byte order mark inside": (BASE + "\ufeffname: x\n", [(24, "", ["U+FEFF"])]),
    "number as a key": (BASE + "1: x\n", [(24, "", ['"1"', "number"])]),
    "list as a key": (BASE + "[a]: x\n", [(24, "", ["key"])]),
    "tag": (changed("rank: 8", "rank: !!python/name:os.system 8"), [(10, "", ["!!python/name:os.system"])]),
    "alias of itself": (SMALLEST + "train: &x\n  lr: *x\n", [(6, "", ["*x", "itself"])]),
    "alias without anchor": (SMALLEST + "train: *x\n", [(5, "", ["*x", "&x"])]),
    "missing section": ("data: {train: train.jsonl}\n", [(0, "model", ["model: {path: "])]),
    "null section that is needed": ("model:\ndata: {train: train.jsonl}\n", [(1, "model", ["model: {path: "])]),
    "missing key": ("data: {train: train.jsonl}\nmodel:\n  dtype: float32\n", [(2, "model.path", ["path: "])]),
    "evaluation without data": (SMALLEST + "eval: {generate: 2}\n", [(5, "eval.generate", ["data.eval"])]),
    "revision of a folder": (changed("quantization: nf4", "revision: main"), [(4, "model.revision", ["hub"])]),
    "name with a slash": (changed("# what is tuned", "name: a/b"), [(1, "name", ["a/b", "slash"])]),
    "several kinds in line order": (
        "model: {path: ./nowhere}\nseeed: 3\ndata:\n  train: nothing.jsonl\n  max_tokens: x\ntrain: {lr: 0}\n",
        [
            (1, "model.path", ["./nowhere"]),
            (2, "seeed", ["seed: 3"]),
            (4, "data.train", ["nothing.jsonl"]),
            (5, "data.max_tokens", ["x is not a whole number"]),
            (6, "train.lr", ["0 is not a number above 0"]),
        ],
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_recipe_is_accepted_with_its_value(case: str, load: Load) -> None:
    text, key, value = ACCEPTED[case]
    found: Any = load(text).recipe
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("case", REFUSED)
def test_recipe_is_refused_with_line_key_and_words(case: str, refuse: Refuse) -> None:
    text, expected = REFUSED[case]
    messages = refuse(text)
    assert len(messages) == len(expected), messages
    for message, (line, key, words) in zip(messages, expected, strict=True):
        start = "mine.yaml" + (f" line {line}" if line else "") + (f": {key}: " if key else ": ")
        assert message.startswith(start), message
        assert [word for word in words if word not in message] == [], message
        assert not re.search(r"Input should|\[type=|validation error|pydantic|Traceback", message)


def test_more_problems_than_are_printed_are_counted(load: Load) -> None:
    count = MOST_PROBLEMS + 3
    with pytest.raises(RecipeError) as caught:
        load(SMALLEST + "".join(f"unknown{number}: 1\n" for number in range(count)))
    assert len(caught.value.problems) == count
    assert "3 more problems" in str(caught.value)


def test_defaults_are_filled_in(load: Load, folder: Path) -> None:
    recipe = load(SMALLEST).recipe
    assert recipe.name == "mine"
    assert recipe.output == str(folder / "runs" / "mine")
    assert recipe.train.epochs == 1
    assert load(SMALLEST + "train: {steps: 5}\n").recipe.train.epochs is None
    assert load(SMALLEST + "name: other\n").recipe.output == str(folder / "runs" / "other")


def test_lines_are_those_of_the_keys_that_were_written(load: Load) -> None:
    loaded = load("model: {path: ./model}\n\ndata:\n  train:\n  - train.jsonl\n  - path: eval.jsonl\n    weight: 2\n")
    assert loaded.lines == {
        "model": 1,
        "model.path": 1,
        "data": 3,
        "data.train": 4,
        "data.train[0]": 5,
        "data.train[1]": 6,
        "data.train[1].path": 6,
        "data.train[1].weight": 7,
    }


def test_where_names_the_line_the_override_or_what_encloses_it(load: Load) -> None:
    loaded = load(BASE, "train.lr=1", "data.train={path: train.jsonl}")
    assert loaded.where("train.precision") == "mine.yaml line 19: train.precision"
    assert loaded.where("train.weight_decay") == "mine.yaml line 12: train.weight_decay"
    assert loaded.where("adapter.targets[1]") == "mine.yaml line 11: adapter.targets[1]"
    assert loaded.where("memory.recompute") == "mine.yaml: memory.recompute"
    assert loaded.where("train.lr") == "command line: train.lr=1"
    assert loaded.where("data.train.weight") == "command line: data.train={path: train.jsonl}: data.train.weight"


def test_file_is_shown_as_it_was_named(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "a.yaml").write_text("x: 1")
    with pytest.raises(RecipeError, match=re.escape("sub/../sub/a.yaml line 1: x:")):
        load_recipe(Path("sub/../sub/a.yaml"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mien.yaml", "no such file. Did you mean mine.yaml?"),
        ("nowhere/mine.yaml", "There is no folder"),
        ("model", "this is a folder"),
        ("a\0b", "cannot be read"),
    ],
)
def test_file_that_cannot_be_read_is_refused(name: str, words: str, load: Load) -> None:
    load(SMALLEST)
    with pytest.raises(RecipeError, match=re.escape(words)):
        load_recipe(Path(name))


def test_file_that_is_no_recipe_by_its_size_is_refused(refuse: Refuse) -> None:
    assert refuse("#" * LARGEST_FILE_BYTES + SMALLEST) == [
        "mine.yaml: the file is larger than 256 KiB, and so no recipe. Name a YAML file of settings"
    ]


def test_loading_imports_no_heavy_library() -> None:
    code = (
        "import sys, lowmem_ft.recipe.load, lowmem_ft.recipe.reference;"
        "print(sorted({'torch', 'transformers', 'datasets', 'peft', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(str.strip)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
COUNTS = st.integers(1, 2**63 - 1)
MAPS = st.none() | st.dictionaries(TEXTS, TEXTS, max_size=3)


@st.composite
def recipes(draw: st.DrawFn, folder: str) -> Recipe:
    """Any resolved recipe, over the files of the test folder."""
    sources = st.builds(
        Source, path=st.just(f"{folder}/train.jsonl"), format=st.sampled_from([None, "text"]), weight=POSITIVE, map=MAPS
    ) | st.just(f"{folder}/shards/*.jsonl")
    ends = st.tuples(st.none(), COUNTS) | st.tuples(POSITIVE, st.none())
    epochs, steps = draw(ends)
    return Recipe(
        name=draw(TEXTS.filter(lambda text: not set(text) & set("/\\") and text not in (".", ".."))),
        seed=draw(st.integers(0, 2**63 - 1)),
        output=f"{folder}/out/" + draw(st.sampled_from(["a", "ü ${x}", "#b: c", "1"])),
        model=ModelSection(
            path=draw(st.sampled_from([f"{folder}/model", "owner/name", "gpt2"])),
            quantization=draw(st.sampled_from(["none", "nf4", "int8"])),
        ),
        data=DataSection(
            train=draw(sources | st.lists(sources, min_size=1, max_size=3)),
            eval=f"{folder}/eval.jsonl",
            map=draw(MAPS),
            train_on=draw(st.sampled_from(["all", "last", {"1": 0.25, "last": 1e-9}])),
            template=draw(st.sampled_from([None, "chatml", f"{folder}/chat.jinja"])),
            packing=draw(st.booleans()),
        ),
        prepare=PrepareSection(cast=draw(st.sampled_from(["all", "norms", "none"]))),
        adapter=AdapterSection(alpha=draw(POSITIVE), targets=draw(st.lists(TEXTS, min_size=1, max_size=3))),
        train=TrainSection(epochs=epochs, steps=steps, lr=draw(POSITIVE), max_grad_norm=draw(st.none() | POSITIVE)),
        memory=MemorySection(loss_chunk_tokens=draw(COUNTS | st.just("auto"))),
        checkpoint=CheckpointSection(every_steps=draw(st.none() | COUNTS)),
        eval=EvalSection(generate=draw(st.integers(0, 9))),
    )


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_dumped_recipe_loads_as_the_same_recipe(folder: Path, load: Load, data: st.DataObject) -> None:
    recipe = data.draw(recipes(str(folder)))
    assert load(dump_recipe(recipe)).recipe == recipe


@pytest.mark.parametrize("case", ACCEPTED)
def test_resolved_recipe_loads_the_same_from_another_folder(case: str, load: Load, folder: Path) -> None:
    recipe = load(ACCEPTED[case][0]).recipe
    elsewhere = folder / "run" / "recipe.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(dump_recipe(recipe))
    assert load_recipe(elsewhere).recipe == recipe


def loads_or_is_refused(load: Load, text: str | bytes, *overrides: str) -> None:
    try:
        load(text, *overrides)
    except RecipeError as error:
        refused = error
    else:
        return
    assert refused.problems
    assert all(problem.what and problem.where for problem in refused.problems)


FUZZ = settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)


@given(st.binary(max_size=200))
@FUZZ
def test_any_bytes_load_or_are_refused(load: Load, data: bytes) -> None:
    loads_or_is_refused(load, data)


@given(st.text(max_size=100), st.lists(st.text(max_size=30), max_size=3))
@FUZZ
def test_any_text_and_overrides_load_or_are_refused(load: Load, text: str, overrides: list[str]) -> None:
    text = text.encode("utf-8", "replace").decode()
    loads_or_is_refused(load, text, *overrides)


PIECES = st.sampled_from(
    [
        *"{}[]:,#&*!|>'\"%@`~?-\n\t \\0",
        *("  ", ": ", "- ", "---", "<<: ", "*a", "&a ", "!!str ", "${", "$${", "${HOME}"),
        *(
            "\\U00110000",
            "\\ud800",
            "1e999",
            "010",
            ".nan",
            "null",
            "yes",
            "\ufeff",
            "\u2028",
            "lr",
            "train",
            "data.train",
        ),
    ]
)


@given(st.lists(st.tuples(st.integers(0, len(BASE)), st.integers(0, 12), PIECES | st.text(max_size=3)), max_size=4))
@FUZZ
def test_any_mutation_of_a_recipe_loads_or_is_refused(load: Load, changes: list[tuple[int, int, str]]) -> None:
    text = BASE
    for start, length, piece in changes:
        text = text[:start] + piece + text[start + length :]
    loads_or_is_refused(load, text.encode("utf-8", "replace"))


KEYS = st.sampled_from(["train.lr", "data.train", "data.train.weight", "data.map.x", "train", "x.y", "adapter.targets"])


@given(st.lists(st.tuples(KEYS, st.lists(PIECES, max_size=5).map("".join)), max_size=3))
@FUZZ
def test_any_override_loads_or_is_refused(load: Load, overrides: list[tuple[str, str]]) -> None:
    loads_or_is_refused(load, BASE, *(f"{key}={value}" for key, value in overrides))
