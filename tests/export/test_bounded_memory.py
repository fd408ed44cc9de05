"""A model larger than the memory that a process may have merges in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.export.adapters import save, with_adapter
from tests.tiny import tiny_llama

LIMITED = """
import resource, sys
import torch
from pathlib import Path
from lowmem_ft.export.adapter_weights import read_adapter
from lowmem_ft.export.merge import MergedWeights
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.tensor_files import write_tensor_files
base, adapter, out, extra = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
weights = MergedWeights(FoundModel(str(base), None, ""), read_adapter(adapter), dtype=torch.bfloat16)
status = dict(line.split(":") for line in open("/proc/self/status"))
limit = int(status["VmData"].split()[0]) * 1024 + extra
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
write_tensor_files(out, weights.specs, weights.tensor, 1 << 40)
try:
    torch.empty((base / "model.safetensors").stat().st_size, dtype=torch.uint8)
    print("the limit does not bind")
except RuntimeError:
    print("the model does not fit")
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA bounds allocations on Linux only")
def test_a_model_larger_than_the_limit_on_memory_merges(tmp_path: Path) -> None:
    model = tiny_llama(hidden_size=768, intermediate_size=4096, num_hidden_layers=8, head_dim=192)
    model.save_pretrained(tmp_path / "base")
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    adapter = save(with_adapter(model, rank=4), tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    extra = size // 2
    command = [sys.executable, "-c", LIMITED, *map(str, (tmp_path / "base", adapter, tmp_path / "out", extra))]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == "the model does not fit"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0.49 * size
    assert size > 300_000_000
