"""What is learned from a chat template: where messages end in tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.errors import BadRequest
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.keys import as_keys
from regrow.policy.plan import message_ends
from tests.models.dialects import (
    CHATML,
    DATED,
    DEFAULT_SYSTEM,
    DIALECTS,
    GEMMA,
    GLM,
    LLAMA,
    MISTRAL,
    QWEN,
    ZEPHYR,
    Dialect,
    hard_tokenizer,
)

CONVERSATIONS = [
    "user",
    "system user",
    "system user assistant",
    "user assistant user",
    "system user assistant user assistant user",
    "user assistant tool",
    "system user call tool tool assistant user",
]
FINAL = {"role": "assistant", "content": "And"}
EDGES = st.text(alphabet='aqumor \n.,"}{<>\u00e97\U0001f600', max_size=6)


MADE: dict[str, ChatTokenizer] = {}


def chat(dialect: Dialect) -> ChatTokenizer:
    if dialect.name not in MADE:
        MADE[dialect.name] = ChatTokenizer(dialect.tokenizer())
    return MADE[dialect.name]


def conversation(roles: str, edges: list[str]) -> list[dict[str, object]]:
    """Message i holds the word `wordi` between two edges."""
    messages: list[dict[str, object]] = []
    for i, role in enumerate(roles.split()):
        word = f"wor{'d' * (i + 1)}."
        if role == "call":
            call = {
                "id": "call00001",
                "type": "function",
                "function": {"name": "f", "arguments": {"a": word}},
            }
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            messages.append({"role": role, "content": edges[2 * i] + word + edges[2 * i + 1]})
    return messages


def real_ends(dialect: Dialect, text: str, roles: list[str]) -> set[int]:
    """The places in the text where messages that are not the assistant's have ended."""
    ends, at = set(), 0
    for i, role in enumerate(roles):
        word = f"wor{'d' * (i + 1)}."
        at = text.index(word, at) + len(word)
        if role in dialect.close:
            closed = text.find(dialect.close[role], at)
            ends.add(closed + len(dialect.close[role]) if closed >= 0 else len(text))
    return ends - {len(text)}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
@settings(max_examples=60, deadline=None)
@given(edges=st.lists(EDGES, min_size=14, max_size=14), generate=st.booleans())
def test_the_ends_found_in_tokens_are_the_real_ends_whatever_the_contents(
    dialect: Dialect, edges: list[str], generate: bool
) -> None:
    tokenizer, backend = chat(dialect), dialect.tokenizer().backend_tokenizer
    rendered = 0
    for roles in CONVERSATIONS:
        try:
            text = tokenizer.render(conversation(roles, edges), (), {"add_generation_prompt": generate})
        except BadRequest:
            continue
        rendered += 1
        first_word = text.index("word.")
        encoding = backend.encode(text, add_special_tokens=False)
        found = message_ends(as_keys(encoding.ids), tokenizer.marks)
        named = roles.split()
        at = {encoding.offsets[end.position][0]: end.role for end in found}
        assert {place for place in at if place > first_word} == real_ends(dialect, text, named)
        assert {role for place, role in at.items() if place < first_word} <= {"system"}
        assert set(at.values()) <= {*named, "system"} - {"assistant", "call"}
    assert rendered >= 3


@pytest.mark.parametrize("dialect", [CHATML, LLAMA, QWEN], ids=lambda d: d.name)
def test_every_end_has_the_role_of_its_message(dialect: Dialect) -> None:
    tokenizer = chat(dialect)
    keys = tokenizer.encode_chat(conversation("system user call tool assistant user", [""] * 12))
    assert [end.role for end in message_ends(keys, tokenizer.marks)] == ["system", "user", "tool", "user"]


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d is not GEMMA], ids=lambda d: d.name)
def test_nothing_is_left_to_say_where_everything_was_learned(dialect: Dialect) -> None:
    assert chat(dialect).marks_note == ""
    assert set(chat(dialect).marks.end) == {"system", "user", "tool"}


@pytest.mark.parametrize("dialect", [CHATML, GLM, LLAMA, MISTRAL, ZEPHYR], ids=lambda d: d.name)
def test_where_no_system_prompt_is_none_ends(dialect: Dialect) -> None:
    tokenizer = chat(dialect)
    keys = tokenizer.encode_chat([*conversation("user assistant user", [""] * 6), FINAL])
    assert [end.role for end in message_ends(keys, tokenizer.marks)] == ["user", "user"]


def test_the_end_of_an_injected_system_prompt_is_found_too() -> None:
    tokenizer = chat(DEFAULT_SYSTEM)
    keys = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert [end.role for end in message_ends(keys, tokenizer.marks)] == ["system", "user"]


def test_tool_results_that_share_a_turn_end_once_with_the_turn() -> None:
    tokenizer = chat(QWEN)
    keys = tokenizer.encode_chat(conversation("user call tool tool tool", [""] * 10))
    assert [end.role for end in message_ends(keys, tokenizer.marks)] == ["user", "tool"]


def test_no_date_gets_into_a_mark() -> None:
    hf = DATED.tokenizer()
    assert hf.decode(chat(DATED).marks.begin["system"]) == "<|im_start|>system"


def test_a_system_prompt_merged_into_the_user_turn_has_no_end_and_that_is_said() -> None:
    tokenizer = chat(GEMMA)
    assert set(tokenizer.marks.end) == {"user"}
    assert tokenizer.marks_note == (
        "the template does not mark where a system message ends; the template takes no tool messages"
    )


def test_a_template_without_marks_cuts_nothing() -> None:
    bare = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
    tokenizer = ChatTokenizer(hard_tokenizer(["</s>"], bare))
    assert not tokenizer.marks.end
    assert tokenizer.marks_note.count("does not mark where") == 3


def test_an_end_that_also_closes_the_assistants_messages_is_left_out_where_these_have_no_beginning() -> None:
    template = (
        "{% for m in messages %}{{ ('[U]' if m.role == 'user' else '') + m.content + '</e>' }}{% endfor %}"
    )
    tokenizer = ChatTokenizer(hard_tokenizer(["[U]", "</e>"], template))
    assert not tokenizer.marks.end
    assert "user" in tokenizer.marks_note
