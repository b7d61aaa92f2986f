"""What to evict: what is worth least per byte (B2).

A conversation goes step by step from its end, a step being what lies between two places where it can be
resumed; and since it is nearly always resumed at its end, the running states inside it go before that. How
often a place was used says nothing: where a conversation went on from before, it has left behind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

INNER = 0.1  # how often a conversation is resumed at a given place inside it, over at its end
ROOT_USES = 9  # what a root counts for: chats open with it as often as ten of them go on
CLEARLY = 8.0  # what has to make room may be worth this much more than what comes: values are rough


@dataclass(frozen=True, slots=True)
class Evictable:
    """Something that may go: its bytes (its part of those that it shares), the tokens to be read again for
    the lack of it, its last use (a stamp), and the uses it counts for. kind: to be counted by."""

    nbytes: float
    saved: float
    used: int
    uses: int = 0
    kind: str = ""


def value(entry: Evictable, now: int) -> float:
    """Return tokens saved x chance of use, per byte. The chance falls with age, slowly, and rises with each
    use. What frees nothing is worth most."""
    if not entry.nbytes:
        return float("inf")
    chance = (1 + entry.uses) / math.sqrt(1 + max(now - entry.used, 0))
    return entry.saved * chance / entry.nbytes


def yields(entry: Evictable, to: Evictable | None, now: int) -> bool:
    """Say whether an entry has to make room for another one; for None every one has. A root only makes room
    for what is worth more."""
    more = 1.0 if entry.kind == "root" else CLEARLY
    return to is None or value(entry, now) <= more * value(to, now)


def losses(positions: Sequence[int]) -> tuple[float, ...]:
    """Return how many tokens it costs, on average, if one of the running states at these ascending positions
    of a conversation goes: those down to the next one, where it is resumed there (bench/trace.py says how
    much this saves)."""
    gaps = [b - a for a, b in zip((0, *positions), positions, strict=False)]
    return tuple(gap if number == len(gaps) else gap * INNER for number, gap in enumerate(gaps, 1))
