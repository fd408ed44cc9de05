"""What a run trains on, as short texts: equal where model and data are the same, wherever they lie."""

from __future__ import annotations

import torch
import xxhash
from torch import nn

from lowmem_ft.data.dataset import Split

_SAMPLE_BYTES = 4096


def digests(model: nn.Module, train: Split) -> dict[str, str]:
    """Of the frozen weights and of the training data."""
    return {"base model": base_digest(model), "training data": data_digest(train)}


def data_digest(split: Split) -> str:
    """Hash of all ids, weights and their order, and how often each source is drawn. Reads the tokens once, 1 s a GB."""
    digest = xxhash.xxh3_128(repr(split.weights).encode())
    with (split.tokens.folder / "examples.arrow").open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


@torch.no_grad()
def base_digest(model: nn.Module) -> str:
    """Hash of name, type, shape, and the first and last 4 kB of every frozen weight.

    Two models that differ only in the middle of a weight look alike to it; another model, another quantization or
    another cast does not. Weights on the meta device count by shape only.
    """
    digest = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            continue
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        if parameter.device.type != "meta" and parameter.numel():
            flat = parameter.detach().reshape(-1)
            most = max(1, _SAMPLE_BYTES // flat.element_size())
            for part in (flat[:most], flat[-most:]):
                digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
