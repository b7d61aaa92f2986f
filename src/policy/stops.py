"""When an answer ends by what it says: at a stop string, or because it repeats one token for ever."""

from collections.abc import Sequence

REPEATS = 256


class StopMatcher:
    """Finds stop strings in a text that comes in pieces; how it is cut into pieces changes nothing.

    The answer ends with the first character that completes a stop string, the longest one where several end
    there. Text that may still become a stop string is held back; a stop string is never given out. found:
    the one that was met.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise ValueError("a stop string cannot be empty")
        self._strings = tuple(strings)
        self._held = ""
        self._stopped = False
        self.found: str | None = None

    def feed(self, piece: str) -> tuple[str, bool]:
        """Return the text that can be shown now, and whether the answer ends; later pieces are dropped."""
        if self._stopped:
            return "", True
        text = self._held + piece
        found = [(place + len(s), place) for s in self._strings if (place := text.find(s)) >= 0]
        if found:
            end, place = min(found)
            self._held, self._stopped, self.found = "", True, text[place:end]
            return text[:place], True
        safe = len(text) - self._open_suffix(text)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """Return what was held back, at the end of an answer that met no stop string."""
        held, self._held = self._held, ""
        return held

    def _open_suffix(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        longest = max((len(s) - 1 for s in self._strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._strings):
                return length
        return 0


class RepeatGuard:
    """Counts how often the last token came in a row."""

    def __init__(self, limit: int = REPEATS) -> None:
        self._limit = limit
        self._token: int | None = None
        self._count = 0

    def repeats(self, token: int) -> bool:
        """Take the next token; say whether it came `limit` times in a row, and the answer must end."""
        self._count = self._count + 1 if token == self._token else 1
        self._token = token
        return self._count >= self._limit
