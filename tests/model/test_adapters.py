"""Adapters: where they go, how many weights they train, what they are after a reload, and names that match nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from lowmem_ft.errors import ModelError
from lowmem_ft.model.adapters import AdapterReport, AdapterSettings, Kind, add_adapters, unused_settings
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.gradient_flow import check_gradient_flow
from lowmem_ft.model.kbit import prepare_for_kbit_training
from lowmem_ft.model.load import load_model
from lowmem_ft.recipe.adapter_section import AdapterSection
from tests.tiny import add_lora, tiny_gpt2, tiny_llama


def test_all_linear_is_every_linear_but_the_head() -> None:
    model, report = add_lora(tiny_llama(), rank=4, alpha=8)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert report.layers == dict.fromkeys(names, 2)
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    assert report.trainable_parameters == 2 * sum(4 * (i + o) for i, o in sizes)
    assert report.trainable_bytes == report.trainable_parameters * 4
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_the_start_answers_as_the_base() -> None:
    ids = torch.arange(3, 20)[None]
    expected = tiny_llama()(input_ids=ids).logits
    model, _ = add_lora(tiny_llama(), rank=4, alpha=8)
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_named_targets_match_whole_last_parts() -> None:
    _, report = add_lora(tiny_llama(), rank=4, alpha=8, targets=["q_proj", "down_proj"])
    assert report.layers == {"q_proj": 2, "down_proj": 2}
    _, report = add_lora(tiny_gpt2(), rank=4, alpha=8, targets=["c_attn"])
    assert report.layers == {"c_attn": 2}


def test_alpha_may_be_any_number() -> None:
    model, _ = add_lora(tiny_llama(), rank=4, alpha=2.5)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 2.5 / 4


def test_names_that_match_nothing_are_all_reported_with_near_ones() -> None:
    with pytest.raises(ModelError) as error:
        add_lora(tiny_llama(), rank=4, alpha=8, targets=["q_porj", "v_proj", "wqkv"])
    assert len(error.value.problems) == 2
    text = str(error.value)
    assert "adapter.targets: q_porj matches no linear layer. Write q_proj. There are: down_proj" in text
    assert "wqkv matches no linear layer. There are:" in text


KINDS: tuple[Kind, ...] = ("lora", "dora", "rslora", "vera", "ia3")
IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A tied and an untied model on disk."""
    found = {}
    for tied in (True, False):
        found[tied] = tmp_path_factory.mktemp("tied" if tied else "untied")
        tiny_llama(tie_word_embeddings=tied).save_pretrained(found[tied])
    return found


def _load(folder: Path, quantization: str) -> Any:
    found = FoundModel(str(folder), None, "made here")
    return prepare_for_kbit_training(load_model(found, quantization=quantization))


def _logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=IDS).logits.float()


def _train(model: Any, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _check_round_trip(folder: Path, quantization: str, settings: AdapterSettings, out: Path) -> AdapterReport:
    """Trains, and reloads on the base as it is on disk with equal logits."""
    base = _load(folder, quantization)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    expected = _logits(base)
    model, report = add_adapters(base, settings)
    start = _logits(model)
    # dora, vera and ia3 compute on the base's outputs, some in fp32: one rounding of bf16 logits below 1
    assert (start - expected).abs().max() <= (0 if settings.kind in ("lora", "rslora") else 2**-7)
    assert check_gradient_flow(model, {"input_ids": IDS, "labels": IDS}).zero == ()
    _train(model)
    trained = _logits(model)
    assert (trained - start).abs().max() > 0.005
    with model.disable_adapter():
        # vera hands on fp32 where its input was fp32, even when it is off
        assert (_logits(model) - expected).abs().max() <= (2**-7 if settings.kind == "vera" else 0)
    model.save_pretrained(str(out), save_embedding_layers=False)
    again = _load(folder, quantization)
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())
    assert torch.equal(_logits(PeftModel.from_pretrained(again, str(out))), trained)
    return report


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_and_reloads_with_equal_logits(
    folders: dict[bool, Path], kind: Kind, quantization: str, tmp_path: Path
) -> None:
    settings = AdapterSettings(kind=kind) if kind in ("ia3", "vera") else AdapterSettings(kind=kind, rank=4, alpha=8)
    if (kind, quantization) == ("dora", "int8"):
        with pytest.raises(ModelError, match="dora needs the lengths of the base's weights, and peft cannot read int8"):
            add_adapters(_load(folders[True], quantization), settings)
        return
    report = _check_round_trip(folders[True], quantization, settings, tmp_path)
    assert report.trainable_bytes == report.trainable_parameters * 4
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    per_layer = {
        "lora": sum(4 * (i + o) for i, o in sizes),
        "rslora": sum(4 * (i + o) for i, o in sizes),
        "dora": sum(4 * (i + o) + o for i, o in sizes),
        "vera": sum(16 + o for _, o in sizes),
        "ia3": sum(o for _, o in sizes),
    }
    assert report.trainable_parameters == 2 * per_layer[kind]


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_patterns_layers_and_whole_modules_are_honoured_and_reload(
    folders: dict[bool, Path], quantization: str, tmp_path: Path
) -> None:
    settings = AdapterSettings(
        rank=4,
        alpha=8,
        targets=["/[qk]_proj$/", "down_proj"],
        layers=[-1],
        rank_pattern={"down_proj": 2},
        alpha_pattern={"/q_proj/": 2.5},
        modules_to_save=["lm_head"],
    )
    report = _check_round_trip(folders[False], quantization, settings, tmp_path)
    assert report.layers == {"q_proj": 1, "k_proj": 1, "down_proj": 1}
    assert [(row.name, row.matches, row.layers) for row in report.table] == [
        ("/[qk]_proj$/", 2, (1,)),
        ("down_proj", 1, (1,)),
    ]
    assert report.trainable_parameters == 4 * 128 + 4 * 96 + 2 * 192 + 448 * 64
    assert report.others == ("lm_head whole",)
    model, _ = add_adapters(tiny_llama(tie_word_embeddings=False), settings)
    layer = model.get_base_model().model.layers[1]
    assert layer.self_attn.q_proj.scaling["default"] == 2.5 / 4
    assert layer.self_attn.k_proj.scaling["default"] == 2
    assert layer.mlp.down_proj.scaling["default"] == 4


@pytest.mark.parametrize("tied", [True, False])
def test_single_tokens_train_and_reload(folders: dict[bool, Path], tied: bool, tmp_path: Path) -> None:
    settings = AdapterSettings(rank=4, alpha=8, trainable_tokens=[5, 7])
    report = _check_round_trip(folders[tied], "nf4", settings, tmp_path)
    assert report.others == ("2 rows of the embedding",)


def test_whole_modules_train_in_fp32_whatever_the_base() -> None:
    base = tiny_llama(tie_word_embeddings=False).bfloat16().requires_grad_(False)
    model, report = add_adapters(base, AdapterSettings(rank=4, modules_to_save=["lm_head"]))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert report.trainable_bytes == 4 * report.trainable_parameters


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (AdapterSettings(kind="ia3", rank=4, dropout=0.1), ["ia3 has no rank", "ia3 has no dropout"]),
        (AdapterSettings(kind="vera", alpha=4), ["adapter.alpha: vera has no alpha"]),
        (AdapterSettings(modules_to_save=["lm_head"]), ["lm_head shares its weight with model.embed_tokens"]),
        (AdapterSettings(modules_to_save=["q_proj"]), ["q_proj is among the targets too"]),
        (AdapterSettings(modules_to_save=["nrom"]), ["nrom matches no module. Write norm"]),
        (AdapterSettings(trainable_tokens=[448]), ["there is no token 448. The embedding has rows 0 to 447"]),
        (AdapterSettings(rank_pattern={"w": 1}), ["adapter.rank_pattern: w matches no layer with an adapter"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings: AdapterSettings, words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        add_adapters(tiny_llama(), settings)
    assert all(word in str(error.value) for word in words)


def test_a_quantized_module_cannot_train_whole(folders: dict[bool, Path]) -> None:
    settings = AdapterSettings(targets=["q_proj"], modules_to_save=["down_proj"])
    with pytest.raises(
        ModelError, match=r"down_proj is quantized, and cannot train whole. Write targets: \[down_proj\]"
    ):
        add_adapters(_load(folders[True], "nf4"), settings)


def test_settings_are_those_of_the_recipe() -> None:
    assert AdapterSettings(**AdapterSection().model_dump()) == AdapterSettings()
    for kind in KINDS:
        for name in unused_settings(kind):
            other = {"rank": 3, "alpha": 3.0, "dropout": 0.5, "trainable_tokens": [1]}.get(name, {"q_proj": 2})
            with pytest.raises(ValueError, match=f"{kind} has no {name}"):
                AdapterSection(kind=kind, **{name: other})  # type: ignore[arg-type]
