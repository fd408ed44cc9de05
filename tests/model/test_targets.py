"""Names, expressions and layers: what they match, and what matches nothing."""

from __future__ import annotations

import pytest

from lowmem_ft.errors import ModelError
from lowmem_ft.model.targets import TargetMatch, find_targets, format_layers, match_names, values_by_module
from tests.tiny import tiny_gpt2, tiny_llama


def test_all_linear_is_all_but_the_head_with_a_row_for_each_name() -> None:
    found = find_targets(tiny_llama(num_hidden_layers=3), "all-linear")
    assert len(found.modules) == 21
    assert found.table[0] == TargetMatch("q_proj", 3, (0, 1, 2))
    assert found.warnings == ()


def test_an_expression_between_slashes_is_searched_in_full_names() -> None:
    found = find_targets(tiny_llama(num_hidden_layers=4), [r"/layers\.[0-2]\..*[qv]_proj$/", "mlp.up_proj"])
    assert found.table == (
        TargetMatch(r"/layers\.[0-2]\..*[qv]_proj$/", 6, (0, 1, 2)),
        TargetMatch("mlp.up_proj", 4, (0, 1, 2, 3)),
    )
    assert found.modules[:2] == ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")


def test_layers_count_from_both_ends() -> None:
    found = find_targets(tiny_llama(num_hidden_layers=4), "all-linear", [0, -1])
    assert {row.layers for row in found.table} == {(0, 3)}
    assert find_targets(tiny_gpt2(), ["c_attn"], [1]).modules == ("transformer.h.1.attn.c_attn",)
    with pytest.raises(ModelError, match=r"there is no layer 4, -5. The model has 4: 0 to 3, or -1 for the last"):
        find_targets(tiny_llama(num_hidden_layers=4), "all-linear", [4, -5])


def test_a_name_outside_the_chosen_layers_matches_nothing() -> None:
    with pytest.raises(ModelError, match="lm_head matches no linear layer"):
        find_targets(tiny_llama(tie_word_embeddings=False), ["q_proj", "lm_head"], [0])


def test_uneven_coverage_is_a_warning() -> None:
    model = tiny_llama(num_hidden_layers=3)
    del model.model.layers[1].self_attn.q_proj
    found = find_targets(model, ["q_proj", "v_proj"])
    assert found.warnings == ("q_proj is in 2 of 3 layers only: 0, 2",)
    del model.model.layers[2].self_attn, model.model.layers[2].mlp
    assert find_targets(model, "all-linear").warnings == ("no linear layer in blocks 2: they get no adapter",)


def test_all_that_matches_nothing_is_reported_at_once_with_near_names() -> None:
    with pytest.raises(ModelError) as error:
        find_targets(tiny_llama(), ["q_porj", "/wqkv/", "/(/", "v_proj"])
    texts = [str(problem) for problem in error.value.problems]
    assert texts[0].startswith("adapter.targets: q_porj matches no linear layer. Write q_proj. There are: down_proj")
    assert texts[1].startswith("adapter.targets: /wqkv/ matches no linear layer. There are:")
    assert texts[2].startswith("adapter.targets: /(/ is no regular expression: missing )")
    with pytest.raises(ModelError, match=r'"q_proj" is not all-linear. Write targets: \[q_proj\]'):
        find_targets(tiny_llama(), "q_proj")


def test_a_tied_head_is_refused_and_a_head_of_its_own_is_not() -> None:
    with pytest.raises(ModelError) as error:
        find_targets(tiny_llama(), ["q_proj", "lm_head"])
    assert "lm_head shares its weight with model.embed_tokens, which merging would change" in str(error.value)
    assert find_targets(tiny_llama(tie_word_embeddings=False), ["lm_head"]).table == (TargetMatch("lm_head", 1, ()),)


def test_values_of_patterns_may_overlap_only_where_they_agree() -> None:
    modules = ["a.0.q_proj", "a.1.q_proj", "a.0.v_proj"]
    assert values_by_module("x", {"q_proj": 2, "/0/": 2}, modules) == dict.fromkeys(modules, 2)
    with pytest.raises(ModelError, match=r"x: q_proj and /0/ give a.0.q_proj different values"):
        values_by_module("x", {"q_proj": 2, "/0/": 3}, modules)
    with pytest.raises(ModelError, match=r"x: k_proj matches no thing. Write q_proj"):
        match_names("x", ["k_proj"], modules[:2], "thing")


@pytest.mark.parametrize(("layers", "text"), [([], ""), ([0], "0"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")])
def test_layers_in_words(layers: list[int], text: str) -> None:
    assert format_layers(layers) == text
