"""The tokenizer beside a model."""

from __future__ import annotations

from typing import Any

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.model.find import FoundModel


def load_tokenizer(found: FoundModel, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside the model.

    Raises:
        ModelError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            found.path, revision=found.revision, trust_remote_code=trust_remote_code, clean_up_tokenization_spaces=False
        )
    except (ValueError, OSError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        instead = "Copy tokenizer.json and tokenizer_config.json of the model into the folder"
        raise ModelError(Problem(found.path, f"has no tokenizer that can be read: {reason}", instead)) from error
