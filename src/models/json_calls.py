"""Calls written as JSON objects: Hermes (between <tool_call> tags) and Llama (bare, as the whole answer).

The arguments are passed on as the model writes them. Where the name does not come first, a call is told once
its object is complete.
"""

import json
import re

from regrow.models.call_reader import CallReader, call_in, sendable
from regrow.models.deltas import CallArguments, CallEnd, CallStart
from regrow.models.piece_reader import Steps

_STRING = r'"(?:[^"\\]|\\.){1,256}"'
_GAP = r"\s{0,64}"
HEAD = re.compile(
    rf'{_GAP}\{{{_GAP}(?:"type"{_GAP}:{_GAP}"function"{_GAP},{_GAP})?"name"{_GAP}:{_GAP}({_STRING}){_GAP}'
    rf',{_GAP}"(?:arguments|parameters)"{_GAP}:{_GAP}(?=\{{)'
)
BARE_HEADS = ('{"name":"', '{"type":"function","name":"')  # without spaces
LONGEST_HEAD = 1024


class JsonEnd:
    """Finds where an object or array ends in a text that comes in pieces. depth: brackets open already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False

    def feed(self, text: str, stop: str | None = None) -> tuple[int, bool]:
        """Return how far the text belongs to the value, and whether that ends there. A `stop` outside a
        string ends it too, and does not belong to it."""
        for at, character in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1, True
            elif stop and text.startswith(stop, at):
                return at, True
            elif stop and stop.startswith(text[at:]):
                return at, False
        return len(text), False


class JsonReader(CallReader):
    """Reads one object at a time. close: what ends a call whose object does not end."""

    close: str

    def _call(self, opened: str) -> Steps[bool]:
        """Read one object, which stands after `opened`; say whether it was a call. What is none is prose."""
        end, seen = JsonEnd(), 0
        while not (head := HEAD.match(self._text)):
            if (bare := self._text.lstrip()) and bare[0] != "{":
                yield self._no_call(opened)
                return False
            n, complete = end.feed(self._text[seen:], self.close)
            seen += n
            if complete:
                return (yield from self._object(opened, self._take(seen)))
            if self._ended:
                return self._cut_off()
            yield None
        self._take(head.end())
        index = self._begun()
        yield CallStart(index, _name(head[1]))
        yield from self._arguments(index)
        return True

    def _arguments(self, index: int) -> Steps[None]:
        """Pass on the object that comes next, then read on to the end of the one around it."""
        for end, told in ((JsonEnd(), True), (JsonEnd(depth=1), False)):
            while True:
                n, complete = end.feed(self._text, None if told else self.close)
                piece = self._take(n)
                if piece and told:
                    yield CallArguments(index, piece)
                if complete:
                    break
                if self._ended:
                    return
                yield None
        yield CallEnd(index)

    def _object(self, opened: str, text: str) -> Steps[bool]:
        """Tell of a complete object: a call with its members in another order, or no call."""
        try:
            name, arguments = call_in(text)
        except (ValueError, RecursionError):
            yield self._no_call(opened + text)
            return False
        yield from self._whole_call(name, arguments)
        return True


class HermesReader(JsonReader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, prose before."""

    open, close = "<tool_call>", "</tool_call>"

    def _read(self) -> Steps[None]:
        while (yield from self._until([self.open])):
            if (yield from self._call(self.open)):
                yield from self._after_call(self.close)


class LlamaReader(JsonReader):
    """`{"name": ..., "parameters": {...}}` as the whole answer, with or without <|python_tag|> before it;
    several are separated by semicolons. An object that names no tool of the request is prose."""

    tag, close = "<|python_tag|>", ";"

    def _read(self) -> Steps[None]:
        yield from self._skip(self.tag)
        while (yield from self._is_call()):
            if not (yield from self._call("")):
                break
            yield from self._after_call(self.close)
            yield from self._skip(self.tag)
        yield from self._rest()

    def _is_call(self) -> Steps[bool]:
        while not (head := HEAD.match(self._text)):
            bare = "".join(self._text[:LONGEST_HEAD].split())
            begins = any(head[: len(bare)] == bare[: len(head)] for head in BARE_HEADS)
            if self._ended or not begins or len(self._text) > LONGEST_HEAD:
                return False
            yield None
        return _name(head[1]) in self._tools


def _name(string: str) -> str:
    """Return what a JSON string says; one with a wrong escape says what stands there."""
    try:
        return sendable(str(json.loads(string)))
    except ValueError:
        return string[1:-1]
