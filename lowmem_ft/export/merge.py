"""An adapter merged into its base, a tensor at a time: a model larger than memory merges.

A merged model is a folder that transformers loads like any other. It is never in packed 4-bit weights: rounding the
sum of base and adapter to 4 bits would lose most of what was trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem_ft.errors import ExportError, Problem
from lowmem_ft.export.adapter_weights import AdapterWeights
from lowmem_ft.export.changes import Change, RowsReplaced, Scaled, Shape
from lowmem_ft.export.trained_base import Quantization, as_trained, quantized_names
from lowmem_ft.model.checkpoint_names import parameter_names
from lowmem_ft.model.facts import make_empty_model
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import DTYPES
from lowmem_ft.model.packed import quantization_method
from lowmem_ft.model.tensor_files import TensorFiles, TensorSpec

PIECE_ELEMENTS = 1 << 23
"""A weight is summed in pieces of rows of so many elements: 32 MiB in float32."""
MOST_NAMES = 6


class MergedWeights:
    """The weights of a merged model, each computed when it is asked for. Iterate for (name, tensor) pairs.

    Memory: one tensor in its final type, and a piece of it in float32; a weight that is quantized and turned back is
    whole in float32 for that moment.

    Args:
        base: a folder with safetensors, not quantized itself.
        adapter: made for it.
        dtype: of the floating-point weights; None: each as the base stores it.
        trained: merge into the base as it was loaded in training, quantized or in another type; None: as it is.
        trust_remote_code: run the model's own Python code.

    Attributes:
        model: the base's modules on the meta device.
        specs: of all tensors, in the base's order.
        untied: head and embedding shared their weight and no longer do: one of them was changed alone.
        vocabulary: rows of the embedding, if they are not as many as the base has; else None.

    Raises:
        ExportError: the adapter changes what the base does not have, or has in another shape.
        ModelError: the base cannot be read.
    """

    def __init__(
        self,
        base: FoundModel,
        adapter: AdapterWeights,
        *,
        dtype: torch.dtype | None = None,
        trained: Quantization | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.adapter, self.dtype, self.trained = adapter, dtype, trained
        _refuse_quantized(base)
        self.model = make_empty_model(base, "float32", trust_remote_code)
        self.files = TensorFiles(Path(base.path))
        self._parameters = self._parameters_by_name()
        self._transposed = _transposed_names(self.model)
        self._quantized = quantized_names(self.model) if trained and trained.method != "none" else set()
        self._one_of_two: str | None = None
        self.untied = self._leave_or_untie()
        self._check_fits()
        self.specs = tuple(self._spec(name) for name in self._parameters)
        self.vocabulary = self._new_vocabulary()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for spec in self.specs:
            yield spec.name, self.tensor(spec.name)

    @property
    def changed(self) -> int:
        """How many tensors the adapter changes."""
        return sum(self._is_changed(parameter) for parameter, _ in self._parameters.values())

    def tensor(self, name: str) -> Tensor:
        """A tensor of the merged model.

        Args:
            name: in the checkpoint; one of `specs`.
        """
        parameter, stored = self._parameters[name]
        spec = self._spec(name)
        files, key = self.files, stored
        if parameter in self.adapter.replaced:
            files, key = self.adapter.files, self.adapter.replaced[parameter]
        if not spec.dtype.is_floating_point or not spec.shape:
            return files.read(key).to(spec.dtype)
        packed = parameter in self._quantized and parameter not in self.adapter.replaced
        if packed or parameter in self._transposed:
            return self._whole(parameter, files.read(key), packed).to(spec.dtype)
        return self._in_pieces(parameter, files, key, spec)

    def _whole(self, parameter: str, weight: Tensor, packed: bool) -> Tensor:
        """A weight that must be seen at once: its scales are of all of it, or its rows are its inputs."""
        transposed = parameter in self._transposed
        weight = weight.T if transposed else weight
        if self.trained and parameter not in self.adapter.replaced:
            weight = as_trained(weight, self.trained) if packed else weight.to(DTYPES[self.trained.dtype])
        if parameter in self.adapter.changes:
            weight = weight.float()
            for change in self.adapter.changes[parameter]:
                weight = change.ready()(weight, slice(0, len(weight)))
        return weight.T if transposed else weight

    def _in_pieces(self, parameter: str, files: TensorFiles, key: str, spec: TensorSpec) -> Tensor:
        changes = [change.ready() for change in self.adapter.changes.get(parameter, ())]
        result = torch.empty(spec.shape, dtype=spec.dtype)
        rows_at_once = max(1, PIECE_ELEMENTS * len(result) // max(1, result.numel()))
        for start in range(0, len(result), rows_at_once):
            rows = slice(start, min(start + rows_at_once, len(result)))
            piece = files.read(key, rows)
            if self.trained and files is self.files:
                piece = piece.to(DTYPES[self.trained.dtype])
            if changes:
                piece = piece.float()
            for change in changes:
                piece = change(piece, rows)
            result[rows] = piece
        return result

    def _parameters_by_name(self) -> dict[str, tuple[str, str]]:
        """Parameter, and the base's tensor, by name of the tensor in the merged checkpoint."""
        found = parameter_names(self.model, self.files)
        changed = {*self.adapter.changes, *self.adapter.replaced}
        put_together = sorted({f.name for f in found.values() if not f.whole} & changed)
        if put_together:
            where = f"its base stores {', '.join(put_together[:MOST_NAMES])} in several parts"
            raise ExportError(Problem(str(self.adapter.folder), where, "Serve the adapter unmerged"))
        return {key: (f.name if f.whole else "", key) for key, f in found.items()}

    def _leave_or_untie(self) -> bool:
        """Whether head and embedding part, which shared their weight. The checkpoint gets one tensor or both."""
        tied = _tied_weights(self.model)
        if tied is None:
            return False
        head, embedding = tied
        by_parameter = {parameter: name for name, (parameter, _) in self._parameters.items()}
        if self.adapter.config.get("ensure_weight_tying") and {head, embedding} & self.adapter.changes.keys():
            what = "was trained with ensure_weight_tying on a head that is an embedding, and merging would part the two"
            raise ExportError(Problem(str(self.adapter.folder), what, "Serve it unmerged"))
        if not self._parts(head, embedding):
            name = by_parameter.get(head)
            if name and embedding in by_parameter:  # stored twice: the second copy is not read
                del self._parameters[name]
            elif name:
                self._parameters[name] = (embedding, self._parameters[name][1])
            self._one_of_two = head
            return False
        if any(isinstance(change, RowsReplaced) for change in self.adapter.changes.get(embedding, ())):
            what = "trains rows of an embedding that is the head too, and beside them one of the two alone"
            raise ExportError(Problem(str(self.adapter.folder), what, "Serve it unmerged"))
        stored = self._parameters[by_parameter.get(embedding) or by_parameter[head]][1]
        for parameter in (head, embedding):
            if parameter not in by_parameter:
                self._parameters[parameter] = (parameter, stored)
        return True

    def _parts(self, head: str, embedding: str) -> bool:
        """Whether the adapter changes one of them otherwise than the other. Rows of tokens train in both."""
        replaced, changes = self.adapter.replaced, self.adapter.changes
        if head in replaced and embedding in replaced:
            keys = replaced[head], replaced[embedding]
            return not torch.equal(*(self.adapter.files.read(key) for key in keys))
        if head in replaced or embedding in replaced:
            return True
        changed = [*changes.get(head, ()), *changes.get(embedding, ())]
        return any(not isinstance(change, RowsReplaced) for change in changed)

    def _is_changed(self, parameter: str) -> bool:
        return parameter in self.adapter.changes or parameter in self.adapter.replaced

    def _spec(self, name: str) -> TensorSpec:
        parameter, stored = self._parameters[name]
        dtype, shape = self.files[stored].dtype, self.files[stored].shape
        if parameter in self.adapter.replaced:
            shape = self.adapter.files[self.adapter.replaced[parameter]].shape
        return TensorSpec(name, self.dtype if self.dtype and dtype.is_floating_point else dtype, shape)

    def _spec_of_parameter(self, parameter: str | None) -> TensorSpec | None:
        return next((self._spec(name) for name, (own, _) in self._parameters.items() if own == parameter), None)

    def _new_vocabulary(self) -> int | None:
        embedding = _weight_name(self.model, self.model.get_input_embeddings())
        key = self.adapter.replaced.get(embedding or "")
        rows = self.adapter.files[key].shape[0] if key else None
        stored = self.model.get_input_embeddings().weight
        assert isinstance(stored, Tensor)
        return rows if rows != stored.shape[0] else None

    def _check_fits(self) -> None:
        """Every parameter that the adapter changes is there, and has the shape that the adapter was made for."""
        folder, problems = str(self.adapter.folder), []
        known = {parameter for parameter, _ in self._parameters.values()}
        growing = {_weight_name(self.model, part) for part in _ends(self.model)}
        for parameter in sorted({*self.adapter.changes, *self.adapter.replaced} - {self._one_of_two}):
            if parameter not in known:
                if not _may_be_absent(self.adapter.changes.get(parameter, ())):
                    problems.append(Problem(folder, f"changes {parameter}, and the base has no such weight"))
                continue
            spec = self._spec_of_parameter(parameter)
            assert spec is not None
            shape = spec.shape[::-1] if parameter in self._transposed else spec.shape
            for change in self.adapter.changes.get(parameter, ()):
                if not _fits(shape, change.shape):
                    what = f"changes {parameter} as {_text(change.shape)}, and in the base it is {_text(shape)}"
                    problems.append(Problem(folder, what))
            stored = self.files[next(s for own, s in self._parameters.values() if own == parameter)].shape
            if spec.shape != stored and not (parameter in growing and spec.shape[1:] == stored[1:]):
                what = f"replaces {parameter} by {_text(spec.shape)}, and in the base it is {_text(stored)}"
                problems.append(Problem(folder, what))
        if problems:
            problems.append(Problem("", f"the base is {self.files.path}", "Name the one it was trained on by --model"))
            raise ExportError(problems)


def _may_be_absent(changes: Sequence[Change]) -> bool:
    """IA3 scales a bias where there is one."""
    return bool(changes) and all(isinstance(change, Scaled) and change.of_bias for change in changes)


def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(w is None or s == w for s, w in pairs)


def _text(shape: Shape) -> str:
    return "x".join("any" if size is None else str(size) for size in shape)


def _refuse_quantized(base: FoundModel) -> None:
    config = json.loads((Path(base.path) / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config"):
        method = quantization_method(config["quantization_config"])
        what = f"is stored in {method}, and a sum rounded to that again would lose what was trained"
        raise ExportError(Problem(base.path, what, "Name the model that it was made from by --model"))


def _ends(model: PreTrainedModel) -> list[nn.Module]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [part for part in ends if part is not None]


def _weight_name(model: nn.Module, part: nn.Module | None) -> str | None:
    return next((f"{name}.weight" for name, module in model.named_modules() if module is part), None)


def _tied_weights(model: PreTrainedModel) -> tuple[str, str] | None:
    """Names of head and embedding where they are one weight."""
    ends = _ends(model)
    if len(ends) < 2 or ends[0].weight is not ends[1].weight:
        return None
    embedding, head = (_weight_name(model, part) for part in ends)
    return (head, embedding) if head and embedding else None


def _transposed_names(model: nn.Module) -> set[str]:
    """Weights that are stored as (inputs, outputs)."""
    return {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
