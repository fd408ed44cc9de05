"""The measures are their formulas, and an export that lost what was trained is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowmem_ft.errors import ExportError
from lowmem_ft.export.opened import open_subject
from lowmem_ft.export.subject import find_subject
from lowmem_ft.export.verify import (
    FLOOR,
    Comparison,
    check,
    compare,
    make_reference,
    predictions,
    refusal,
)
from tests.export.trained import trained_in


def logs(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row).log()[None] for row in rows]


def test_the_measures_are_their_formulas() -> None:
    first, second = logs([0.5, 0.5, 1e-9], [0.9, 0.1, 1e-9]), logs([0.25, 0.75, 1e-3], [0.9, 0.1, 1e-9])
    found = compare("x", first, second, changed=0.5)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.kl == pytest.approx(kl / 2, rel=1e-4)
    assert found.lost == pytest.approx(kl, rel=1e-4)
    assert (found.positions, found.same_top) == (2, 0.5)
    assert found.largest == pytest.approx(math.log(2)), "the third token is too unlikely to count"
    assert "loses" in found.lines()[0]


def test_equal_models_lose_nothing_and_other_vocabularies_are_refused() -> None:
    first = logs([0.5, 0.5])
    assert compare("x", first, first).kl == 0
    with pytest.raises(ExportError, match="one has 2 tokens and the other 3"):
        compare("x", first, logs([0.2, 0.3, 0.5]))


@pytest.mark.parametrize(
    ("kl", "changed", "refused"),
    [
        (0.01, 1.0, False),
        (0.2, 1.0, True),
        (FLOOR, 1e-9, False),
        (2 * FLOOR, 0.0, True),
        (1.0, None, False),
        (math.nan, 1.0, True),
    ],
)
def test_what_is_lost_beyond_the_bound_is_refused(kl: float, changed: float | None, refused: bool) -> None:
    assert (refusal(Comparison("x", 1, kl, 1, 0, changed), 0.05) is not None) == refused


def test_predictions_are_those_of_the_model_behind_each_prompt(tmp_path: Path) -> None:
    opened = open_subject(find_subject(trained_in(tmp_path)), exact=True)
    reference = make_reference("x", opened, [[1, 5, 3, 9], [1, 7]], 0.05)
    assert [passage.start for passage in reference.passages] == [4, 2]
    for passage, found in zip(reference.passages, predictions(opened, reference.passages), strict=True):
        with opened.running():
            logits = opened.model(torch.tensor([passage.ids])).logits[0]
        expected = F.log_softmax(logits[passage.start - 1 : -1], -1)
        torch.testing.assert_close(found, expected)
        assert len(found) == len(passage.ids) - passage.start > 0
    assert reference.changed is not None
    assert reference.changed > 0.01
    itself = reference.against(opened)
    assert (itself.kl, itself.same_top, itself.lost) == (0, 1, 0)
    assert itself.same_texts == itself.texts == 2


def test_the_base_alone_loses_all_and_force_lets_it_pass(tmp_path: Path) -> None:
    subject = find_subject(trained_in(tmp_path, quantization="none", dtype="float32"))
    reference = make_reference("trained", open_subject(subject, exact=True), [[1, 5, 3, 9]], 0.05)
    base = open_subject(find_subject(tmp_path / "base"), exact=True)
    said: list[str] = []
    with pytest.raises(ExportError, match="100% of what training changed is lost, and at most 5% may be"):
        check([reference], base, False, said.append)
    record: dict[str, Any] = check([reference], base, True, said.append)["trained"]
    assert record["lost"] == pytest.approx(1, rel=1e-3)
    assert any("accepted by --force" in line for line in said)
