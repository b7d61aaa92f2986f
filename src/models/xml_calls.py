"""Calls in the XML of Qwen3-Coder and Qwen3.5:

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter> ... </function></tool_call>

A value is text as it is, one newline at either side left out. The tool's schema says what becomes of it: a
string is passed on piece by piece, anything else is taken for JSON once it is complete.
"""

import json
from collections.abc import Mapping

from regrow.models.call_reader import CallReader
from regrow.models.deltas import CallArguments, CallEnd, CallStart
from regrow.models.piece_reader import Steps, first_of, open_end

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
LONGEST_NAME = 256


class XmlReader(CallReader):
    def _read(self) -> Steps[None]:
        while mark := (yield from self._until([OPEN, FUNCTION])):
            if mark == OPEN and not (yield from self._skip(FUNCTION)):
                yield self._no_call(OPEN)
                continue
            if (yield from self._call(mark)):
                yield from self._after_call(CLOSE)

    def _call(self, mark: str) -> Steps[bool]:
        """Read a call after its mark; say whether one came to its end."""
        name = yield from self._name()
        if name is None:
            if self._text:  # else the output ended in it
                yield self._no_call(mark if mark == FUNCTION else OPEN + FUNCTION)
            return False
        index = self._begun()
        yield CallStart(index, name)
        before = "{"
        while (mark := (yield from self._next())) == PARAMETER:
            key = yield from self._name()
            if key is None:
                return self._cut_off()
            yield CallArguments(index, f"{before}{_json(key)}: ")
            before = ", "
            if not (yield from self._value(index, _types(self._tools.get(name, {}), key))):
                return self._cut_off()
        if not mark:
            return self._cut_off()
        yield CallArguments(index, "{}" if before == "{" else "}")
        yield CallEnd(index)
        return True

    def _next(self) -> Steps[str]:
        """Move past the mark of the next parameter or of the call's end and return it; "" at the end of the
        text. What stands before has no meaning."""
        while not (found := first_of(self._text, [PARAMETER, END_FUNCTION, CLOSE])):
            if self._ended:
                return ""
            yield None
        self._take(found[0] + len(found[1]))
        return found[1]

    def _name(self) -> Steps[str | None]:
        """Return a name and move past the > after it; None where there is none."""
        while (at := self._text.find(">")) < 0:
            if self._ended:
                self._take(len(self._text))
            if self._ended or len(self._text) > LONGEST_NAME or "\n" in self._text:
                return None
            yield None
        name = self._text[:at].strip()
        if not name or at > LONGEST_NAME or "\n" in name:
            return None
        self._take(at + 1)
        return name

    def _value(self, index: int, types: frozenset[str]) -> Steps[bool]:
        """Tell of a value; say whether its end came."""
        if types != {"string"}:
            seen = 0
            while (at := self._text.find(END_PARAMETER, seen)) < 0:
                if self._ended:
                    return False
                seen = max(len(self._text) - len(END_PARAMETER), 0)
                yield None
            yield CallArguments(index, _converted(self._take(at), types))
            self._take(len(END_PARAMETER))
            return True
        while not self._text and not self._ended:
            yield None
        self._text = self._text.removeprefix("\n")
        yield CallArguments(index, '"')
        while (at := self._text.find(END_PARAMETER)) < 0:
            if self._ended:
                return False
            held = open_end(self._text, ["\n" + END_PARAMETER, END_PARAMETER])
            if piece := self._take(len(self._text) - held):
                yield CallArguments(index, _json(piece)[1:-1])
            yield None
        piece = self._take(at).removesuffix("\n")
        self._take(len(END_PARAMETER))
        yield CallArguments(index, _json(piece)[1:] if piece else '"')
        return True


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Mapping[str, object], key: str) -> frozenset[str]:
    """Return the JSON types that the schema of parameters names for `key`; none where it does not say."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_named(found))


def _named(schema: object) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    named = schema.get("type")
    choices = [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [str(name) for name in named]
    if isinstance(values := schema.get("enum"), list) and all(isinstance(value, str) for value in values):
        return ["string"]
    return [name for choice in choices for name in _named(choice)]


def _converted(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: what reads as JSON of a type that is allowed as that, anything else as a
    string."""
    text = text.removeprefix("\n").removesuffix("\n")
    if (word := _WORDS.get(text.strip().lower())) and word[1] in types:
        return word[0]
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _json(text)
    return text.strip() if not types or types & _KINDS[type(value)] else _json(text)


def _no_number(text: str) -> object:
    raise ValueError(text)


_WORDS = {  # as templates write Python's own values, too
    "true": ("true", "boolean"),
    "false": ("false", "boolean"),
    "none": ("null", "null"),
    "null": ("null", "null"),
}
_KINDS = {
    str: {"string"},
    int: {"integer", "number"},
    float: {"number"},
    bool: {"boolean"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}
