"""A conversation has its history in the template, streams its answers, and obeys its commands."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from lowmem_ft.data.template import make_encoder
from lowmem_ft.errors import DataError
from lowmem_ft.export.chat import COMMANDS, Chat, Sampling
from lowmem_ft.export.generate import generate
from lowmem_ft.export.opened import Opened, open_subject
from lowmem_ft.export.subject import find_subject
from tests.data.tiny_tokenizers import with_template
from tests.export.trained import trained_in

SHORT = Sampling(max_new_tokens=5)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_subject(find_subject(trained_in(tmp_path_factory.mktemp("chat"))))


def talk(opened: Opened, *lines: str, sampling: Sampling = SHORT) -> tuple[Chat, list[str]]:
    written: list[str] = []
    chat = Chat(opened, written.append, sampling)
    chat.run(f"{line}\n" for line in lines)
    return chat, written


def text(written: list[str]) -> str:
    return "".join(written)


def test_the_answer_is_that_of_generate_and_comes_in_pieces(tmp_path: Path) -> None:
    adapter = trained_in(tmp_path)
    trained, base = generate(adapter, "hello", max_new_tokens=5)
    chat, written = talk(open_subject(find_subject(adapter)), "hello", "/base")
    assert [turn["content"] for turn in chat.turns] == ["hello", trained]
    assert text(written) == f"{trained}\n[the base answers too]\nbase:  {base}\n"
    assert trained != base
    assert len(written) > 4, "not all at once"


def test_the_history_is_in_the_template(opened: Opened) -> None:
    chat, _ = talk(opened, "/system be kind", "hello", "and you?")
    asked = [{"role": "system", "content": "be kind"}, *chat.turns[:3]]
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant", "user", "assistant"]
    prompts: list[list[int]] = []
    again = Chat(opened, lambda _: None, SHORT, system="be kind", turns=list(chat.turns[:2]))
    original = opened.encoder.encode_prompt

    class Spy:
        template_text = opened.encoder.template_text
        stop_token_ids = opened.encoder.stop_token_ids
        decode = staticmethod(opened.encoder.decode)

        @staticmethod
        def encode_prompt(messages: object) -> list[int]:
            prompts.append(original(messages))  # type: ignore[arg-type]
            return prompts[-1]

    object.__setattr__(again, "opened", Opened(opened.model, opened.tokenizer, Spy, opened.device, None))  # type: ignore[arg-type]
    again.ask("and you?")
    assert prompts == [original(asked)]
    assert again.turns == chat.turns


def test_the_base_answers_beside_the_model_and_is_not_remembered(opened: Opened) -> None:
    chat, written = talk(opened, "/base", "hello", "/base", "hello")
    assert chat.turns[1]["content"] in text(written)
    assert text(written).count("model: ") == text(written).count("base:  ") == 1
    assert len(chat.turns) == 4
    assert not chat.with_base


def test_commands_begin_anew_and_end(opened: Opened) -> None:
    chat, written = talk(opened, "hello", "/reset", "", "/quit", "never")
    assert chat.turns == []
    assert text(written).endswith("[a new conversation]\n")
    chat, _ = talk(opened, "/system be kind", "/system")
    assert chat.system is None


def test_a_wrong_command_names_the_near_one_and_two_slashes_are_text(opened: Opened) -> None:
    chat, written = talk(opened, "/rest", "//rest")
    assert "/rest is no command; did you mean /reset?" in text(written)
    assert all(command in text(written) for command in COMMANDS)
    assert chat.turns[0]["content"] == "/rest"


def test_a_backslash_joins_lines(opened: Opened) -> None:
    chat, _ = talk(opened, "one\\", "two")
    assert chat.turns[0]["content"] == "one\ntwo"


def test_a_model_has_no_base(tmp_path: Path) -> None:
    trained_in(tmp_path)
    _, written = talk(open_subject(find_subject(tmp_path / "base")), "/base")
    assert "there is no base to compare with" in text(written)


def test_the_oldest_exchange_leaves_a_conversation_that_is_too_long(opened: Opened) -> None:
    long = " dogs" * 90
    chat, written = talk(opened, "first" + long, "second" + long, "third", sampling=Sampling(max_new_tokens=300))
    assert "oldest question and answer are left out" in text(written)
    assert not any(str(turn["content"]).startswith("first") for turn in chat.turns)
    assert chat.turns[-2]["content"] == "third"


def test_drawing_is_by_the_temperature(opened: Opened) -> None:
    import torch

    answers = set()
    for seed in range(4):
        torch.manual_seed(seed)
        chat, _ = talk(opened, "hello", sampling=Sampling(8, temperature=1.5, top_p=0.95))
        answers.add(chat.turns[1]["content"])
    assert len(answers) > 1
    assert Sampling().options()["do_sample"] is False


def test_a_broken_off_answer_stays_in_the_conversation(opened: Opened) -> None:
    written: list[str] = []

    def write(piece: str) -> None:
        written.append(piece)
        if len(written) == 3:
            raise KeyboardInterrupt

    chat = Chat(opened, write, Sampling(max_new_tokens=20))
    chat.run(["hello"])
    assert "[broken off]" in text(written)
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"]


def test_without_a_template_there_is_no_conversation(opened: Opened) -> None:
    tokenizer = copy.deepcopy(with_template("regex", "chatml"))
    tokenizer.chat_template = None
    bare = Opened(opened.model, tokenizer, make_encoder(tokenizer, template=None, max_tokens=9), opened.device, None)
    with pytest.raises(DataError, match="has no chat template"):
        talk(bare, "hello")
