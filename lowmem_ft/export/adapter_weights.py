"""What an adapter changes in each parameter of its base, from PEFT's files. Nothing in them is left out."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.errors import ExportError, ModelError, Problem
from lowmem_ft.export.changes import (
    Added,
    Change,
    EmbeddingLowRank,
    LowRank,
    RowsReplaced,
    Scaled,
    SharedLowRank,
    magnitude_key,
)
from lowmem_ft.model.tensor_files import TensorFiles

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter as what it does to parameters of the base.

    Attributes:
        folder: where it was read.
        config: its adapter_config.json.
        files: its tensors.
        replaced: key of the tensor that takes the place of a parameter, by the parameter's name in the model.
        changes: what is done to the base's values, or to what replaced them, by name of the parameter.
    """

    folder: Path
    config: Mapping[str, Any]
    files: TensorFiles
    replaced: Mapping[str, str]
    changes: Mapping[str, tuple[Change, ...]]


def read_adapter(folder: Path) -> AdapterWeights:
    """Read an adapter's configuration and which weights it has; their values are read when they are needed.

    Args:
        folder: in PEFT's format.

    Raises:
        ModelError: it is no adapter, or its weights are not whole.
        ExportError: it is of a kind that cannot be merged exactly, or has a weight whose meaning is not known.
    """
    config = read_adapter_config(folder)
    _refuse_kinds(folder, config)
    if not (folder / WEIGHTS).is_file():
        raise ModelError(Problem(str(folder), f"has no {WEIGHTS}", "Save the adapter as safetensors"))
    files = TensorFiles(folder / WEIGHTS)
    reading = _Reading(files, config, folder)
    reading.read()
    changes = {name: tuple(found) for name, found in reading.changes.items()}
    return AdapterWeights(folder, config, files, reading.replaced, changes)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a folder.

    Raises:
        ModelError: it is not there, or is none.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {**config, "peft_type": str(config["peft_type"]).upper()}
    except FileNotFoundError:
        raise ModelError(Problem(str(folder), f"holds no {CONFIG}", "Name a folder with an adapter")) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(Problem(str(folder / CONFIG), f"cannot be read ({type(error).__name__})")) from error


class _Reading:
    """Gives every tensor of an adapter its meaning; what has none is an error that lists all of them."""

    def __init__(self, files: TensorFiles, config: Mapping[str, Any], folder: Path) -> None:
        self.files, self.config, self.folder = files, config, folder
        self.left = set(files)
        self.changes: dict[str, list[Change]] = defaultdict(list)
        self.replaced: dict[str, str] = {}

    def read(self) -> None:
        """Fill `changes` and `replaced`."""
        for key in sorted(self.files):
            if key in self.left and key.startswith(PREFIX):
                self._give_meaning(key)
        if any(isinstance(change, SharedLowRank) for found in self.changes.values() for change in found):
            self._take_shared()
        if self.left:
            where = str(self.folder / WEIGHTS)
            problems = [Problem(where, f"{key} has no known meaning") for key in sorted(self.left)]
            raise ExportError([Problem("", "nothing was merged, since parts of the adapter would be lost"), *problems])

    def _give_meaning(self, key: str) -> None:
        for ending, read in (
            (".lora_A.weight", self._low_rank),
            (".lora_embedding_A", self._embedding),
            (".vera_lambda_b", self._shared),
            (".ia3_l", self._scaled),
            (".token_adapter.trainable_tokens_delta", self._rows),
        ):
            if key.endswith(ending):
                module = key.removesuffix(ending)
                read(module, module.removeprefix(PREFIX).removesuffix(".base_layer"))
                return
        if not re.search(r"\.(lora_|vera_|ia3_|token_adapter\.)", key):  # else it belongs to another key, or to nothing
            self.left.remove(key)
            self.replaced[key.removeprefix(PREFIX).replace(".base_layer.", ".")] = key

    def _low_rank(self, module: str, name: str) -> None:
        keys = [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
        dora = bool(self.config.get("use_dora"))
        if dora:
            keys.append(magnitude_key(self.files, module))
        if len(self.files[keys[0]].shape) != 2 or not self._take(keys):
            return
        scale = self._scale(name, self.files[keys[0]].shape[0])
        self.changes[f"{name}.weight"].append(LowRank(self.files, module, scale, dora))
        bias = f"{module}.lora_B.bias"
        if bias in self.files and self._take([bias]):
            self.changes[f"{name}.bias"].append(Added(self.files, bias, scale))

    def _embedding(self, module: str, name: str) -> None:
        keys = [f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"]
        if not self.config.get("use_dora") and self._take(keys):
            scale = self._scale(name, self.files[keys[0]].shape[0])
            self.changes[f"{name}.weight"].append(EmbeddingLowRank(self.files, module, scale))

    def _shared(self, module: str, name: str) -> None:
        if self._take([f"{module}.vera_lambda_b", f"{module}.vera_lambda_d"]):
            self.changes[f"{name}.weight"].append(SharedLowRank(self.files, module))

    def _take_shared(self) -> None:
        if not self._take(["base_model.vera_A", "base_model.vera_B"]):
            what = "has no vera_A and vera_B: it was saved without the matrices that its layers share"
            raise ExportError(Problem(str(self.folder), what, "Save it with save_projection=True"))

    def _scaled(self, module: str, name: str) -> None:
        self._take([f"{module}.ia3_l"])
        self.changes[f"{name}.weight"].append(Scaled(self.files, module))
        if self.files[f"{module}.ia3_l"].shape[1] == 1:
            self.changes[f"{name}.bias"].append(Scaled(self.files, module, of_bias=True))

    def _rows(self, module: str, name: str) -> None:
        key = f"{module}.token_adapter.trainable_tokens_delta"
        asked = self.config.get("trainable_token_indices") or ()
        if isinstance(asked, Mapping):
            asked = next((ids for written, ids in asked.items() if re.match(rf"(.*\.)?({written})$", name)), ())
        if len(asked) == self.files[key].shape[0]:
            self.left.remove(key)
            self.changes[f"{name}.weight"].append(RowsReplaced(self.files, key, tuple(asked)))

    def _take(self, keys: list[str]) -> bool:
        """Whether all are there; then they are used."""
        if not self.left.issuperset(keys):
            return False
        self.left.difference_update(keys)
        return True

    def _scale(self, name: str, rank: int) -> float:
        patterns: Mapping[str, float] = self.config.get("alpha_pattern") or {}
        own = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
        alpha = next(own, self.config["lora_alpha"])
        return float(alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank)


def _refuse_kinds(folder: Path, config: Mapping[str, Any]) -> None:
    """Kinds whose effect is no change of weights, or that also changed the base before training."""
    where, kind = str(folder / CONFIG), config["peft_type"]
    if kind not in ("LORA", "VERA", "IA3"):
        raise ExportError(Problem(where, f"{kind} cannot be merged here", "Only LORA (dora, rslora), VERA, IA3 can"))
    for name in ("use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config",
                 "layer_replication", "target_parameters", "monteclora_config"):  # fmt: skip
        if config.get(name):
            raise ExportError(
                Problem(where, f"{name} is set, and such an adapter cannot be merged", "Serve it unmerged")
            )
    start = config.get("init_lora_weights", True)
    if kind == "LORA" and start not in (True, False, None, "gaussian", "orthogonal", "eva"):
        what = f"init_lora_weights is {start}, which altered the base before training"
        raise ExportError(Problem(where, what, "Convert it to plain LoRA with save_pretrained(path_initial_model_...)"))
