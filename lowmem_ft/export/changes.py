"""What an adapter does to one weight, by its kind: each can be done to some of the weight's rows alone.

Weights are seen as (outputs, inputs). So a large weight is merged in pieces. Sums and products are in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lowmem_ft.model.tensor_files import TensorFiles

RowsChange = Callable[[Tensor, slice], Tensor]
"""From float32 rows of a weight and which rows they are to these rows changed."""


Shape = tuple[int | None, ...]
"""Of a weight that a change can be made to, as (outputs, inputs); None where any number will do."""


class Change(Protocol):
    """What happens to one parameter."""

    @property
    def shape(self) -> Shape:
        """Of the weights that it fits."""

    def ready(self) -> RowsChange:
        """Read what is needed, and give the function that changes rows."""


@dataclass(frozen=True)
class LowRank:
    """`W + scale * B A`, with a trained length of each row if there is a magnitude. R is the rank.

    Attributes:
        files: of the adapter.
        module: key of the module in it.
        scale: of the product.
        dora: has a magnitude.

    Source: Hu et al. 2021, arXiv:2106.09685; DoRA: Liu et al. 2024, arXiv:2402.09353.
    """

    files: TensorFiles
    module: str
    scale: float
    dora: bool = False

    @property
    def shape(self) -> Shape:
        """Of the weights that it fits."""
        a, b = (self.files[f"{self.module}.lora_{side}.weight"].shape for side in "AB")
        return b[0], a[1]

    def ready(self) -> RowsChange:
        """A is (R, inputs), B (outputs, R), the magnitude (outputs)."""
        a, b = (self.files.read(f"{self.module}.lora_{side}.weight").float() for side in "AB")
        magnitude = self.files.read(magnitude_key(self.files, self.module)).float() if self.dora else None

        def change(weight: Tensor, rows: slice) -> Tensor:
            changed = weight + (b[rows] @ a) * self.scale
            if magnitude is None:
                return changed
            return (magnitude[rows] / torch.linalg.norm(changed, dim=1)).view(-1, 1) * changed

        return change


@dataclass(frozen=True)
class EmbeddingLowRank:
    """`W + scale * (B A)^T` of an embedding: A is (R, V), B (H, R), W (V, H)."""

    files: TensorFiles
    module: str
    scale: float

    @property
    def shape(self) -> Shape:
        """Of the weights that it fits."""
        a, b = (self.files[f"{self.module}.lora_embedding_{side}"].shape for side in "AB")
        return a[1], b[0]

    def ready(self) -> RowsChange:
        """See the class."""
        a, b = (self.files.read(f"{self.module}.lora_embedding_{side}").float() for side in "AB")
        return lambda weight, rows: weight + (b @ a[:, rows]).T * self.scale


@dataclass(frozen=True)
class SharedLowRank:
    """VeRA: `W + diag(b) B diag(d) A`, where all layers share A and B and use as much of them as they need.

    Source: Kopiczko et al. 2023, arXiv:2310.11454.
    """

    files: TensorFiles
    module: str

    @property
    def shape(self) -> Shape:
        """Of the weights that it fits."""
        return self.files[f"{self.module}.vera_lambda_b"].shape[0], None

    def ready(self) -> RowsChange:
        """A is (R, widest input), B (widest output, R), d (R), b (outputs)."""
        a, b = (self.files.read(f"base_model.vera_{side}").float() for side in "AB")
        scale_b, scale_d = (self.files.read(f"{self.module}.vera_lambda_{side}").float() for side in "bd")

        def change(weight: Tensor, rows: slice) -> Tensor:
            left = scale_b[rows].unsqueeze(-1) * b[: scale_b.shape[0]][rows]
            return weight + left @ (scale_d.unsqueeze(-1) * a[:, : weight.shape[1]])

        return change


@dataclass(frozen=True)
class Scaled:
    """IA3: a weight times a number for each output, (outputs, 1), or for each input, (1, inputs); or a bias likewise.

    Source: Liu et al. 2022, arXiv:2205.05638.
    """

    files: TensorFiles
    module: str
    of_bias: bool = False

    @property
    def shape(self) -> Shape:
        """Of the weights that it fits."""
        outputs, inputs = self.files[f"{self.module}.ia3_l"].shape
        if self.of_bias:
            return (outputs,)
        return (outputs, None) if inputs == 1 else (None, inputs)

    def ready(self) -> RowsChange:
        """See the class."""
        scales = self.files.read(f"{self.module}.ia3_l").float()
        if self.of_bias:
            scales = scales.flatten()
        each_row = self.of_bias or scales.shape[1] == 1
        return lambda weight, rows: weight * (scales[rows] if each_row else scales)


@dataclass(frozen=True)
class Added:
    """A number added to each element of a bias: LoRA's own bias, scaled."""

    files: TensorFiles
    key: str
    scale: float

    @property
    def shape(self) -> Shape:
        """Of the weights that it fits."""
        return self.files[self.key].shape

    def ready(self) -> RowsChange:
        """See the class."""
        bias = self.files.read(self.key).float()
        return lambda weight, rows: weight + bias[rows] * self.scale


@dataclass(frozen=True)
class RowsReplaced:
    """Rows of an embedding that were trained: those of `tokens`, in this order."""

    files: TensorFiles
    key: str
    tokens: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        """Of the weights that it fits."""
        return None, self.files[self.key].shape[1]

    def ready(self) -> RowsChange:
        """See the class."""
        trained = self.files.read(self.key).float()

        def change(weight: Tensor, rows: slice) -> Tensor:
            weight = weight.clone()
            for index, token in enumerate(self.tokens):
                if rows.start <= token < rows.stop:
                    weight[token - rows.start] = trained[index]
            return weight

        return change


def magnitude_key(files: TensorFiles, module: str) -> str:
    """Its name before and since peft 0.12."""
    old = f"{module}.lora_magnitude_vector.weight"
    return old if old in files else f"{module}.lora_magnitude_vector"
