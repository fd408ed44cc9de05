from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowmem_ft.recipe.load import load_recipe

from .conftest import Load, Refuse


def test_paths_are_relative_to_the_recipe_whatever_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "recipes" / "model").mkdir(parents=True)
    (folder / "recipes" / "train.jsonl").write_text("{}\n")
    recipe = folder / "recipes" / "r.yaml"
    recipe.write_text(
        "model: {path: ./model}\ndata: {train: ../train.jsonl, eval: train.jsonl, template: ../chat.jinja}\n"
        "output: out\ncheckpoint: {folder: ../kept}\n"
    )
    for current in (folder, folder / "recipes", folder / "shards"):
        monkeypatch.chdir(current)
        found = load_recipe(Path(os.path.relpath(recipe))).recipe
        assert found.model.path == str(folder / "recipes" / "model")
        assert found.data.train == str(folder / "train.jsonl")
        assert found.data.eval == str(folder / "recipes" / "train.jsonl")
        assert found.data.template == str(folder / "chat.jinja")
        assert found.output == str(folder / "recipes" / "out")
        assert found.checkpoint.folder == str(folder / "kept")


def test_override_is_relative_to_the_current_folder(folder: Path) -> None:
    (folder / "recipes").mkdir()
    recipe = Path("recipes/r.yaml")
    recipe.write_text("model: {path: ../model}\ndata: {train: ../train.jsonl}\noutput: out\n")
    found = load_recipe(recipe, ["data.train={path: shards}", "output=out"]).recipe
    assert not isinstance(found.data.train, str | list)
    assert found.data.train.path == str(folder / "shards")
    assert found.output == str(folder / "out")


def test_link_to_a_recipe_is_not_followed(folder: Path) -> None:
    (folder / "real").mkdir()
    (folder / "real" / "r.yaml").write_text("model: {path: ./model}\ndata: {train: train.jsonl}\n")
    (folder / "link.yaml").symlink_to(folder / "real" / "r.yaml")
    assert load_recipe(Path("link.yaml")).recipe.data.train == str(folder / "train.jsonl")


def test_home_is_expanded(folder: Path, load: Load, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    found = load("model: {path: ~/model}\ndata: {train: ~/train.jsonl}\ncheckpoint: {folder: ~/kept}\n").recipe
    assert (found.model.path, found.checkpoint.folder) == (str(folder / "model"), str(folder / "kept"))
    assert refuse("model: {path: ./model}\ndata: {train: train.jsonl}\noutput: ~no-such-user/x\n") == [
        "mine.yaml line 3: output: ~no-such-user/x names no home folder on this machine. "
        "Write the whole path, or ./ before the ~"
    ]


@pytest.mark.parametrize("path", ["HuggingFaceTB/SmolLM2-135M-Instruct", "gpt2", "smollm2-135m-instruct"])
def test_model_id_is_left_alone(path: str, load: Load) -> None:
    assert load(f"model: {{path: {path}, revision: main}}\ndata: {{train: train.jsonl}}\n").recipe.model.path == path


def test_model_id_that_exists_here_is_a_path(folder: Path, load: Load) -> None:
    (folder / "owner" / "name").mkdir(parents=True)
    found = load("model: {path: owner/name}\ndata: {train: train.jsonl}\n").recipe
    assert found.model.path == str(folder / "owner" / "name")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("./modle", "Did you mean path: ./model"),
        ("./a/model", "There is no folder"),
        ("models/llama/8b", "no hub id (owner/name)"),
        ("weights.gguf", "looked for"),
        ("a b", "no hub id (owner/name)"),
        ("https://example.org/model", "is an address"),
    ],
)
def test_model_that_is_not_there_is_refused(path: str, words: str, refuse: Refuse) -> None:
    (message,) = refuse(f"model: {{path: '{path}'}}\ndata: {{train: train.jsonl}}\n")
    assert message.startswith("mine.yaml line 1: model.path: ")
    assert path in message
    assert words in message


@pytest.mark.parametrize(
    ("written", "resolved"),
    [("shards", "shards"), ("./shards/*.jsonl", "shards/*.jsonl"), ("./shards/../train.jsonl", "train.jsonl")],
)
def test_data_that_is_here_becomes_absolute(written: str, resolved: str, folder: Path, load: Load) -> None:
    found = load(f"model: {{path: ./model}}\ndata: {{train: '{written}'}}\n").recipe
    assert found.data.train == str(folder / resolved)


def test_glob_beside_a_recipe_in_a_folder_with_brackets(folder: Path) -> None:
    odd = folder / "run[1]"
    odd.mkdir()
    (odd / "x.jsonl").write_text("{}\n")
    (odd / "r.yaml").write_text("model: {path: ../model}\ndata: {train: [x.jsonl, '*.jsonl']}\n")
    found = load_recipe(odd / "r.yaml").recipe.data.train
    assert found == [str(odd / "x.jsonl"), str(folder / "run[[]1]" / "*.jsonl")]


@pytest.mark.parametrize(
    "source", ["owner/name", "{path: imdb, split: train}", "{path: owner/name, split: 'train[:9]', config: main}"]
)
def test_data_id_is_left_alone(source: str, load: Load) -> None:
    found = load(f"model: {{path: ./model}}\ndata: {{train: {source}}}\n").recipe.data.train
    assert (found if isinstance(found, str) else found.path) in ("owner/name", "imdb")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ("owner/name.jsonl", "data.train", "There is no folder"),
        ("./imdb", "data.train", "looked for"),
        ("nothing.jsonl", "data.train", "That folder has eval.jsonl, train.jsonl"),
        ("imdb", "data.train", "needs its split: {path: imdb, split: train}"),
        ("'shards/*.csv'", "data.train", "looked for"),
        ("[train.jsonl, eval.jsno]", "data.train[1]", "Did you mean eval.jsonl"),
        ("{path: trian.jsonl}", "data.train.path", "Did you mean path: train.jsonl"),
        ("{path: train.jsonl, split: train}", "data.train.split", "Remove split"),
        ("{path: train.jsonl, config: main}", "data.train.config", "Remove config"),
    ],
)
def test_data_that_is_not_there_is_refused(source: str, key: str, words: str, refuse: Refuse) -> None:
    (message,) = refuse(f"model: {{path: ./model}}\ndata:\n  train: {source}\n")
    assert message.startswith(f"mine.yaml line 3: {key}: ")
    assert words in message


def test_file_of_the_current_folder_is_not_taken_but_named(folder: Path) -> None:
    (folder / "recipes").mkdir()
    recipe = Path("recipes/r.yaml")
    recipe.write_text("model: {path: ../model}\ndata: {train: train.jsonl}\n")
    with pytest.raises(Exception, match=r"The current folder has it.* Write train: \.\./train\.jsonl"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("output: train.jsonl", "output: train.jsonl is a file"),
        ("checkpoint: {folder: train.jsonl}", "checkpoint.folder: train.jsonl is a file"),
    ],
)
def test_folder_that_is_a_file_is_refused(rest: str, words: str, refuse: Refuse) -> None:
    assert words in refuse(f"model: {{path: ./model}}\ndata: {{train: train.jsonl}}\n{rest}\n")[0]


def test_a_checkpoint_is_auto_or_a_folder_that_is_there(folder: Path, load: Load, refuse: Refuse) -> None:
    start = "model: {path: ./model}\ndata: {train: train.jsonl}\ncheckpoint: {resume: "
    assert load(start + "auto}").recipe.checkpoint.resume == "auto"
    assert load(start + "shards}").recipe.checkpoint.resume == str(folder / "shards")
    (message,) = refuse(start + "runs/step-000100}")
    assert message.endswith("Name the folder of a checkpoint, or write auto")


def test_template_is_a_name_or_a_file(folder: Path, load: Load, refuse: Refuse) -> None:
    start = "model: {path: ./model}\ndata: {train: train.jsonl, template: "
    assert load(start + "llama-3}").recipe.data.template == "llama-3"
    assert load(start + "chat.jinja}").recipe.data.template == str(folder / "chat.jinja")
    assert "Did you mean chatml?" in refuse(start + "chatlm}")[0]
    assert "the built-in templates are chatml" in refuse(start + "other.jinja}")[0]
