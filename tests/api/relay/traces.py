"""Recorded agent conversations as requests: sizes, times and shared prefixes are real, the text is made up.

The recording has each prompt as runs of 64-token blocks; equal ids at equal places mean equal tokens up to
there. Here a block is 256 characters that its id makes up, and the blocks of a prompt become tools, system
prompt and messages: what a request shares with the one before it becomes the same messages again, what is new
becomes the assistant's answer (as long as the recorded one) and a tool result, or a user's text where the
pause before it was long. A first prompt that is long already opens with a chat of such turns. Markers stand
where coding agents put them: at the end of the system prompt and on the last two user messages.
"""

import gzip
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest

BESIDE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "agent_traces.jsonl.gz"
PATH = Path(os.environ.get("REGROW_TRACES") or BESIDE)
needs_traces = pytest.mark.skipif(not PATH.exists(), reason=f"the recorded traces are not at {PATH}")
PAUSE_S = 60.0  # a longer one is a person's
ANSWER, RESULT = 3, 20  # blocks of a turn in a chat that was not recorded from its start
WORDS = ["error", "return", "value", "index", "token", "parse", "cache", "line", "check", "build", "passed"]

LENGTH = 8000
FILLER = " ".join(random.Random(0).choices(WORDS, k=2000))


@dataclass(frozen=True)
class Recorded:
    """One request: when it came, when its answer ended, and its body."""

    at: float
    ended: float
    body: bytes


@dataclass(frozen=True)
class Segment:
    """Blocks [start, end) of a prompt as one message."""

    start: int
    end: int
    role: str
    kind: str


def load() -> list[dict]:
    with gzip.open(PATH, "rt") as lines:
        return [json.loads(line) for line in lines]


def longest_pause(trace: dict) -> float:
    """Return the longest time (s) that an agent of the trace sent nothing after an answer."""
    longest, ended = 0.0, {}
    for request in trace["requests"]:
        longest = max(longest, request["t"] - ended.get(request["agent"], request["t"]))
        ended[request["agent"]] = request["t"] + (request["api_s"] or 0.0)
    return longest


def requests_of(trace: dict, ttl: str = "5m") -> Iterator[Recorded]:
    """Yield the requests of a trace in the order of their times."""
    chats = {}
    writer = Writer(ttl)
    for request in sorted(trace["requests"], key=lambda r: r["t"]):
        chat = chats.setdefault(
            request["agent"], Chat(trace["tool_tokens"] // 64, trace["system_tokens"] // 64)
        )
        ended = request["t"] + (request["api_s"] or 0.0)
        chat.turn(request)
        yield Recorded(request["t"], ended, writer.body(request["model"], chat))


class Chat:
    """The messages of one agent's chat, from one recorded prompt to the next."""

    def __init__(self, tools: int, system: int) -> None:
        self.tools, self.system = tools, system
        self.blocks: list[int] = []
        self.segments: list[Segment] = []
        self.ended = 0.0
        self.answer = ANSWER

    def turn(self, request: dict) -> None:
        blocks = [block for first, count in request["blocks"] for block in range(first, first + count)]
        shared = next((i for i, (a, b) in enumerate(zip(self.blocks, blocks, strict=False)) if a != b), None)
        if shared is None:
            shared = min(len(self.blocks), len(blocks))
        head = min(self.tools + self.system, len(blocks) - 1)
        kept = [segment for segment in self.segments if segment.end <= shared]
        typed = bool(kept) and request["t"] - self.ended > PAUSE_S
        while kept and self._leads_nowhere(kept[-1], len(blocks)):
            kept.pop()
        self.blocks = blocks
        self.segments = self._continued(kept, kept[-1].end if kept else head, typed)
        self.ended = request["t"] + (request["api_s"] or 0.0)
        self.answer = max(1, request["out"] // 64)

    @staticmethod
    def _leads_nowhere(last: Segment, end: int) -> bool:
        """Say whether the prompt's other blocks are too few to go on after this message."""
        return end - last.end < (2 if last.role == "user" else 1) and (last.role, last.end) != ("user", end)

    def _continued(self, kept: list[Segment], at: int, typed: bool) -> list[Segment]:
        segments, end = list(kept), len(self.blocks)
        fresh = not kept
        while at < end:
            if not segments:
                length, role, kind = 1, "user", "text"
            elif segments[-1].role == "assistant":
                role, kind = "user", "text" if typed else "result"
                length = RESULT if fresh or end - at > 40 * RESULT else end - at
            else:
                role, kind = "assistant", "text" if typed else "call"
                length = min(self.answer, end - at - 1)
            if role == "user" and end - at - length < 2:
                length = end - at
            segments.append(Segment(at, at + length, role, kind))
            at += length
        return segments


class Writer:
    """Bodies of one trace. A message is written once: its blocks say all."""

    def __init__(self, ttl: str) -> None:
        self.marker = {"type": "ephemeral"} if ttl == "5m" else {"type": "ephemeral", "ttl": ttl}
        self.written: dict[tuple, msgspec.Raw] = {}

    def body(self, model: str, chat: Chat) -> bytes:
        first = chat.blocks[: chat.tools + chat.system]
        tools = [
            {"name": "run", "description": text_of(first[: chat.tools]), "input_schema": {"type": "object"}}
        ]
        system = [
            {
                "type": "text",
                "text": text_of(first[chat.tools :]) or "You help.",
                "cache_control": self.marker,
            }
        ]
        users = [i for i, segment in enumerate(chat.segments) if segment.role == "user"][-2:]
        messages = [self._message(chat, i, i in users) for i in range(len(chat.segments))]
        return msgspec.json.encode(
            {"model": model, "max_tokens": 4096, "tools": tools, "system": system, "messages": messages}
        )

    def _message(self, chat: Chat, index: int, marked: bool) -> msgspec.Raw:
        segment = chat.segments[index]
        blocks = tuple(chat.blocks[segment.start : segment.end])
        called = index > 0 and chat.segments[index - 1].kind == "call"
        calls = index + 1 < len(chat.segments) and chat.segments[index + 1].kind == "result"
        key = (blocks, segment, called, calls, marked)
        if key not in self.written:
            self.written[key] = msgspec.Raw(msgspec.json.encode(self._made(segment, blocks, calls, marked)))
        return self.written[key]

    def _made(self, segment: Segment, blocks: tuple[int, ...], calls: bool, marked: bool) -> dict:
        if segment.kind == "result":
            content = [
                {"type": "tool_result", "tool_use_id": f"t{segment.start}", "content": result_of(blocks)}
            ]
        else:
            content = [{"type": "text", "text": text_of(blocks)}]
        if segment.role == "assistant" and calls:
            content.append({"type": "tool_use", "id": f"t{segment.end}", "name": "run", "input": {}})
        if marked:
            content[-1]["cache_control"] = self.marker
        return {"role": segment.role, "content": content}


def text_of(blocks: "list[int] | tuple[int, ...]") -> str:
    return "".join(map(_text, blocks))


def result_of(blocks: tuple[int, ...]) -> str:
    """Return a tool result: every second one looks like a numbered file, the others like output."""
    text = text_of(blocks)
    if blocks[0] % 2:
        return text
    return "\n".join(f"{i}\t{line}"[: len(line)] for i, line in enumerate(text.split("\n"), 1))


@lru_cache(maxsize=8192)
def _text(block: int) -> str:
    """Return 256 characters in four lines that no other block has."""
    starts = ((block * 7919 + line * 104_729) % LENGTH for line in range(4))
    return "".join(f"{block:06x} {FILLER[at : at + 56]}\n" for at in starts)
