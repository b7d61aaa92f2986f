"""What the readers of all tool-call formats share; and the reader of an answer that calls nothing."""

import json
from collections.abc import Iterator, Mapping

from regrow.models.deltas import CallArguments, CallEnd, CallStart, Content, Delta
from regrow.models.piece_reader import PieceReader, Steps

Parameters = Mapping[str, Mapping[str, object]]


class CallReader(PieceReader):
    """Reads prose and calls. tools: the schema of the parameters of each tool by its name."""

    def __init__(self, tools: Parameters) -> None:
        super().__init__()
        self._tools = tools
        self._calls = 0

    def _begun(self) -> int:
        """Return the number of the call that begins."""
        self._calls += 1
        return self._calls - 1

    def _whole_call(self, name: str, arguments: str) -> Iterator[Delta]:
        """Tell of a call that is known as a whole."""
        index = self._begun()
        yield CallStart(index, name)
        yield CallArguments(index, arguments)
        yield CallEnd(index)

    def _no_call(self, text: str) -> Content:
        """Say what stands after the mark of a call, with that, as prose."""
        return Content(self._space + text)

    def _cut_off(self) -> bool:
        """Drop what is left of a call that does not go on; it was none."""
        self._take(len(self._text))
        return False

    def _after_call(self, close: str) -> Steps[None]:
        """Move past the mark that closes a call, where it is there, and the white space after it."""
        yield from self._skip(close)
        yield from self._skip_space()

    def _rest(self) -> Steps[None]:
        """Say all that is left."""
        while True:
            if self._text:
                yield Content(self._take(len(self._text)))
            if self._ended:
                return
            yield None


def json_text(value: object) -> str:
    """Return a value as JSON that can be sent: halves of characters, which a model may write, are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if any("\ud800" <= character <= "\udfff" for character in text) else text


def call_in(text: str) -> tuple[str, str]:
    """Return the name and the arguments (JSON) of a call that is written as a JSON object, its members in any
    order; raises ValueError where it is none."""
    given = json.loads(text, parse_constant=_no_number)
    members = given if isinstance(given, dict) else {}
    name = members.get("name")
    arguments = members.get("arguments", members.get("parameters")) or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments, parse_constant=_no_number)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return sendable(name), json_text(arguments)


def sendable(name: str) -> str:
    """Return a name without halves of characters."""
    return name.encode(errors="replace").decode()


def _no_number(text: str) -> object:
    raise ValueError(text)


class ProseReader(CallReader):
    """Of an answer that may call nothing."""

    def _read(self) -> Steps[None]:
        yield from self._rest()
