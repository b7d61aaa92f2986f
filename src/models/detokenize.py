"""From tokens to text one token at a time, never splitting a character.

What the pieces add up to is the text of all tokens decoded at once, special ones left out, for every
sequence of ids. tokenizers' own `DecodeStream` is not used: it fails on invalid byte sequences, and keeps all
of a run of them to decode again with each token. Here each token costs the decoding of a few.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tokenizers import Tokenizer

INVALID = "\ufffd"
_LONGEST = 12  # tokens looked back at: more than the bytes of a character (4) on either side of what is open


@dataclass(frozen=True, slots=True)
class Spelling:
    """What a tokenizer's ids stand for. hidden: special ids. bytes: ids of single bytes that its decoder puts
    together ("byte fallback"); a run of them has no text until its last byte is known."""

    backend: Tokenizer
    hidden: frozenset[int]
    bytes: frozenset[int]

    @classmethod
    def of(cls, backend: Tokenizer, shown: Collection[str] = ()) -> "Spelling":
        """shown: special tokens that are text all the same, since they say what an answer is made of."""
        added = backend.get_added_tokens_decoder()
        single = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return cls(
            backend,
            frozenset(i for i, token in added.items() if token.special and token.content not in shown),
            frozenset(i for i in single if i is not None and backend.decode([i]) != backend.id_to_token(i)),
        )


class Detokenizer:
    """Turns the tokens of one answer into text."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._window: list[int] = []  # the tokens that are open, after some that are said, as their context
        self._said = 0  # characters of the window's text that were returned

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, which may be empty."""
        if token in self._spelling.hidden or self._spelling.backend.id_to_token(token) is None:
            return ""
        self._window.append(token)
        if token in self._spelling.bytes:
            return ""
        text = self._text()
        complete = len(text) - text.endswith(INVALID)  # bytes that may still become a character are one mark
        piece = text[self._said : complete]
        self._said = complete
        if len(self._window) > _LONGEST:
            self._window = self._window[-_LONGEST // 2 :]
            self._said = len(self._text()) - (len(text) - complete)
        return piece

    def flush(self) -> str:
        """Return what was held back, at the end of the answer; then start anew."""
        piece = self._text()[self._said :]
        self._window, self._said = [], 0
        return piece

    def _text(self) -> str:
        return str(self._spelling.backend.decode(self._window, skip_special_tokens=False))
