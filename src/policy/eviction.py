"""What to evict: the entries that are worth least per byte (B2)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evictable:
    """An entry that may go: its bytes, the tokens it saves from reading, its last use (a stamp) and uses."""

    entry: int
    nbytes: int
    saved: int
    used: int
    uses: int


def value(entry: Evictable, now: int) -> float:
    """Return tokens saved x chance of use, per byte. The chance falls with age and rises with each use."""
    chance = (1 + entry.uses) / (1 + now - entry.used)
    return entry.saved * chance / entry.nbytes


def victims(entries: Sequence[Evictable], needed: int) -> tuple[int, ...]:
    """Return the least valuable entries that together free `needed` bytes, or none where all cannot."""
    if needed <= 0 or sum(e.nbytes for e in entries) < needed:
        return ()
    now = max(e.used for e in entries)
    chosen = []
    for entry in sorted(entries, key=lambda e: (value(e, now), e.entry)):
        chosen.append(entry.entry)
        needed -= entry.nbytes
        if needed <= 0:
            break
    return tuple(chosen)
