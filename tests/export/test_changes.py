"""Each kind of change is its formula, on all rows and on some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

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

OUT, IN, R = 6, 5, 2


@pytest.fixture
def files(tmp_path: Path) -> TensorFiles:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "m.lora_A.weight": (R, IN),
        "m.lora_B.weight": (OUT, R),
        "m.lora_B.bias": (OUT,),
        "m.lora_magnitude_vector": (OUT,),
        "old.lora_magnitude_vector.weight": (OUT,),
        "m.lora_embedding_A": (R, OUT),
        "m.lora_embedding_B": (IN, R),
        "base_model.vera_A": (R, 9),
        "base_model.vera_B": (9, R),
        "m.vera_lambda_b": (OUT,),
        "m.vera_lambda_d": (R,),
        "m.ia3_l": (OUT, 1),
        "inputs.ia3_l": (1, IN),
        "rows": (2, IN),
    }
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "a.safetensors")
    return TensorFiles(tmp_path / "a.safetensors")


def expected(files: TensorFiles, weight: Tensor) -> list[tuple[Change, Tensor]]:
    t = files.read
    product = t("m.lora_B.weight") @ t("m.lora_A.weight")
    summed = weight + product * 0.5
    dora = t("m.lora_magnitude_vector")[:, None] * summed / summed.norm(dim=1, keepdim=True)
    shared = torch.diag(t("m.vera_lambda_b")) @ t("base_model.vera_B")[:OUT] @ torch.diag(t("m.vera_lambda_d"))
    rows = weight.clone()
    rows[4], rows[1] = t("rows")
    return [
        (LowRank(files, "m", 0.5), summed),
        (LowRank(files, "m", 0.5, dora=True), dora),
        (EmbeddingLowRank(files, "m", 3.0), weight + 3 * (t("m.lora_embedding_B") @ t("m.lora_embedding_A")).T),
        (SharedLowRank(files, "m"), weight + shared @ t("base_model.vera_A")[:, :IN]),
        (Scaled(files, "m"), weight * t("m.ia3_l")),
        (Scaled(files, "inputs"), weight * t("inputs.ia3_l")),
        (RowsReplaced(files, "rows", (4, 1)), rows),
    ]


def test_each_kind_is_its_formula_also_on_some_rows(files: TensorFiles) -> None:
    weight = torch.randn(OUT, IN)
    kinds = expected(files, weight)
    assert len(kinds) == 7
    for change, whole in kinds:
        torch.testing.assert_close(change.ready()(weight, slice(0, OUT)), whole)
        torch.testing.assert_close(change.ready()(weight[2:5], slice(2, 5)), whole[2:5])
        assert all(wanted in (None, size) for wanted, size in zip(change.shape, (OUT, IN), strict=True))


def test_biases_are_scaled_or_added_to(files: TensorFiles) -> None:
    bias = torch.randn(OUT)
    for change, whole in (
        (Scaled(files, "m", of_bias=True), bias * files.read("m.ia3_l").flatten()),
        (Added(files, "m.lora_B.bias", 2.0), bias + 2 * files.read("m.lora_B.bias")),
    ):
        assert change.shape == (OUT,)
        torch.testing.assert_close(change.ready()(bias, slice(0, OUT)), whole)
        torch.testing.assert_close(change.ready()(bias[1:3], slice(1, 3)), whole[1:3])


def test_the_weight_that_is_given_is_left_as_it_is(files: TensorFiles) -> None:
    weight = torch.randn(OUT, IN)
    before = weight.clone()
    for change, _ in expected(files, weight):
        change.ready()(weight, slice(0, OUT))
    assert torch.equal(weight, before)


def test_magnitudes_have_an_old_and_a_new_name(files: TensorFiles) -> None:
    assert magnitude_key(files, "m") == "m.lora_magnitude_vector"
    assert magnitude_key(files, "old") == "old.lora_magnitude_vector.weight"
