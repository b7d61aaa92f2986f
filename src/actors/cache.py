"""CacheActor: owns every cached byte, in one ledger (B1). Others hold entry ids, and pin before use.

`Reserve` is answered at once, granted or refused. To make room it evicts the entries that save the least
reading per byte (B2); owners are told `Evicted`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from regrow.actors.messages import (
    CacheReport,
    CacheStats,
    Drop,
    Evicted,
    Keep,
    Pin,
    Reserve,
    Unpin,
)
from regrow.actors.runtime import Down
from regrow.gpu.types import Snapshot
from regrow.policy.eviction import Evictable, victims
from regrow.policy.keys import Namespace
from regrow.policy.ledger import Ledger


@dataclass(slots=True)
class _Entry:
    """A checkpoint: `saved` tokens need not be read where it is used."""

    namespace: Namespace
    snapshot: Snapshot
    saved: int
    used: int
    uses: int = 0
    pins: int = 0


class CacheActor:
    """`tell_owner(name, message)` reaches the actor that holds a lease. `life` counts this actor's restarts:
    an id of an earlier life is unknown, and never somebody else's."""

    def __init__(self, budget: int, life: int, tell_owner: Callable[[str, object], None]) -> None:
        self._ledger = Ledger(budget, last=life << 32)
        self._tell_owner = tell_owner
        self._owners: dict[int, tuple[str, int]] = {}
        self._entries: dict[int, _Entry] = {}
        self._clock = itertools.count(1)
        self._evictions = 0
        self._refusals = 0

    async def started(self) -> None:
        """Nothing to do: a fresh cache is empty."""

    async def handle(self, message: object) -> object:
        match message:
            case Reserve():
                return self._reserve(message)
            case Keep(lease, namespace, snapshot, saved):
                if lease in self._owners:
                    self._ledger.commit(lease)
                    self._entries[lease] = _Entry(namespace, snapshot, saved, next(self._clock))
            case Drop(ids):
                for entry in ids:
                    self._forget(entry)
            case Pin(entry):
                return self._pin(entry)
            case Unpin(entry):
                if entry in self._entries:
                    self._entries[entry].pins -= 1
            case Down(name, epoch):
                for lease in [i for i, owner in self._owners.items() if owner == (name, epoch)]:
                    self._forget(lease)
            case CacheStats():
                return self._report()
            case _:
                raise TypeError(f"the cache does not know {type(message).__name__}")
        return None

    def _reserve(self, message: Reserve) -> tuple[int, ...]:
        granted: list[int] = []
        for size in message.sizes:
            lease = self._ledger.reserve(message.kind, size)
            if lease is None and self._evict(size):
                lease = self._ledger.reserve(message.kind, size)
            if lease is None:
                self._refusals += 1
                break
            self._owners[lease] = (message.owner, message.epoch)
            granted.append(lease)
        return tuple(granted)

    def _evict(self, size: int) -> bool:
        """Make room for `size` bytes, or evict nothing where that cannot be done."""
        candidates = [
            Evictable(i, self._ledger.size(i), e.saved, e.used, e.uses)
            for i, e in self._entries.items()
            if not e.pins
        ]
        chosen = victims(candidates, size - self._ledger.free)
        owners: dict[str, set[int]] = {}
        for entry in chosen:
            owners.setdefault(self._owners[entry][0], set()).add(entry)
            self._forget(entry)
            self._evictions += 1
        for owner, ids in owners.items():
            self._tell_owner(owner, Evicted(frozenset(ids)))
        return bool(chosen)

    def _pin(self, entry: int) -> Snapshot | None:
        kept = self._entries.get(entry)
        if kept is None:
            return None
        kept.pins += 1
        kept.uses += 1
        kept.used = next(self._clock)
        return kept.snapshot

    def _forget(self, entry: int) -> None:
        if self._owners.pop(entry, None) is not None:
            self._entries.pop(entry, None)
            self._ledger.release(entry)

    def _report(self) -> CacheReport:
        return CacheReport(
            budget=self._ledger.budget,
            used=self._ledger.by_kind,
            peak=self._ledger.peak,
            entries=len(self._entries),
            pinned=sum(e.pins > 0 for e in self._entries.values()),
            evictions=self._evictions,
            refusals=self._refusals,
        )

    def check_integrity(self) -> None:
        """Assert that the ledger covers the tensors and every entry has an owner (B1)."""
        assert self._entries.keys() <= self._owners.keys()
        assert set(self._owners) == set(self._ledger.leases)
        for i, entry in self._entries.items():
            assert entry.pins >= 0
            assert entry.snapshot.nbytes <= self._ledger.size(i)
        assert self._ledger.used <= self._ledger.budget
