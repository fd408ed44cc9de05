"""Tiny models made in code, of the real classes, for the tests of every part. No download, no file but tmp_path's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

from lowmem_ft.model.adapters import AdapterReport, AdapterSettings, add_adapters

transformers_logging.disable_progress_bar()  # so that what a test captures is what the program printed

VOCABULARY = 448

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Grouped heads, tied embeddings unless told otherwise."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**_SMALL, "tie_word_embeddings": True, **changes})).eval()


def tiny_gemma3(seed: int = 0, window: int = 8, **changes: Any) -> Gemma3ForCausalLM:
    """Sliding and full layers in turn, so that examples longer than the window need a mask."""
    torch.manual_seed(seed)
    settings = {**_SMALL, "sliding_window": window, "query_pre_attn_scalar": 16, **changes}
    layers = [["sliding_attention", "full_attention"][i % 2] for i in range(settings["num_hidden_layers"])]
    return Gemma3ForCausalLM(Gemma3TextConfig(**settings, layer_types=layers)).eval()


def tiny_qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Norms on queries and keys, untied head."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**_SMALL, "tie_word_embeddings": False, **changes})).eval()


def tiny_gpt2(seed: int = 0, **changes: Any) -> GPT2LMHeadModel:
    """Learned positions, Conv1D layers, no dropout."""
    torch.manual_seed(seed)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **none, **ids, **changes})).eval()


def tiny_moe(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    """Four experts in 3-D parameters, two at a time; untied head."""
    torch.manual_seed(seed)
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**_SMALL, **experts, **changes})).eval()


FAMILIES = {"llama": tiny_llama, "gemma3": tiny_gemma3, "qwen3": tiny_qwen3, "gpt2": tiny_gpt2}


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: str | list[str] = "all-linear",
    autocast: bool = True,
) -> tuple[PeftModel, AdapterReport]:
    """`add_adapters` with LoRA and nothing beside it."""
    settings = AdapterSettings(rank=rank, alpha=alpha, dropout=dropout, targets=targets)
    return add_adapters(model, settings, autocast=autocast)


def save_tiny_model(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """A folder as `save_pretrained` leaves it, with the tokenizer of `tests.data.tiny_tokenizers`."""
    from tests.data.tiny_tokenizers import with_template

    (model or tiny_llama()).save_pretrained(folder)
    with_template("regex", "chatml").save_pretrained(folder)
    return folder
