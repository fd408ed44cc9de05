"""What is cut from sequences over max_tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem_ft.data.too_long import cut_answer, cut_front, leading_system, split_document, without_first_exchange


def letters(ids: list[int]) -> str:
    """Ids are bytes."""
    return bytes(ids).decode("utf-8", "replace")


@given(length=st.integers(1, 200), max_tokens=st.integers(2, 50))
def test_pieces_of_a_document_are_all_of_it_and_none_is_a_single_token_if_that_can_be_helped(
    length: int, max_tokens: int
) -> None:
    spans = split_document(length, max_tokens)
    assert [index for span in spans for index in span] == list(range(length))
    assert max(map(len, spans)) <= max_tokens
    if max_tokens > 2 and length > 1:
        assert min(map(len, spans)) > 1
    assert len(spans) == -(-length // max_tokens)


@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), data=st.data())
def test_a_cut_answer_is_a_beginning_of_it_in_whole_letters(text: str, data: st.DataObject) -> None:
    ids = [*b"Q:", *text.encode(), 0]
    weights = [0.0, 0.0] + [1.0] * (len(ids) - 2)
    max_tokens = data.draw(st.integers(2, len(ids) - 1))
    kept, kept_weights = cut_answer(ids, weights, max_tokens, letters)
    assert len(kept) == len(kept_weights) <= max_tokens
    if kept:
        answer = letters(kept)[2:]
        assert text.startswith(answer)
        assert len(kept) > max_tokens - 4 or "\ufffd" in text


def test_a_cut_that_leaves_no_answer_leaves_nothing() -> None:
    assert cut_answer([1, 2, 3, 4], [0.0, 0.0, 0.0, 1.0], 2, letters) == ([], [])


@pytest.mark.parametrize(
    ("max_tokens", "keep", "expected"),
    [(5, 1, [0, 4, 5, 6, 7]), (4, 1, [0, 5, 6, 7]), (3, 1, None), (4, 0, [4, 5, 6, 7]), (3, 0, None)],
)
def test_the_front_of_the_prompt_goes_and_one_position_before_the_answer_stays(
    max_tokens: int, keep: int, expected: list[int] | None
) -> None:
    ids, weights = list(range(8)), [0.0] * 5 + [1.0] * 3
    found = cut_front(ids, weights, max_tokens, keep, lambda ids: "x")
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == expected
        assert found[1][-3:] == [1.0] * 3
        assert len(found[1]) == len(expected)


def test_exchanges_go_from_the_front_and_weights_move_with_their_turns() -> None:
    roles = ["system", "user", "assistant", "tool", "user", "assistant", "user"]
    messages = [{"role": role, "content": str(index)} for index, role in enumerate(roles)]
    assert leading_system(messages) == 1
    shorter = without_first_exchange(messages, {2: 0.5, 5: 2.0})
    assert shorter is not None
    assert [message["content"] for message in shorter[0]] == ["0", "4", "5", "6"]
    assert shorter[1] == {2: 2.0}
    assert without_first_exchange(*shorter) is None
