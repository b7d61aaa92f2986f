"""The chain: which checkpoints a session holds, ascending, and which one goes when there are too many (P5).

P5 says the least recently used; here it is what costs least to do without, the one closest above another.

A chain is a value: every function returns a new one. The bytes belong to the cache; the chain holds entry
ids, and says which of them its owner must give back.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ChainEntry:
    """A checkpoint at `position`, kept by the cache under `entry_id`, the prefix hash there.

    used: the stamp of its last use; a larger one is later. protected: not a victim while others are (P3).
    """

    position: int
    entry_id: bytes
    used: int
    protected: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """The checkpoints of one session by ascending position. clock: the last stamp that was given out."""

    entries: tuple[ChainEntry, ...] = ()
    clock: int = 0

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(entry.position for entry in self.entries)

    def at(self, position: int) -> ChainEntry | None:
        return next((entry for entry in self.entries if entry.position == position), None)

    def added(self, position: int, entry_id: bytes, *, protected: bool) -> "Chain":
        """Return the chain with a checkpoint at `position`. Where there is one already only its stamp moves,
        and `entry_id` is not taken (P5)."""
        if self.at(position) is not None:
            return self.touched(position)
        clock = self.clock + 1
        entry = ChainEntry(position, entry_id, clock, protected)
        return Chain(tuple(sorted((*self.entries, entry), key=lambda e: e.position)), clock)

    def touched(self, position: int) -> "Chain":
        """Return the chain in which the checkpoint at `position` is the one used last."""
        clock = self.clock + 1
        return Chain(
            tuple(replace(e, used=clock) if e.position == position else e for e in self.entries), clock
        )

    def protecting(self, positions: Collection[int]) -> "Chain":
        """Return the chain in which exactly `positions` are protected. A newer prompt's set replaces the
        older one, or every assistant start there ever was would stay (P3)."""
        entries = tuple(replace(e, protected=e.position in positions) for e in self.entries)
        return replace(self, entries=entries)

    def cut_back(self, position: int) -> tuple[tuple[bytes, ...], "Chain"]:
        """Return the ids of the checkpoints above `position` and the chain without them: for the first write
        at or above it (P5)."""
        return self._split(lambda entry: entry.position > position)

    def without(self, ids: Collection[bytes]) -> "Chain":
        """Return the chain without the entries that the cache has evicted."""
        return self._split(lambda entry: entry.entry_id in ids)[1]

    def limited(self, limit: int) -> tuple[tuple[bytes, ...], "Chain"]:
        """Return the ids of the `victims` and the chain without them."""
        going = self.victims(limit)
        return self._split(lambda entry: entry in going)

    def victims(self, limit: int) -> tuple[ChainEntry, ...]:
        """Return what must go for at most `limit` to stay: what lies closest above another one first, of
        equals the least recently used, so that the rest is spread over the conversation. Never a protected
        one, so more than `limit` stay where more are protected. A limit of 0 keeps none."""
        if limit == 0:
            return self.entries
        left, going = list(self.entries), []
        for _ in range(len(left) - limit):
            below = dict(zip((e.position for e in left), (0, *(e.position for e in left)), strict=False))
            open_to_go = [entry for entry in left if not entry.protected]
            if not open_to_go:
                break
            going.append(min(open_to_go, key=lambda e: (e.position - below[e.position], e.used)))
            left.remove(going[-1])
        return tuple(going)

    def _split(self, goes: Callable[[ChainEntry], bool]) -> tuple[tuple[bytes, ...], "Chain"]:
        ids = tuple(entry.entry_id for entry in self.entries if goes(entry))
        return ids, replace(self, entries=tuple(entry for entry in self.entries if not goes(entry)))
