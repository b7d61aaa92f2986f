"""Records on their way into memory: each becomes a parked conversation like any other, and is found there.

Only what memory lacks is read. What came is lent and moved as what was parked; the record stays (K2, S5).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from regrow.actors.disk_messages import (
    ReadRecord,
    RecordRead,
)
from regrow.actors.on_disk import OnDisk
from regrow.actors.parking import Parkable, Parking
from regrow.actors.shelf import Shelf
from regrow.policy.directory import CutHash, HolderId


@dataclass(frozen=True, slots=True)
class _Coming:
    """leases: by prefix, of the states that are read. new: the conversation is read too."""

    leases: dict[bytes, int]
    new: bool


class Restoring:
    """bytes_per_state: of a running state, 0 where the model has none. read: have the disk read."""

    def __init__(
        self, shelf: Shelf, parking: Parking, bytes_per_state: int, read: Callable[[ReadRecord], None]
    ) -> None:
        self._shelf = shelf
        self._parking = parking
        self._bytes_per_state = bytes_per_state
        self._read = read
        self._coming: dict[HolderId, _Coming] = {}
        self._waiters: dict[HolderId, list[asyncio.Future[HolderId | None]]] = {}

    def restore(self, record: OnDisk, position: int, at: float) -> asyncio.Future[HolderId | None]:
        """Bring the first `position` keys of a record into memory; the conversation that has them, or None
        where there is no room, or the record is not what it was."""
        waiter: asyncio.Future[HolderId | None] = asyncio.get_running_loop().create_future()
        count = next(n for n, (_, stop, _) in enumerate(record.spans, 1) if stop >= position)
        _, end, prefix = record.spans[count - 1]
        name = self._find((end, prefix))
        if name is None:
            name = self._begin(record, count, position, at)
        elif name not in self._coming:
            self._fetch_state(name, record, position)
        if name is None:
            waiter.set_result(None)
        else:
            self._waiters.setdefault(name, []).append(waiter)
            self.settle()
        return waiter

    def came(self, read: RecordRead) -> None:
        """What was asked for is in memory, or could not be read."""
        coming = self._coming.pop(read.name, None)
        if coming is None:
            return  # of an earlier life
        cells, states = read.parts or (None, ())
        for prefix, snapshot in states:
            self._shelf.keep_state(coming.leases.pop(prefix), prefix, snapshot)
        self._shelf.give_back(coming.leases.values())
        if coming.new:
            self._parking.parked(read.name, cells)

    def settle(self) -> None:
        """Answer those whose conversation is here now, or never will be."""
        for name in [name for name in self._waiters if name not in self._coming]:
            kept = self._parking.conversations.get(name)
            if kept is None or kept.whole:
                for waiter in self._waiters.pop(name):
                    if not waiter.done():
                        waiter.set_result(None if kept is None else name)

    def disk_lost(self) -> None:
        """Nothing will come any more."""
        for name in tuple(self._coming):
            self.came(RecordRead(name, None))

    def _find(self, end: CutHash) -> HolderId | None:
        """Return a conversation in memory, or on its way there, that has these cells."""
        names = (name for name, kept in self._parking.conversations.items() if end in kept.cuts)
        return next(names, None)

    def _begin(self, record: OnDisk, count: int, position: int, at: float) -> HolderId | None:
        spans = record.spans[:count]
        end = spans[-1][1]
        edges = tuple((stop, prefix) for _, stop, prefix in spans)
        states = [state for state in record.states if state[0] <= end]
        holder = record.holder
        holder = replace(holder, length=end, cuts=tuple(cut for cut in holder.cuts if cut[0] <= end))
        what = Parkable(holder, record.namespace, record.keys[:end], edges, tuple(p for _, p in states))
        granted = self._parking.park(holder.id, what, at)
        if granted is None:
            return None
        name, ranges = granted
        whole = self._parking.conversations[name].holder.length == end
        leases = self._reserve(name, states, position) if whole else None
        if leases is None:
            self._parking.parked(name, None)
            return None
        self._coming[name] = _Coming(leases, new=True)
        wanted = tuple(span for span in spans if (span[0], span[1]) in ranges)
        lacking = tuple(state for state in states if state[1] in leases)
        self._read(ReadRecord(name, record.name, wanted, lacking))
        return name

    def _fetch_state(self, name: HolderId, record: OnDisk, position: int) -> None:
        """Read the state at `position` for a conversation in memory that has lost it."""
        states = [state for state in record.states if state[0] == position]
        leases = self._reserve(name, states, position)
        if leases:
            self._coming[name] = _Coming(leases, new=False)
            self._read(ReadRecord(name, record.name, (), tuple(states)))

    def _reserve(self, name: HolderId, states: Sequence[CutHash], position: int) -> dict[bytes, int] | None:
        """Lease room for the states that memory lacks, the one at `position` first, as many as fit; None
        where even that one does not."""
        leases: dict[bytes, int] = {}
        for at, prefix in sorted(states, key=lambda state: state[0] != position):
            if self._bytes_per_state and prefix not in self._shelf.states:
                lease = self._shelf.reserve_state(name, prefix, self._bytes_per_state)
                if lease:
                    leases[prefix] = lease
                elif at == position:
                    return None
        return leases
