"""Single flight: a prefix that is being read now is waited for, not read again (S6)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """A slot that is reading a prompt: the prefix hashes at its plan's cuts, ascending, and how far it is."""

    slot: int
    cuts: tuple[tuple[int, bytes], ...]
    position: int


def awaited(
    cuts: Sequence[tuple[int, bytes]], have: int, readers: Sequence[Reading]
) -> tuple[Reading, int] | None:
    """Return the reader to wait for, and the cut to wait for, or None where reading at once is no slower.

    cuts: (position, prefix hash) of the waiting prompt's plan, ascending. have: what it could resume from
    now. A reader is worth waiting for while it is at or past `have` and will still come to a deeper cut that
    both prompts share: what remains of its way there is never longer than the whole way.
    """
    best: tuple[Reading, int] | None = None
    for reader in readers:
        common = deepest_common(cuts, reader.cuts)
        if common > max(have, reader.position) and reader.position >= have and (not best or common > best[1]):
            best = reader, common
    return best


def deepest_common(a: Sequence[tuple[int, bytes]], b: Sequence[tuple[int, bytes]]) -> int:
    """Return the deepest position at which both plans cut the same keys, or 0.

    Prefix hashes agree up to the point where the prompts part, and never beyond it.
    """
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high) // 2
        if a[middle] == b[middle]:
            low = middle + 1
        else:
            high = middle
    return a[low - 1][0] if low else 0
