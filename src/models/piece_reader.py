"""Reading a text that comes in pieces: what every reader of answers and tool calls shares.

A reader is a generator (`_read`) over the text that is not read yet. It yields deltas, and None where it
needs more text; how the text is cut into pieces changes nothing but the pieces. What may still become a mark
is held back.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

from regrow.models.deltas import Content, Delta

T = TypeVar("T")
Steps = Generator[Delta | None, None, T]


class PieceReader:
    """Reads one text."""

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self._space = ""
        self._steps = self._read()

    def feed(self, piece: str) -> list[Delta]:
        """Return what is known with the next piece of the text."""
        self._text += piece
        return list(self._until_waiting())

    def finish(self) -> list[Delta]:
        """Return what was held back, at the end of the text."""
        self._ended = True
        return list(self._until_waiting())

    def _until_waiting(self) -> Iterator[Delta]:
        for delta in self._steps:
            if delta is None:
                return
            yield delta

    def _read(self) -> Steps[None]:
        raise NotImplementedError

    def _take(self, n: int) -> str:
        """Return the next `n` characters and move past them."""
        taken, self._text = self._text[:n], self._text[n:]
        return taken

    def _until(self, marks: Sequence[str]) -> Steps[str]:
        """Say as content what stands before the first of `marks`, move past that, and return it; "" at the
        end of the text. White space right before a mark is left out, and kept in `_space`."""
        while True:
            if found := first_of(self._text, marks):
                at, mark = found
                before = self._text[:at]
                if said := before.rstrip():
                    yield Content(said)
                self._space = before[len(said) :]
                self._take(at + len(mark))
                return mark
            if self._ended:
                if said := self._take(len(self._text)):
                    yield Content(said)
                return ""
            if bare := self._text[: len(self._text) - open_end(self._text, marks)].rstrip():
                yield Content(self._take(len(bare)))
            yield None

    def _skip(self, mark: str) -> Steps[bool]:
        """Move past white space and one `mark` after it, where it is there; say whether it was. White space
        that no mark follows stays."""
        while True:
            bare = self._text.lstrip()
            if bare.startswith(mark):
                self._text = bare[len(mark) :]
                return True
            if self._ended or not mark.startswith(bare):
                return False
            yield None

    def _skip_space(self) -> Steps[None]:
        """Move past white space."""
        while not (bare := self._text.lstrip()) and not self._ended:
            yield None
        self._text = bare


def first_of(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first of `marks` stands in `text`, and which it is."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)


def open_end(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which one of `marks` begins."""
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
