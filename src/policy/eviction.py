"""What to evict: the entries that are worth least per byte (B2)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evictable:
    """An entry that may go: its bytes, the tokens it saves from reading, its last use (a stamp) and uses.
    kind: to be counted by."""

    entry: int
    nbytes: int
    saved: int
    used: int
    uses: int
    kind: str = ""


def value(entry: Evictable, now: int) -> float:
    """Return tokens saved x chance of use, per byte. The chance falls with age and rises with each use."""
    chance = (1 + entry.uses) / (1 + now - entry.used)
    return entry.saved * chance / entry.nbytes


def worst(entries: Sequence[Evictable]) -> Evictable | None:
    """Return the entry to evict first, or None of none: the one worth least per byte. An entry that frees
    nothing by itself, since others share all its bytes, comes after those that do, the oldest first."""
    if not entries:
        return None
    now = max(entry.used for entry in entries)
    freeing = [entry for entry in entries if entry.nbytes]
    if freeing:
        return min(freeing, key=lambda e: (value(e, now), e.entry))
    return min(entries, key=lambda e: (e.used, e.entry))
