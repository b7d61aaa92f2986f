"""Write-behind: what goes to disk, one conversation at a time, and what that keeps in memory (B3, D5).

An idle session's cells that the disk lacks are copied to buffers that count in the ledger until the write has
ended; what lies on the shelf already is used from there and kept from eviction as long. A system prompt is
written before the conversation that opens with it, so that all of them can name it.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import structlog

from regrow.actors.on_disk import OnDisk, ToSave
from regrow.actors.parking import Parkable, Range
from regrow.actors.shelf import KEY_BYTES, Conversation, Shelf, Span, State
from regrow.gpu.types import HostCells
from regrow.policy.directory import CutHash, HolderId
from regrow.policy.ledger import Kind
from regrow.store.record import RecordKind
from regrow.store.records import PartKey

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Writing:
    """What is on its way to disk from a slot or a conversation in memory: `ranges` of it are copied first.
    lease: of the buffers for them."""

    name: HolderId
    source: HolderId
    what: Parkable
    spans: tuple[PartKey, ...]
    states: tuple[CutHash, ...]
    ranges: tuple[PartKey, ...]
    pinned: tuple[Span, ...]
    kept: dict[bytes, State]
    lease: int | None
    cells: dict[PartKey, HostCells] = field(default_factory=dict)
    copying: bool = True
    given_up: bool = False


class WriteBehind:
    """bytes_per_token: what a cell of all layers weighs. write: have the disk write records under a name.
    ready: tell a slot that the disk has time."""

    def __init__(
        self,
        shelf: Shelf,
        conversations: dict[HolderId, Conversation],
        bytes_per_token: int,
        write: Callable[[HolderId, tuple[ToSave, ...]], None],
        ready: Callable[[HolderId], None],
    ) -> None:
        self.records: dict[HolderId, OnDisk] = {}
        self._shelf = shelf
        self._conversations = conversations
        self._bytes_per_token = bytes_per_token
        self._write = write
        self._ready = ready
        self._parts: Counter[PartKey] = Counter()
        self._cuts: Counter[CutHash] = Counter()
        self._keys: dict[HolderId, int] = {}
        self._failed: dict[HolderId, None] = {}
        self._refused = False
        self._writing: _Writing | None = None
        self._pending: dict[HolderId, None] = {}
        self._waiting: dict[HolderId, bool] = {}  # the slot, and whether it was told
        self._numbers = itertools.count((shelf.life << 32) + 1)

    @property
    def at_rest(self) -> bool:
        """Whether nothing is being written, or waits for it."""
        return self._writing is None and not self._pending and not self._waiting

    def changed(self, added: Sequence[OnDisk], gone: Collection[HolderId]) -> None:
        """Note which records can be used. Their keys are in memory, and count (B1)."""
        for name in self.records.keys() & set(gone):
            record = self.records.pop(name)
            self._parts.subtract(_parts(record))
            self._cuts.subtract(record.holder.cuts)
            if name in self._keys:
                self._give_back(self._keys.pop(name))
        for record in added:
            if record.holder.id not in self.records:
                self.records[record.holder.id] = record
                self._parts.update(_parts(record))
                self._cuts.update(record.holder.cuts)
                lease = self._lease("keys", KEY_BYTES * len(record.keys))
                if lease is not None:
                    self._keys[record.holder.id] = lease

    def may_hold(self, prefixes: Collection[bytes]) -> bool:
        """Say whether what is on its way to disk has one of these prefixes."""
        writing = self._writing
        return writing is not None and any(prefix in prefixes for _, prefix in writing.what.holder.cuts)

    def save(self, slot: HolderId, what: Parkable | None) -> tuple[HolderId, tuple[Range, ...]] | None:
        """Begin to write what a slot holds; return a name and the ranges to be copied for it. None where that
        is nothing, where there is no room, or where the slot is to ask again when it is told."""
        self._waiting.pop(slot, None)
        if what is None:
            return None
        if self._writing is not None:
            self._waiting[slot] = False
            return None
        writing = self._begin(slot, what)
        if writing is None:
            return None
        if not writing.ranges:
            self._start(writing)
            return None
        return writing.name, tuple((start, stop) for start, stop, _ in writing.ranges)

    def copied(self, name: HolderId, cells: Sequence[HostCells] | None) -> None:
        """The ranges are there; with None the copy failed."""
        writing = self._writing
        if writing is None or writing.name != name:
            return  # of an earlier life
        if cells is None or writing.given_up:
            self.written(name)
            return
        writing.cells.update(zip(writing.ranges, cells, strict=True))
        if writing.lease is not None:
            self._shelf.ledger.commit(writing.lease)
        self._start(writing)

    def kept(self, names: Collection[HolderId]) -> None:
        """These conversations are in memory now, and are to be written too."""
        self._pending.update(dict.fromkeys(names))
        self.go_on()

    def written(self, name: HolderId, *, well: bool | None = None) -> None:
        """A write is over, or was given up (None). One that failed is tried again after the next good one."""
        writing = self._writing
        if writing is None or writing.name != name:
            return
        self._writing = None
        for span in writing.pinned:
            self._shelf.loosen(span)
        for prefix in writing.kept:
            self._shelf.unpin(prefix)
        if writing.lease is not None:
            self._give_back(writing.lease)
        if well is False:
            self._failed[writing.source] = None
        elif well:
            for source in self._failed:
                if source.kind == "slot":
                    self._waiting.setdefault(source, False)
                else:
                    self._pending[source] = None
            self._failed.clear()
        self.go_on()

    def go_on(self) -> None:
        """Write what waits: conversations in memory first, which could be evicted."""
        while self._writing is None and self._pending:
            name = next(iter(self._pending))
            del self._pending[name]
            kept = self._conversations.get(name)
            if kept is not None and kept.whole:
                edges = tuple((self._shelf.spans[key].stop, key[1]) for key in kept.spans)
                states = tuple(p for p, s in self._shelf.states.items() if name in s.holders)
                what = Parkable(kept.holder, kept.namespace, kept.keys, edges, states)
                writing = self._begin(name, what)
                if writing is not None:
                    self._start(writing)
        if self._writing is None:
            for slot in [slot for slot, told in self._waiting.items() if not told]:
                self._waiting[slot] = True
                self._ready(slot)

    def slot_lost(self, slot: HolderId) -> None:
        """A slot has crashed: it will not ask again."""
        self._waiting.pop(slot, None)
        self._failed.pop(slot, None)

    def give_up(self, prefixes: frozenset[bytes] | None) -> None:
        """What shares one of these cuts (None: anything) is not to be written if it is not on its way yet."""
        writing = self._writing
        if writing is not None and (
            prefixes is None or any(prefix in prefixes for _, prefix in writing.what.holder.cuts)
        ):
            writing.given_up = True

    def device_lost(self) -> None:
        """What was to be copied from the device will not come."""
        if self._writing is not None and self._writing.copying:
            self.written(self._writing.name)

    def disk_lost(self) -> None:
        """The disk actor has crashed: it knows of no write any more, and says anew what is there."""
        self.changed((), tuple(self.records))
        if self._writing is not None and not self._writing.copying:
            self.written(self._writing.name, well=False)

    def _begin(self, source: HolderId, what: Parkable) -> _Writing | None:
        """Take hold of what a record needs that the disk lacks; None where that is nothing, or too much."""
        shelf, at = self._shelf, {prefix: position for position, prefix in what.holder.cuts}
        starts = [0, *(stop for stop, _ in what.edges[:-1])]
        spans = tuple((start, *edge) for start, edge in zip(starts, what.edges, strict=True))
        states = tuple(
            sorted((at[p], p) for p in what.states if p in shelf.states or self._parts[at[p], at[p], p])
        )
        lacking = [part for part in spans if not self._parts[part]]
        kept = {p: shelf.states[p] for position, p in states if not self._parts[position, position, p]}
        if not lacking and not kept and self._cuts[what.holder.cuts[-1]]:
            return None
        there = {p: s for p in lacking if (s := shelf.spans.get((p[0], p[2]))) and s.cells}
        ranges = tuple(part for part in lacking if part not in there)
        for span in there.values():
            shelf.fix(span)
        for state in kept.values():
            shelf.fix(state)
        size = sum(stop - start for start, stop, _ in ranges) * self._bytes_per_token
        lease = self._lease("buffer", size) if size else None
        name = HolderId("disk", next(self._numbers))
        cells = {key: span.cells for key, span in there.items() if span.cells is not None}
        pinned = tuple(there.values())
        self._writing = _Writing(name, source, what, spans, states, ranges, pinned, kept, lease, cells)
        if size and lease is None:
            self._refuse(size)
            self.written(name)
            return None
        return self._writing

    def _refuse(self, size: int) -> None:
        """Say, once, that sessions are served and not kept on disk."""
        if not self._refused:
            log.warning("a session has no room to be written to disk from: raise --cache-mib", nbytes=size)
        self._refused = True

    def _lease(self, kind: Kind, size: int) -> int | None:
        lease = self._shelf.reserve(kind, size)
        if lease is not None:
            self._shelf.buffers.add(lease)
        return lease

    def _give_back(self, lease: int) -> None:
        self._shelf.buffers.remove(lease)
        self._shelf.ledger.release(lease)

    def _start(self, writing: _Writing) -> None:
        """Have the roots written that the disk lacks, and then all of it."""
        writing.copying = False
        roots = {r.holder.cuts[-1] for r in self.records.values() if r.kind == "root"}
        records = [
            _record("root", writing, number)
            for number, (_, stop, prefix) in enumerate(writing.spans, 1)
            if prefix in self._shelf.roots and (stop, prefix) not in roots
        ]
        if not records or records[-1].spans != writing.spans:
            records.append(_record("chat", writing, len(writing.spans)))
        self._write(writing.name, tuple(records))


def _record(kind: RecordKind, writing: _Writing, spans: int) -> ToSave:
    """Return the record of the first `spans` spans."""
    what, kept = writing.what, writing.spans[:spans]
    stop = kept[-1][1]
    states = tuple(state for state in writing.states if state[0] <= stop)
    return ToSave(
        kind=kind,
        holder=what.holder.upto(stop),
        namespace=what.namespace,
        keys=what.keys[:stop],
        spans=kept,
        states=states,
        cells={span: writing.cells[span] for span in kept if span in writing.cells},
        snapshots={p: writing.kept[p].snapshot for _, p in states if p in writing.kept},
    )


def _parts(record: OnDisk) -> list[PartKey]:
    return [*record.spans, *((position, position, prefix) for position, prefix in record.states)]
