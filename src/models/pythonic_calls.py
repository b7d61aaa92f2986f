"""Calls written as Python, as LFM2 does: `<|tool_call_start|>[name(key="value", n=3)]<|tool_call_end|>`.

A call is told once its closing bracket is there: only then its arguments can be turned into JSON. Between the
same marks stand JSON objects with `name` and `arguments` too, as some templates write them.
"""

import ast
import re

from regrow.models.call_reader import CallReader, call_in, json_text
from regrow.models.deltas import Content
from regrow.models.piece_reader import Steps

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
CONSTANTS = {"true": True, "false": False, "null": None}


class BracketEnd:
    """Finds where the first bracket of a Python text closes; the text comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return the place after the bracket that closes the first one, None where it is not there yet."""
        for at, character in enumerate(text):
            if self._quote:
                if self._escaped or character == "\\":
                    self._escaped = not self._escaped
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


class PythonicReader(CallReader):
    def _read(self) -> Steps[None]:
        while (yield from self._until([OPEN])):
            if not (yield from self._skip("[")):
                if self._text:
                    yield self._no_call(OPEN)
                continue
            while not (yield from self._skip("]")):
                if (self._ended and not self._text) or not (yield from self._call()):
                    break
                yield from self._skip(",")
            yield from self._after_call(CLOSE)

    def _call(self) -> Steps[bool]:
        """Read one call; False where the text is none, or ends in it."""
        end, seen = BracketEnd(), 0
        while (n := end.feed(self._text[seen:])) is None:
            seen = len(self._text)
            if self._ended:
                return self._cut_off()
            yield None
        text = self._take(seen + n)
        try:
            name, arguments = _call(text.strip())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            yield Content(text)
            return False
        yield from self._whole_call(name, arguments)
        return True


class _Json(ast.NodeTransformer):
    """Takes JSON's own constants for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node


def _call(text: str) -> tuple[str, str]:
    """Return the name and the arguments (JSON) of a call; raises ValueError, TypeError or SyntaxError."""
    if text.startswith("{"):
        return call_in(text)
    name, _, rest = text.partition("(")
    node = ast.parse(f"_({rest}", mode="eval").body  # names of tools need not be Python's
    if not re.fullmatch(r"[^\s'\"]{1,256}", name) or not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for given in node.keywords:
        if given.arg is None:
            raise ValueError("arguments are not spelled out")
        arguments[given.arg] = ast.literal_eval(_Json().visit(given.value))
    return name, json_text(arguments)
