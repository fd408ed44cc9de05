"""The header's lines, as numbers that can be checked."""

from __future__ import annotations

from typing import Any

from lowmem_ft.data.audit import Audit, SplitAudit
from lowmem_ft.data.batches import Batch
from lowmem_ft.model.adapters import AdapterReport
from lowmem_ft.model.targets import TargetMatch
from lowmem_ft.report.summary import adapter_line, batch_line, data_line, model_line, score_row

MIB = 2**20


def split_audit(**changes: Any) -> SplitAudit:
    """An audit of 10 records, 2 left out."""
    nothing: dict[str, Any] = {"left_out": (), "in_part": (), "percentiles": (), "bars": (), "shown": ()}
    counts = {"records": 10, "kept": 8, "sequences": 8, "tokens": 1000, "trained_tokens": 250, "longest_tokens": 300}
    rest = {"ended": 8, "begun": 8, "begun_twice": 0, "unknown_tokens": 0, "duplicates": 0}
    return SplitAudit(**{"setting": "data.train", **nothing, **counts, **rest, **changes})


def test_model_parts_add_up_to_the_total_and_empty_ones_are_left_out() -> None:
    line = model_line("m", 135_000_000, "nf4", [("linears", 50 * MIB), ("embeddings", 54 * MIB), ("head", 0)], 54 * MIB)
    assert line == ("m, 135 M weights in nf4: 104 MiB (linears 50.0 MiB, embeddings 54.0 MiB); fp32 casts add 54.0 MiB")
    assert "casts" not in model_line("m", 10, "none", [("x", 1)], 0)


def test_the_trained_share_is_of_all_weights() -> None:
    report = AdapterReport({"q_proj": 2, "v_proj": 2}, 1_000, 4_000)
    assert adapter_line("lora", 4, 9_000, report) == (
        "lora rank 4: 1,000 of 10,000 weights (10.00%), 3.91 KiB in fp32, on 2 q_proj, 2 v_proj"
    )


def test_layers_are_said_once_where_all_names_share_them_else_name_by_name() -> None:
    rows = (TargetMatch("q_proj", 2, (0, 1)), TargetMatch("/up/", 1, (1,)), TargetMatch("lm_head", 1, ()))
    report = AdapterReport({"q_proj": 2}, 1_000, 4_000, rows[:1], (), ("lm_head whole",))
    assert adapter_line("lora", 4, 9_000, report).endswith(" in fp32, on 2 q_proj in layers 0-1; lm_head whole")
    line = adapter_line("ia3", 4, 9_000, AdapterReport({"q_proj": 2, "up_proj": 1, "lm_head": 1}, 1_000, 4_000, rows))
    assert line.startswith("ia3: 1,000 of 10,000 weights")
    assert line.endswith("1 lm_head; q_proj matches 2 in layers 0-1; /up/ matches 1 in layers 1; lm_head matches 1")


def test_left_out_records_are_counted_in_the_data_line() -> None:
    audit = Audit(split_audit(), None, 0, "", "")
    assert data_line(audit) == "8 examples, 2 left out, 1,000 tokens, 250 trained (25%); no held-out examples"
    whole = Audit(split_audit(records=8), split_audit(kept=3), 0, "", "")
    assert data_line(whole) == "8 examples, 1,000 tokens, 250 trained (25%); 3 held-out examples"


def test_a_step_is_micro_batches_times_accumulation() -> None:
    line = batch_line(Batch(16, 2.0, 1024, 57, 1.0, 1, None))
    assert line == (
        "16 examples a step = 8 in a micro-batch (at most 1,024 tokens, no padding) x 2 accumulated, on average; "
        "57 steps, 1.00 epochs"
    )
    assert "= 6.4 in a micro-batch" in batch_line(Batch(16, 2.5, 1024, 57, 1.0, 1, None))
    assert "(at most 1,024 tokens, filled up to a multiple of 64)" in batch_line(
        Batch(16, 2.5, 1024, 57, 1.0, 64, None)
    )


def test_exact_answers_are_a_share_and_other_metrics_a_number() -> None:
    row = score_row("exact_match", [0.0, 0.5, 0.96], 50)
    assert row == ("exact answers", "0% before, 96% after, of 50 held-out prompts")
    assert score_row("mine", [-12.5, 0.33333], 5) == ("mine", "-12.5 before, 0.3333 after, on 5 held-out prompts")
