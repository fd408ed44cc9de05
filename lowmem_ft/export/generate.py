"""Try a run: one prompt, answered by the trained model and by the base beside it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.model.find import FoundModel, fetch_weights, find_model
from lowmem_ft.recipe.load import load_recipe
from lowmem_ft.recipe.schema import Recipe


def generate(run: Path, prompt: str, *, system: str | None = None, max_new_tokens: int = 256) -> tuple[str, str]:
    """Answer `prompt` greedily, with the chat template and the quantization of the run.

    Args:
        run: a run folder.
        prompt: what the user says.
        system: system message, if any.
        max_new_tokens: longest answer.

    Returns:
        The answers of base plus adapter, and of the base alone.

    Raises:
        ModelError: the folder holds no run, or its adapter does not load.
    """
    from peft import PeftModel

    from lowmem_ft.data.template import make_encoder
    from lowmem_ft.model.generate import generate_answers
    from lowmem_ft.model.load import load_model
    from lowmem_ft.model.tokenizer import load_tokenizer

    recipe = _recipe_of(run)
    found = find_model(recipe.model.path, recipe.model.revision)
    fetch_weights(found)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    saved = FoundModel(str(run / "adapter"), None, "saved with the adapter")
    tokenizer = load_tokenizer(saved, recipe.model.trust_remote_code)
    encoder = make_encoder(tokenizer, template=None, max_tokens=recipe.data.max_tokens)
    base = load_model(
        found,
        quantization=recipe.model.quantization,
        double_quant=recipe.model.double_quant,
        dtype=recipe.model.dtype,
        device=str(device),
        trust_remote_code=recipe.model.trust_remote_code,
    )
    model = PeftModel.from_pretrained(base, run / "adapter")
    messages = [{"role": "system", "content": system}] if system else []
    ids = encoder.encode_prompt([*messages, {"role": "user", "content": prompt}])
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = dtypes[recipe.train.precision]
    answers = []
    for adapter_off in (nullcontext(), model.disable_adapter()):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32), adapter_off:
            (answer,) = generate_answers(
                model, tokenizer, [ids], [""], encoder.stop_token_ids, max_new_tokens=max_new_tokens, device=device
            )
        answers.append(answer.text)
    return answers[0], answers[1]


def _recipe_of(run: Path) -> Recipe:
    if not (run / "recipe.yaml").is_file() or not (run / "adapter").is_dir():
        names = sorted(entry.name for entry in run.iterdir())[:6] if run.is_dir() else []
        what = f"holds no finished run (recipe.yaml and adapter/), only: {', '.join(names) or 'nothing'}"
        raise ModelError(Problem(str(run), what, "Name the run folder that the end of a run printed"))
    return load_recipe(run / "recipe.yaml").recipe
