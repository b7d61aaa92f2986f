"""Which old tool results of a chat are shortened, and into what (C10).

A result is shortened from its own text alone, so the same text gives the same bytes for ever, wherever it
stands and whatever came after it. What the rules do not name stays the very object it was: system and user
text, assistant text, ids, roles, order, `cache_control`. Both shapes are read: Anthropic's `tool_result`
blocks and OpenAI's messages of the role `tool`.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

Message = Mapping[str, object]

KEPT = 8  # the last messages, which are never shortened
STEP = 16
LONG = 2000  # characters above which a result is shortened
EDGE = 600  # characters that stay at each end of a command's output, in whole lines where there are any
RUNNING = 0.8  # the part of the lines that must count up by one for a text to be a numbered file
SAMPLE = 40  # lines that are looked at for that
NUMBERED = re.compile(r"\s*(\d+)(?:→|\t|\s?\|| ?: )")


@dataclass(frozen=True, slots=True)
class Pruned:
    """Messages with long old tool results shortened, and the original texts of those by their hash."""

    messages: Sequence[Message]
    originals: Mapping[str, str]


def boundary_of(count: int) -> int:
    """Return below which message of `count` results are shortened: a staircase, so that it seldom moves."""
    return max(0, (count - KEPT) // STEP * STEP)


def prune(messages: Sequence[Message], boundary: int, start: int = 0) -> Pruned:
    """Shorten the long tool results of messages [start, boundary); all other messages are passed on as is."""
    originals: dict[str, str] = {}
    pruned = list(messages)
    for index in range(start, min(boundary, len(messages))):
        pruned[index] = _message(messages[index], originals)
    return Pruned(pruned, originals)


def content_hash(text: str) -> str:
    """Return the name of an original: 96 bits, which nobody guesses."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:24]


def shortened(text: str) -> str:
    """Return what stands for a tool result: the text itself where it is not long or nothing is gained."""
    if len(text) <= LONG:
        return text
    note = _file_note(text) if is_numbered_file(text) else _output(text)
    return note if len(note) < len(text) else text


def is_numbered_file(text: str) -> bool:
    """Say whether the text is a file as file readers show it: lines that are numbered one by one."""
    lines = text.split("\n", SAMPLE)[:SAMPLE]
    found = [NUMBERED.match(line) for line in lines if line.strip()]
    numbers = [int(match[1][-9:]) for match in found if match]
    steps = sum(b - a == 1 for a, b in pairwise(numbers))
    return len(found) > 1 and steps >= RUNNING * (len(found) - 1)


def _file_note(text: str) -> str:
    return (
        f"[The contents of a file stood here ({_size(text)}). They were left out to shorten an old part of "
        "this conversation, and the file may have changed since: re-read the file where its contents are "
        f"needed. Kept as {content_hash(text)}.]"
    )


def _output(text: str) -> str:
    head, tail = text[:EDGE], text[-EDGE:]
    head = head[: head.rfind("\n") + 1] or head
    tail = tail[tail.find("\n") + 1 :] or tail
    left_out = text[len(head) : len(text) - len(tail)]
    return (
        f"{head.rstrip()}\n[... {_size(left_out)} of this output were left out to shorten an old part of "
        f"this conversation; the whole is kept as {content_hash(text)} ...]\n{tail.lstrip()}"
    )


def _size(text: str) -> str:
    return f"{text.count(chr(10)) + 1:,} lines, {len(text):,} characters"


def _message(message: Message, originals: dict[str, str]) -> Message:
    content = message.get("content")
    if message.get("role") in ("tool", "function"):
        return _with(message, "content", _result(content, originals))
    if not isinstance(content, list):
        return message
    blocks = [_block(block, originals) for block in content]
    return _with(message, "content", _same_or(content, blocks))


def _block(block: object, originals: dict[str, str]) -> object:
    if not _is(block, "tool_result"):
        return block
    return _with(block, "content", _result(block.get("content"), originals))


def _result(content: object, originals: dict[str, str]) -> object:
    """Shorten the content of a tool result: a text, or a list in which each text item is one of its own."""
    if isinstance(content, str):
        return _text(content, originals)
    if not isinstance(content, list):
        return content
    items = [
        _with(item, "text", _text(item.get("text"), originals)) if _is(item, "text") else item
        for item in content
    ]
    return _same_or(content, items)


def _text(text: object, originals: dict[str, str]) -> object:
    if not isinstance(text, str) or (short := shortened(text)) is text:
        return text
    originals[content_hash(text)] = text
    return short


def _is(block: object, kind: str) -> TypeGuard[Message]:
    return isinstance(block, dict) and block.get("type") == kind


def _with(message: Message, name: str, value: object) -> Message:
    """Return the message with one member replaced, in its place; the same object where it is that already."""
    return message if message.get(name) is value else {**message, name: value}


def _same_or(before: list[object], after: list[object]) -> list[object]:
    return before if all(a is b for a, b in zip(before, after, strict=True)) else after
