"""A tiny base and an adapter with all that a run leaves beside it, without the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lowmem_ft.model.base_record import FILE, record_base
from lowmem_ft.model.find import FoundModel
from tests.data.tiny_tokenizers import with_template
from tests.export.adapters import save, with_adapter
from tests.tiny import save_tiny_model, tiny_llama


def trained_in(
    folder: Path,
    adapted: Any = None,
    *,
    model: PreTrainedModel | None = None,
    quantization: str = "nf4",
    dtype: str = "bfloat16",
    precision: str = "fp32",
) -> Path:
    """`folder`/base and `folder`/adapter, with base.json, tokenizer and template. Returns the adapter."""
    base = save_tiny_model(folder / "base", model)
    record = record_base(
        FoundModel(str(base), None, ""),
        model=str(base),
        quantization=quantization,
        double_quant=True,
        dtype=dtype,
        precision=precision,
    )
    adapter = save(adapted or with_adapter(model or tiny_llama(), rank=4), folder / "adapter")
    (adapter / FILE).write_text(record.text())
    with_template("regex", "chatml").save_pretrained(adapter)
    return adapter
