"""The bytes that each token stands for on its own, inside a text: what log-probabilities name tokens by.

A byte-level piece is spelled with one character for each byte, so a token may hold a part of a character.
Other tokenizers are asked what a token adds to a text (its own, so that it is not the first in it: there they
drop a space); where they fall back to bytes, a token of one byte is that byte.
"""

from regrow.models.detokenize import Spelling


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level pieces, in the order of the bytes.

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class TokenBytes:
    """Call it with an id; an id that no token has stands for nothing."""

    def __init__(self, spelling: Spelling) -> None:
        backend = self._backend = spelling.backend
        self._spelling = spelling
        added = backend.get_added_tokens_decoder()
        self._known = {i: token.content.encode() for i, token in added.items()}
        self._table: dict[str, int] = {}
        if backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__():
            self._table = {character: byte for byte, character in enumerate(byte_characters())}

    def __call__(self, token: int) -> bytes:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if token in self._spelling.bytes:
            return bytes([int(piece[3:5], 16)])
        if self._table:
            return b"".join(bytes([self._table[c]]) if c in self._table else c.encode() for c in piece)
        twice = self._backend.decode([token, token])
        return str(twice).removeprefix(self._backend.decode([token])).encode()
