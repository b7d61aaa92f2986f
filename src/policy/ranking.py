"""What may go, by what it is worth (B2), found without weighing all of it anew.

Values fall with age, each from its own height and since its own last use, so that no order of them lasts.
What lasts is the height; all values of now are one operation on two arrays, and only the least are sorted.
"""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np

from regrow.policy.eviction import Evictable, height, values

FEW = 64  # of the least, sorted at first; there is seldom a need for more
Name = TypeVar("Name", bound=Hashable)


class Ranking(Generic[Name]):
    """What may go, by name."""

    def __init__(self) -> None:
        self._entries: dict[Name, tuple[int, Evictable]] = {}
        self._names: list[Name | None] = []
        self._unused: list[int] = []
        self._heights = np.empty(0)
        self._used = np.empty(0, np.int64)

    def put(self, name: Name, entry: Evictable | None) -> None:
        """Note what a name is worth from now on; None: it may not go, or is not there any more."""
        if entry is None:
            if name in self._entries:
                place, _ = self._entries.pop(name)
                self._names[place] = None
                self._unused.append(place)
            return
        place = self._entries[name][0] if name in self._entries else self._place()
        self._entries[name] = place, entry
        self._names[place] = name
        self._heights[place], self._used[place] = height(entry), entry.used

    def entries(self) -> dict[Name, Evictable]:
        """Return everything that may go."""
        return {name: entry for name, (_, entry) in self._entries.items()}

    def ascending(self, now: int) -> Iterator[tuple[float, Name, Evictable]]:
        """Give what may go with its value, what is worth least first, of equals what was used longest ago.
        Ends with the next `put`."""
        count = len(self._names)
        worth = values(self._heights[:count], self._used[:count], now)
        few, below = FEW, -np.inf
        while below < np.inf:
            limit = np.partition(worth, few - 1)[few - 1] if few < count else np.inf
            places = np.flatnonzero((worth > below) & (worth <= limit))
            for place in places[np.lexsort((self._used[places], worth[places]))].tolist():
                name = self._names[place]
                if name is not None:
                    yield float(worth[place]), name, self._entries[name][1]
            few, below = 8 * few, limit

    def _place(self) -> int:
        if self._unused:
            return self._unused.pop()
        if len(self._names) == len(self._used):
            more = max(FEW, len(self._names))
            self._heights = np.concatenate([self._heights, np.empty(more)])
            self._used = np.concatenate([self._used, np.empty(more, np.int64)])
        self._names.append(None)
        return len(self._names) - 1
