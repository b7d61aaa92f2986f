"""Keys: a prompt as int64 numbers; two prompts share a prefix iff their keys do (R3).

A text token is its id. Numbers below zero are kept for image positions. A `Namespace` separates what must
never match: another model, dtype, chunk table or cache salt.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]


def as_keys(ids: Sequence[int] | Keys) -> Keys:
    """Return `ids` as a read-only int64 array of shape [n]; the input is copied."""
    keys = np.array(ids, dtype=np.int64)
    keys.setflags(write=False)
    return keys


def common_prefix(a: Keys, b: Keys) -> int:
    """Return how many leading keys `a` and `b` share."""
    n, start, size = min(len(a), len(b)), 0, 1024
    while start < n:  # piece by piece, since most differ early
        differ = a[start : min(start + size, n)] != b[start : min(start + size, n)]
        first = int(differ.argmax())
        if differ[first]:
            return start + first
        start, size = start + len(differ), size * 4
    return n


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must agree for two prompts to match at all, as one hash (hex)."""

    digest: str

    @classmethod
    def of(cls, *parts: object) -> "Namespace":
        """Hash the parts that change bytes: weights, geometry, arithmetic, format version."""
        return cls(hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest())

    def salted(self, salt: str | None) -> "Namespace":
        """Return the namespace of one tenant: nobody with another salt can hit or time its entries."""
        return self if salt is None else Namespace.of(self.digest, "salt", salt)


def prefix_hashes(namespace: Namespace, keys: Keys, positions: Iterable[int]) -> tuple[bytes, ...]:
    """Return a 16-byte hash of (namespace, keys[0:p]) for each p of the ascending `positions`."""
    running = hashlib.blake2b(namespace.digest.encode(), digest_size=16)
    hashes = []
    done = 0
    for position in positions:
        running.update(np.ascontiguousarray(keys[done:position]).tobytes())
        done = position
        hashes.append(running.copy().digest())
    return tuple(hashes)
