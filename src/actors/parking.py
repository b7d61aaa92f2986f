"""Parked conversations: whole conversations in host memory, as spans and states on the shelf (K1 to K4)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from regrow.actors.shelf import KEY_BYTES, Evictions, Kept, Shelf, Span, SpanKey
from regrow.gpu.types import HostCells
from regrow.policy.directory import Holder, HolderId
from regrow.policy.eviction import Evictable
from regrow.policy.keys import Keys, Namespace

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Parkable:
    """What a slot wants to park: the directory's word of it, its keys, the (stop, prefix hash) of the spans
    it should be cut into, ascending, and the prefixes with a state."""

    holder: Holder
    namespace: Namespace
    keys: Keys
    edges: tuple[tuple[int, bytes], ...]
    states: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Loan:
    """Cells from 0 on, contiguous. whole: they are all of a parked conversation, which can be taken (K2)."""

    cells: tuple[HostCells, ...]
    whole: bool


@dataclass(slots=True)
class Conversation:
    """A parked conversation. whole: every span is filled, so it can be restored. guards: loans of it now."""

    holder: Holder
    namespace: Namespace
    keys: Keys
    lease: int
    spans: tuple[SpanKey, ...]
    parked_at: float
    used: int
    uses: int = 0
    guards: int = 0
    whole: bool = False

    @property
    def told(self) -> Kept:
        """What the engine is told of it."""
        return Kept(self.holder, self.namespace, self.keys)


class Parking:
    """bytes_per_token: what a cell of all layers weighs."""

    def __init__(self, shelf: Shelf, bytes_per_token: int) -> None:
        self.conversations: dict[HolderId, Conversation] = {}
        self._shelf = shelf
        self._bytes_per_token = bytes_per_token
        self._numbers = itertools.count(1)
        shelf.other_evictions = self._evictions

    def park(self, slot: HolderId, what: Parkable, at: float) -> tuple[HolderId, tuple[Range, ...]] | None:
        """Make room for a conversation whose cells are in `slot`, and name the ranges to be copied.

        Spans that are there already are shared (K3, K4). None where it is kept already, or there is no room;
        where there is no room for all of it, a root in it that has no cells of its own gets them if they fit
        (T2): a conversation that ends there.
        """
        if self._kept_already(what.holder):
            return None
        parked = self._park(slot, what, what.edges, at)
        if parked is None:
            upto = [i for i, (_, prefix) in enumerate(what.edges, 1) if self._lacks_cells(prefix)]
            parked = self._park(slot, what, what.edges[: upto[-1]], at) if upto else None
        return parked

    def parked(self, name: HolderId, cells: Sequence[HostCells] | None) -> None:
        """The ranges that `park` named are copied and the conversation can be restored from now on; with None
        the copy failed, and it is forgotten."""
        kept = self.conversations.get(name)
        if kept is None:
            return
        if cells is None:
            self.drop(name)
            return
        waiting = iter(cells)
        for key in kept.spans:
            span = self._shelf.spans[key]
            if span.cells is None:
                span.cells = next(waiting)
                self._shelf.ledger.commit(span.lease)
        kept.whole = True
        self._shelf.news.kept(kept.told)
        for older in self._superseded(kept):
            self.drop(older)
        for start, prefix in kept.spans:
            if not start:
                self._shelf.hold_root_cells(prefix)

    def lend(self, name: HolderId, position: int) -> Loan | None:
        """Return the cells [0, position) of a conversation or a root and guard them until `repay`; None where
        they are not there any more."""
        spans = self._spans(name)
        parts = [
            span.cells.upto(min(span.stop, position))
            for span in spans
            if span.cells is not None and span.start < position
        ]
        if not parts or parts[-1].stop < position or not all(span.cells for span in spans):
            return None
        for span in spans:
            span.pins += 1
        kept = self.conversations.get(name)
        if kept is not None:
            kept.guards += 1
            kept.uses += 1
            kept.used = self._shelf.stamp()
        whole = kept is not None and position == kept.holder.length
        return Loan(tuple(parts), whole)

    def repay(self, name: HolderId, taker: HolderId | None) -> None:
        """End a loan. taker: the slot that the whole conversation has moved to (K2): it holds the spans from
        now on, so that its next park copies only what is new (K3)."""
        for span in self._spans(name):
            span.pins -= 1
            if taker is not None:
                span.holders.add(taker)
        kept = self.conversations.get(name)
        if kept is not None:
            kept.guards -= 1
            if taker is not None and not kept.guards:
                self.drop(name)

    def drop(self, name: HolderId) -> None:
        """Forget a parked conversation; what others hold of it stays."""
        kept = self.conversations.pop(name)
        self._shelf.ledger.release(kept.lease)
        if kept.whole:
            self._shelf.news.gone(name)
        self._shelf.forget_holder(name)

    def drop_unfinished(self) -> None:
        """Forget the conversations whose cells are not all here: what was to copy them is gone."""
        for name in [name for name, kept in self.conversations.items() if not kept.whole]:
            self.drop(name)

    def purge(self, prefixes: frozenset[bytes]) -> None:
        """Drop every conversation that shares one of these cuts."""
        for name, kept in list(self.conversations.items()):
            if any(prefix in prefixes for _, prefix in kept.holder.cuts):
                self.drop(name)

    def announce(self) -> None:
        """Have every conversation told anew."""
        for kept in self.conversations.values():
            if kept.whole:
                self._shelf.news.kept(kept.told)

    def forget_all(self) -> int:
        """Drop every conversation that is not lent or on its way here; return how many."""
        names = [name for name, kept in self.conversations.items() if kept.whole and not kept.guards]
        for name in names:
            self.drop(name)
        return len(names)

    def check_integrity(self) -> None:
        """Assert that conversations are contiguous, and that the ledger is the sum of what is kept (B1)."""
        shelf = self._shelf
        keys = 0
        for kept in self.conversations.values():
            edges = [0, *(shelf.spans[key].stop for key in kept.spans)]
            assert [shelf.spans[key].start for key in kept.spans] == edges[:-1]
            assert edges[-1] == kept.holder.length == len(kept.keys)
            assert kept.guards >= 0
            keys += shelf.ledger.size(kept.lease)
        assert keys + shelf.leased() == shelf.ledger.used <= shelf.ledger.budget

    def _park(
        self, slot: HolderId, what: Parkable, edges: Sequence[tuple[int, bytes]], at: float
    ) -> tuple[HolderId, tuple[Range, ...]] | None:
        shelf, name = self._shelf, HolderId("parked", next(self._numbers))
        length = edges[-1][0]
        starts = [0, *(stop for stop, _ in edges[:-1])]
        keys: list[SpanKey] = []
        new: list[Range] = []
        for start, (stop, prefix) in zip(starts, edges, strict=True):
            keys.append((start, prefix))
            if keys[-1] in shelf.spans:
                shelf.spans[keys[-1]].holders.add(name)  # held before room is made
            else:
                new.append((start, stop))
        cells = sum(stop - start for start, stop in new) * self._bytes_per_token
        if not shelf.make_room(KEY_BYTES * length + cells):
            shelf.forget_holder(name)
            return None
        waiting = dict(new)
        for start, prefix in keys:
            if (start, prefix) not in shelf.spans:
                lease = shelf.ledger.reserve("parked", (waiting[start] - start) * self._bytes_per_token)
                assert lease is not None
                shelf.spans[start, prefix] = Span(lease, start, waiting[start], holders={name})
        lease = shelf.ledger.reserve("keys", KEY_BYTES * length)
        assert lease is not None
        for prefix in what.states:
            if prefix in shelf.states:
                shelf.states[prefix].holders.add(name)
        cuts = tuple(cut for cut in what.holder.cuts if cut[0] <= length)
        used = shelf.stamp()
        holder = Holder(name, length, cuts, length, min(what.holder.last_start, length), used)
        self.conversations[name] = Conversation(
            holder, what.namespace, what.keys[:length], lease, tuple(keys), at, used
        )
        shelf.let_go_spans(slot)
        return name, tuple(new)

    def _lacks_cells(self, prefix: bytes) -> bool:
        return prefix in self._shelf.roots and (0, prefix) not in self._shelf.spans

    def _kept_already(self, holder: Holder) -> bool:
        """Say whether a parked conversation holds all of this one (it was borrowed, and nothing is new)."""
        for kept in self.conversations.values():
            if holder.cuts[-1] in kept.holder.cuts:
                kept.used = self._shelf.stamp()
                return True
        return False

    def _superseded(self, kept: Conversation) -> list[HolderId]:
        """Return the older copies of the same conversation that hold no branch the new one lacks (K1)."""
        mine = set(kept.holder.cuts)
        return [
            older
            for older, other in self.conversations.items()
            if other is not kept and not other.guards and mine.issuperset(other.holder.cuts)
        ]

    def _spans(self, name: HolderId) -> list[Span]:
        if name.kind == "root":
            span = self._shelf.spans.get((0, bytes.fromhex(str(name.key))))
            return [] if span is None else [span]
        kept = self.conversations.get(name)
        return [] if kept is None else [self._shelf.spans[key] for key in kept.spans]

    def _evictions(self) -> Evictions:
        for name, kept in self.conversations.items():
            if not kept.guards and kept.whole:
                size = self._shelf.exclusive_bytes(name) + self._shelf.ledger.size(kept.lease)
                unit = Evictable(0, size, kept.holder.length, kept.used, kept.uses)
                yield unit, partial(self.drop, name)
