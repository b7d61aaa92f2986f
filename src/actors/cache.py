"""CacheActor: owns every cached byte, in one ledger (B1). Others hold prefix hashes, and pin before use.

What is kept lies on the `Shelf` and in the `Parking`; this actor answers at once, granted or refused, and
tells the engine's directory and the holders what has changed after every message.
"""

import asyncio
from collections.abc import Callable

from regrow.actors.behind import WriteBehind
from regrow.actors.disk_messages import (
    DiskChanged,
    ForgetRoot,
    PurgeRecords,
    RecordRead,
    RecordsWritten,
    Restore,
    Save,
    SaveNow,
    WriteOut,
    WriteRecords,
)
from regrow.actors.messages import (
    AddRoot,
    CacheChanged,
    CacheReport,
    CacheStats,
    DropRoot,
    Evicted,
    Forget,
    Holds,
    KeepState,
    Lend,
    LetGo,
    Park,
    Parked,
    ParkedReport,
    Pin,
    Purge,
    Repay,
    ReserveStates,
    Unpin,
)
from regrow.actors.parking import Parking
from regrow.actors.restoring import Restoring
from regrow.actors.runtime import Down
from regrow.actors.scrub import Checksums, NextCopy, Scrub
from regrow.actors.shelf import Shelf
from regrow.policy.directory import HolderId


class CacheActor:
    """budget: bytes. bytes_per_token: what a cell of all layers weighs. now: the engine clock in seconds.

    root_cells: roots may keep cells of their own. `tell(name, message)` reaches another actor. `life` counts
    this actor's restarts: a lease of an earlier life is unknown, and never somebody else's. bytes_per_state:
    of a running state. disk: there is a disk tier.
    """

    def __init__(
        self,
        budget: int,
        bytes_per_token: int,
        life: int,
        root_cells: bool,
        tell: Callable[[str, object], None],
        now: Callable[[], float],
        bytes_per_state: int = 0,
        disk: bool = False,
    ) -> None:
        self._shelf = Shelf(budget, life, root_cells=root_cells)
        self._parking = Parking(self._shelf, bytes_per_token)
        self._tell = tell
        self._now = now
        self._disk = disk
        self._behind = WriteBehind(
            self._shelf,
            self._parking.conversations,
            bytes_per_token,
            lambda name, records: tell("disk", WriteRecords(name, records)),
            lambda slot: tell(f"slot-{slot.key}", SaveNow()),
        )
        self._restoring = Restoring(
            self._shelf, self._parking, bytes_per_state, lambda read: tell("disk", read)
        )
        self._scrub = Scrub(self._shelf)
        self._written_out: list[asyncio.Future[None]] = []

    async def started(self) -> None:
        """Nothing to do: a fresh cache is empty."""

    async def handle(self, message: object) -> object:
        answer = self._handle(message)
        self._tell_changes()
        self._restoring.settle()
        self._parking.weights.refresh()
        if self._behind.at_rest:
            self._answer_written_out()
        return answer

    def _handle(self, message: object) -> object:
        shelf, parking = self._shelf, self._parking
        match message:
            case ReserveStates(holder, wanted):
                return tuple(shelf.reserve_state(holder, *state) for state in wanted)
            case KeepState(lease, prefix, snapshot):
                return shelf.keep_state(lease, prefix, snapshot)
            case LetGo(holder, prefixes, leases, spans_above):
                shelf.give_back(leases)
                shelf.let_go(holder, prefixes)
                if spans_above is not None:
                    shelf.let_go_spans(holder, spans_above)
            case Pin(prefix):
                return shelf.pin(prefix)
            case Unpin(prefix):
                shelf.unpin(prefix)
            case Park(slot, what):
                return parking.park(slot, what, self._now())
            case Parked(name, cells):
                if name.kind == "disk":
                    self._behind.copied(name, cells)
                else:
                    parking.parked(name, cells)
            case Save(slot, what):
                return self._behind.save(slot, what)
            case RecordsWritten(name, well):
                self._behind.written(name, well=well)
            case Restore(record, position):
                found = self._behind.records.get(record)
                return found and self._restoring.restore(found, position, self._now())
            case RecordRead():
                self._restoring.came(message)
            case DiskChanged(added, gone):
                self._behind.changed(added, gone)
            case WriteOut():
                self._written_out.append(asyncio.get_running_loop().create_future())
                return self._written_out[-1]
            case Lend(holder, position):
                return parking.lend(holder, position)
            case Repay(holder, taker):
                parking.repay(holder, taker)
            case AddRoot(prefix, position):
                parking.add_root(prefix, position)
            case DropRoot(prefix):
                shelf.drop_root(prefix)
            case Purge(prefixes):
                self._purge(prefixes)
            case Forget(root):
                return self._forget(root)
            case NextCopy():
                return self._scrub.next()
            case Checksums():
                changed = self._scrub.came(message)
                if changed is not None:
                    self._purge(frozenset({changed}))
            case Holds(prefixes):
                return parking.may_hold(prefixes) or self._behind.may_hold(prefixes)
            case Down(name="engine"):
                shelf.announce()
                parking.announce()
            case Down(name="roots"):
                shelf.drop_roots()
            case Down(name="device"):
                self._behind.device_lost()
                parking.drop_unfinished()
            case Down(name="disk"):
                self._behind.disk_lost()
                self._restoring.disk_lost()
            case Down(name, _):
                slot = HolderId("slot", int(name.removeprefix("slot-")))
                self._behind.slot_lost(slot)
                shelf.forget_holder(slot)
            case CacheStats():
                return self._report()
            case _:
                raise TypeError(f"the cache does not know {type(message).__name__}")
        return None

    def _purge(self, prefixes: frozenset[bytes]) -> None:
        self._parking.purge(prefixes)
        self._forget_on_disk(PurgeRecords(prefixes))

    def _forget(self, root: bytes | None) -> int:
        """Drop one root, or everything that is not in use; return how many things went."""
        if root is not None:
            if root not in self._shelf.roots:
                return 0
            self._shelf.evict_root(root)
            if self._disk:
                self._tell("disk", ForgetRoot(root))
            return 1
        self._forget_on_disk(PurgeRecords(None))
        return self._parking.forget_all() + self._shelf.forget_all()

    def _forget_on_disk(self, purge: PurgeRecords) -> None:
        self._behind.give_up(purge.prefixes)
        if self._disk:
            self._tell("disk", purge)

    def _answer_written_out(self) -> None:
        while self._written_out:
            waiter = self._written_out.pop()
            if not waiter.done():
                waiter.set_result(None)

    def _tell_changes(self) -> None:
        changes = self._shelf.news.take()
        parked = [kept.holder.id for kept in changes.kept if kept.holder.id.kind == "parked"]
        if self._disk and parked:
            self._behind.kept(parked)
        for holder, prefixes in changes.evicted:
            if holder.kind == "slot":
                self._tell(f"slot-{holder.key}", Evicted(prefixes))
            elif holder.kind == "root":
                self._tell("roots", Evicted(prefixes))
        if changes.states_added or changes.states_removed or changes.kept or changes.gone:
            self._tell(
                "engine",
                CacheChanged(changes.states_added, changes.states_removed, changes.kept, changes.gone),
            )

    def _report(self) -> CacheReport:
        shelf, now = self._shelf, self._now()
        exclusive = shelf.exclusive_bytes()
        return CacheReport(
            budget=shelf.ledger.budget,
            used=shelf.bytes_by_kind(),
            peak=shelf.ledger.peak,
            states=len(shelf.states),
            pinned=sum(state.pins > 0 for state in shelf.states.values()),
            spans=len(shelf.spans),
            parked=tuple(
                ParkedReport(
                    f"parked-{name.key}",
                    kept.holder.length,
                    exclusive[name],
                    now - kept.parked_at,
                    kept.uses,
                )
                for name, kept in self._parking.conversations.items()
            ),
            evictions=dict(shelf.evictions),
            refusals=shelf.refusals,
            changed=self._scrub.changed,
        )

    def check_integrity(self) -> None:
        """Assert that the ledger equals what is kept and everything kept is held (B1)."""
        self._shelf.check_integrity()
        self._parking.check_integrity()
