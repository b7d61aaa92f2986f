"""Prompts as token ids, of which only the messages that were not met before are tokenised.

A tokenizer takes its special tokens out of a text before anything else and goes on with each piece between
them by itself. So a chat may be cut where its messages open, and the ids of the pieces together are those of
the whole. Pieces are kept by their hash, apart for each cache salt: no time tells what another one has sent.
"""

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from tokenizers import AddedToken, Tokenizer

from regrow.policy.keys import Keys, as_keys

LIMIT = 4_000_000  # ids that are kept, 8 bytes each


class Pieces:
    """Remembers the ids of pieces. openings: ids of tokens with which messages open. Safe from any thread."""

    def __init__(self, backend: Tokenizer, openings: Iterable[int], limit: int = LIMIT) -> None:
        self._backend = backend
        self._limit = limit
        added = backend.get_added_tokens_decoder()
        marks = [added[i].content for i in sorted(set(openings)) if i in added and _cuts(i, added)]
        self._openings = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._kept: OrderedDict[bytes, Keys] = OrderedDict()
        self._ids = 0
        self._lock = threading.Lock()

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text; each but the first begins with a token that opens a message."""
        starts = [] if self._openings is None else [m.start() for m in self._openings.finditer(text)]
        return [text[a:b] for a, b in pairwise([0, *starts, len(text)]) if a < b]

    def encode(self, text: str, most: int | None, salt: str | None) -> Sequence[Keys] | int:
        """Return the ids of a text, in parts; only their number where that is more than `most`."""
        pieces = self.split(text)
        names = [_name(piece, salt) for piece in pieces]
        with self._lock:
            known = {name: self._kept[name] for name in names if name in self._kept}
            for name in known:
                self._kept.move_to_end(name)
        fresh = {name: piece for name, piece in zip(names, pieces, strict=True) if name not in known}
        encoded = self._backend.encode_batch_fast(list(fresh.values()), add_special_tokens=False)
        lengths = {name: len(e) for name, e in zip(fresh, encoded, strict=True)}
        total = sum(len(known[name]) if name in known else lengths[name] for name in names)
        if most is not None and total > most:  # listing millions of ids holds the lock for seconds
            return total
        found = {name: as_keys(e.ids) for name, e in zip(fresh, encoded, strict=True)}
        self._keep(found)
        return [known[name] if name in known else found[name] for name in names]

    def forget(self) -> None:
        """Forget every piece."""
        with self._lock:
            self._kept.clear()
            self._ids = 0

    def _keep(self, found: dict[bytes, Keys]) -> None:
        with self._lock:
            for name, ids in found.items():
                if name not in self._kept:
                    self._kept[name] = ids
                    self._ids += len(ids)
            while self._ids > self._limit:
                _, gone = self._kept.popitem(last=False)
                self._ids -= len(gone)


def _name(piece: str, salt: str | None) -> bytes:
    digest = hashlib.blake2b(repr(salt).encode(), digest_size=16)
    digest.update(piece.encode("utf-8", "surrogatepass"))
    return digest.digest()


def _cuts(opening: int, added: dict[int, AddedToken]) -> bool:
    """Say whether this token is found in a text wherever it stands, whatever is before it."""
    token = added[opening]
    text: str = token.content
    if not token.special or token.normalized or token.lstrip or token.single_word:
        return False
    others = (other.content for i, other in added.items() if i != opening)
    return not any(
        text in other or any(other.endswith(text[:n]) for n in range(1, len(text))) for other in others
    )


def joined(parts: Sequence[Keys]) -> Keys:
    """Return the ids of all parts, int64 [n]."""
    return as_keys(np.concatenate([np.empty(0, dtype=np.int64), *parts]))
