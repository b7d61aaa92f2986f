"""C10: which old tool results are shortened, into what, and all that stays as it was."""

from collections.abc import Iterator

import pytest
from anthropic.types import MessageParam
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

from regrow.policy.history import (
    KEPT,
    LONG,
    STEP,
    boundary_of,
    content_hash,
    is_numbered_file,
    prune,
    shortened,
)
from tests.policy.prompts import anthropic_turn, any_texts, chats, numbered, openai_turn, output

either = st.one_of(chats(anthropic_turn), chats(openai_turn))


def blanked(message: dict) -> object:
    """A message without the texts of its tool results: all that must survive."""

    def blank(content: object) -> object:
        if isinstance(content, list):
            return [{**i, "text": None} if i["type"] == "text" else i for i in content]
        return None

    if message["role"] == "tool":
        return {**message, "content": blank(message["content"])}
    if isinstance(message["content"], str):
        return message
    blocks = [
        {**b, "content": blank(b["content"])} if b["type"] == "tool_result" else b for b in message["content"]
    ]
    return {**message, "content": blocks}


def results(message: dict) -> Iterator[str]:
    """The texts of a message's tool results."""
    blocks = message["content"] if isinstance(message["content"], list) else []
    contents = [b["content"] for b in blocks if b["type"] == "tool_result"]
    if message["role"] == "tool":
        contents = [message["content"]]
    for content in contents:
        items = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield from (item["text"] for item in items if item["type"] == "text")


@given(either, st.integers(0, 40), st.integers(0, 12))
def test_c10_ids_roles_order_markers_and_all_other_texts_survive(
    chat: list[dict], boundary: int, start: int
) -> None:
    pruned = prune(chat, boundary, start).messages
    assert [blanked(m) for m in pruned] == [blanked(m) for m in chat]
    outside = [i for i in range(len(chat)) if not start <= i < boundary]
    assert all(pruned[i] is chat[i] for i in outside)


@given(either)
def test_c10_every_long_result_below_the_boundary_is_shortened_and_kept_by_its_hash(chat: list[dict]) -> None:
    pruned = prune(chat, len(chat))
    for before, after in zip(chat, pruned.messages, strict=True):
        for old, new in zip(results(before), results(after), strict=True):
            assert new == shortened(old)
            assert len(new) <= len(old)
            if new != old:
                assert pruned.originals[content_hash(old)] == old
                assert content_hash(old) in new


@given(either, st.integers(0, 40), st.integers(0, 40))
def test_c10_a_message_is_shortened_to_the_same_bytes_wherever_the_boundary_stands(
    chat: list[dict], one: int, other: int
) -> None:
    a, b = prune(chat, one).messages, prune(chat, other).messages
    shared = min(one, other, len(chat))
    assert list(a[:shared]) == list(b[:shared])


@given(either)
def test_c10_what_was_shortened_is_not_shortened_again(chat: list[dict]) -> None:
    once = prune(chat, len(chat)).messages
    again = prune(once, len(chat))
    assert all(a is b for a, b in zip(once, again.messages, strict=True))
    assert not again.originals


SCHEMAS = {kind: TypeAdapter(list[kind]) for kind in (MessageParam, ChatCompletionMessageParam)}


def validate(chat: list[dict], kind: object) -> None:
    """Raise ValueError where a message is not one of the official client's type; reads all lazy lists."""
    for message in SCHEMAS[kind].validate_python(chat):
        content = message["content"]
        for block in [] if isinstance(content, str) else content:
            nested = block.get("content", "")
            assert isinstance(nested, str) or list(nested)


@given(chats(anthropic_turn, 12), chats(openai_turn, 12))
def test_c10_a_pruned_chat_is_valid_for_its_provider(anthropic: list[dict], openai: list[dict]) -> None:
    validate(list(prune(anthropic, len(anthropic)).messages), MessageParam)
    validate(list(prune(openai, len(openai)).messages), ChatCompletionMessageParam)


def test_an_invalid_message_is_noticed() -> None:
    with pytest.raises(ValueError, match="content"):
        validate([{"role": "user", "content": 5}], ChatCompletionMessageParam)
    with pytest.raises(ValueError, match="tool_use_id"):
        validate([{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}], MessageParam)


@given(st.integers(0, 10_000))
def test_c10_the_boundary_is_a_staircase_that_never_reaches_the_last_eight(count: int) -> None:
    boundary = boundary_of(count)
    assert boundary % STEP == 0
    assert boundary <= boundary_of(count + 1) <= boundary + STEP
    assert boundary == 0 or count - boundary >= KEPT
    assert count - boundary < KEPT + STEP


@given(any_texts)
def test_c10_a_text_is_shortened_from_its_own_content_alone_and_never_made_longer(text: str) -> None:
    short = shortened(text)
    assert short == shortened(str(text.encode(), "utf-8"))
    assert short == text or len(short) < len(text)
    assert len(text) > LONG or short is text


def test_c10_output_keeps_its_first_and_last_lines_and_says_how_much_is_gone() -> None:
    text = output(200)
    lines, short = text.split("\n"), shortened(text).split("\n")
    note = next(i for i, line in enumerate(short) if line.startswith("[... "))
    assert short[:note] == lines[:note]
    assert short[note + 1 :] == lines[-(len(short) - note - 1) :]
    assert min(note, len(short) - note - 1) >= 5
    gone = len(lines) - note - (len(short) - note - 1)
    assert f"[... {gone} lines, " in short[note] or f"[... {gone + 1} lines, " in short[note]


def test_c10_one_endless_line_is_cut_inside() -> None:
    text = "x" * 50_000
    short = shortened(text)
    assert short.startswith("x" * 600 + "\n[... 1 lines, 48,800 characters of this output")
    assert short.endswith("]\n" + "x" * 600)


def test_c10_a_file_is_replaced_by_a_note_that_says_to_read_it_again() -> None:
    text = numbered(120, seed=41)
    short = shortened(text)
    assert "re-read the file" in short
    assert "120 lines" in short
    assert text.split("\n")[0] not in short


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"  {i}→text of it" for i in range(1, 90)),
        "\n".join(f"{i:05} | text of it" for i in range(7, 99)),
        "\n".join(f"{i}: text of it" for i in range(1, 90)) + "\n\n(end of file)",
    ],
    ids=["arrows", "bars", "colons and a last note"],
)
def test_c10_numbered_lines_are_a_file(text: str) -> None:
    assert is_numbered_file(text)


@pytest.mark.parametrize(
    "text",
    ["", "1\tone", output(50), "\n".join(f"{i * 7}: a match" for i in range(90)), "7\t\n" * 50],
    ids=["nothing", "one line", "output", "matches of a search", "one number over and over"],
)
def test_c10_other_lines_are_not(text: str) -> None:
    assert not is_numbered_file(text)


def test_c10_texts_that_are_no_unicode_are_shortened_too() -> None:
    text = "\ud800 line\n" * 400
    assert len(shortened(text)) < LONG
