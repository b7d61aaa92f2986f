"""What to evict: what is worth least per byte (B2).

A conversation goes step by step from its end, a step being what lies between two places where it can be
resumed; and since it is nearly always resumed at its end, the running states inside it go before that. How
often a place was used says nothing: where a conversation went on from before, it has left behind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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


def height(entry: Evictable) -> float:
    """Return tokens saved x chance of use, per byte, as of its last use. The chance rises with each use. What
    frees nothing is worth most."""
    return entry.saved * (1 + entry.uses) / entry.nbytes if entry.nbytes else math.inf


def value(entry: Evictable, now: int) -> float:
    """Return what an entry is worth now: the chance of use falls with age, slowly."""
    return height(entry) / math.sqrt(1 + max(now - entry.used, 0))


def values(
    heights: npt.NDArray[np.float64], used: npt.NDArray[np.int64], now: int
) -> npt.NDArray[np.float64]:
    """Return the `value` of many entries, by their heights and last uses."""
    faded: npt.NDArray[np.float64] = heights / np.sqrt(1 + np.maximum(now - used, 0))
    return faded


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
