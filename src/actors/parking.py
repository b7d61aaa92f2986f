"""Parked conversations: whole conversations in host memory, as spans and states on the shelf (K1 to K4)."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from regrow.actors.shelf import KEY_BYTES, Evictions, Kept, Shelf, Span, SpanKey
from regrow.gpu.types import HostCells
from regrow.policy.directory import Holder, HolderId
from regrow.policy.eviction import Evictable
from regrow.policy.keys import Keys, Namespace
from regrow.policy.ledger import Kind

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
    """A parked conversation. whole: every span is filled, so it can be restored."""

    holder: Holder
    namespace: Namespace
    keys: Keys
    spans: tuple[SpanKey, ...]
    parked_at: float
    used: int
    uses: int = 0
    whole: bool = False

    @property
    def told(self) -> Kept:
        """What the engine is told of it."""
        return Kept(self.holder, self.namespace, self.keys)


@dataclass(frozen=True, slots=True)
class _Copying:
    """A conversation whose cells are on their way: all its spans, which the copy uses, and the new ones."""

    spans: tuple[Span, ...]
    new: tuple[Span, ...]


class Parking:
    """bytes_per_token: what a cell of all layers weighs."""

    def __init__(self, shelf: Shelf, bytes_per_token: int) -> None:
        self.conversations: dict[HolderId, Conversation] = {}
        self._shelf = shelf
        self._bytes_per_token = bytes_per_token
        self._copying: dict[HolderId, _Copying] = {}
        self._loans: dict[HolderId, list[tuple[Span, ...]]] = {}
        self._numbers = itertools.count((shelf.life << 32) + 1)  # never those of an earlier life
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
            upto = [i for i, (_, prefix) in enumerate(what.edges, 1) if self._shelf.lacks_cells(prefix)]
            parked = self._park(slot, what, what.edges[: upto[-1]], at) if upto else None
        return parked

    def parked(self, name: HolderId, cells: Sequence[HostCells] | None) -> None:
        """The ranges that `park` named are copied, and what has all its cells now can be restored; with None
        the copy failed, and what it was for is forgotten."""
        copying = self._copying.pop(name, None)
        if copying is None:
            return  # of an earlier life
        if cells is None:
            lost = {span.key for span in copying.new if self._shelf.spans.get(span.key) is span}
            for holed in [n for n, kept in self.conversations.items() if lost.intersection(kept.spans)]:
                self.drop(holed)
            for span in copying.new:
                self._shelf.withdraw(span)
        else:
            for span, copied in zip(copying.new, cells, strict=True):
                span.cells = copied
                self._shelf.ledger.commit(span.lease)
        self._release(copying.spans)
        for other, kept in list(self.conversations.items()):
            if not kept.whole and all(self._shelf.spans[key].cells for key in kept.spans):
                self._complete(other, kept)

    def lend(self, name: HolderId, position: int) -> Loan | None:
        """Return the cells [0, position) of a conversation or a root and guard them until `repay`; None where
        they are not there any more."""
        kept = self.conversations.get(name)
        keys = kept.spans if kept is not None and kept.whole else ()
        if name.kind == "root":
            keys = self._shelf.roots_cells.get(bytes.fromhex(str(name.key)), ())
        spans = tuple(self._shelf.spans[key] for key in keys)
        parts = [
            span.cells.upto(min(span.stop, position))
            for span in spans
            if span.cells is not None and span.start < position
        ]
        if not parts or parts[-1].stop < position:
            return None
        for span in spans:
            span.pins += 1
        self._loans.setdefault(name, []).append(spans)
        self._shelf.guarded.add(name)
        if kept is not None:
            kept.uses += 1
            kept.used = self._shelf.stamp()
        return Loan(tuple(parts), kept is not None and position == kept.holder.length)

    def repay(self, name: HolderId, taker: HolderId | None) -> None:
        """End a loan. taker: the slot that the whole conversation has moved to (K2): it holds the spans from
        now on, so that its next park copies only what is new (K3)."""
        if name not in self._loans:
            return  # of an earlier life
        spans = self._loans[name].pop()
        if not self._loans[name]:
            del self._loans[name]
            self._shelf.guarded.discard(name)
        if taker is not None and name in self.conversations:
            for span in spans:
                span.holders.add(taker)
            if name not in self._loans:
                self.drop(name)
        self._release(spans)

    def add_root(self, prefix: bytes, position: int) -> None:
        """A root is kept from now on, with its cells where a conversation has them."""
        self._shelf.add_root(prefix, position)
        for kept in self.conversations.values():
            if kept.whole:
                self._share_root_cells(kept)

    def drop(self, name: HolderId) -> None:
        """Forget a parked conversation; what others hold of it stays."""
        if self.conversations.pop(name).whole:
            self._shelf.news.gone(name)
        self._shelf.guarded.discard(name)
        self._shelf.forget_holder(name)

    def drop_unfinished(self) -> None:
        """Forget the conversations whose cells are not all here: what was to copy them is gone."""
        for name in tuple(self._copying):
            self.parked(name, None)

    def purge(self, prefixes: frozenset[bytes]) -> None:
        """Drop every conversation that shares one of these cuts, and all that the shelf has of them."""
        spans: set[SpanKey] = set()
        for name, kept in list(self.conversations.items()):
            if any(prefix in prefixes for _, prefix in kept.holder.cuts):
                spans.update(kept.spans)
                self.drop(name)
        self._shelf.purge(prefixes, spans)

    def may_hold(self, prefixes: Collection[bytes]) -> bool:
        """Say whether a conversation, be it on its way here still, has one of these prefixes."""
        return any(
            prefix in prefixes for kept in self.conversations.values() for _, prefix in kept.holder.cuts
        )

    def announce(self) -> None:
        """Have every conversation told anew."""
        for kept in self.conversations.values():
            if kept.whole:
                self._shelf.news.kept(kept.told)

    def forget_all(self) -> int:
        """Drop every conversation that is not lent or on its way here; return how many."""
        names = [name for name in self.conversations if name not in self._shelf.guarded]
        for name in names:
            self.drop(name)
        return len(names)

    def check_integrity(self) -> None:
        """Assert that conversations are contiguous, and guarded while they are lent or not whole."""
        shelf = self._shelf
        for name, kept in self.conversations.items():
            edges = [0, *(shelf.spans[key].stop for key in kept.spans)]
            assert [shelf.spans[key].start for key in kept.spans] == edges[:-1]
            assert edges[-1] == kept.holder.length == len(kept.keys)
            assert (name in shelf.guarded) == (name in self._loans or not kept.whole)
        assert self.conversations.keys() == shelf.keys.keys()

    def _park(
        self, slot: HolderId, what: Parkable, edges: Sequence[tuple[int, bytes]], at: float
    ) -> tuple[HolderId, tuple[Range, ...]] | None:
        shelf, name = self._shelf, HolderId("parked", next(self._numbers))
        length = edges[-1][0]
        starts = [0, *(stop for stop, _ in edges[:-1])]
        keys = [(start, prefix) for start, (_, prefix) in zip(starts, edges, strict=True)]
        new: list[Range] = []
        for key, (stop, _) in zip(keys, edges, strict=True):
            if key in shelf.spans:
                shelf.spans[key].holders.add(name)  # held, and fixed, before room is made
            else:
                new.append((key[0], stop))
        cells = sum(stop - start for start, stop in new) * self._bytes_per_token
        cuts = tuple(cut for cut in what.holder.cuts if cut[0] <= length)
        within = {prefix for _, prefix in cuts}.intersection(what.states)
        own = [shelf.states[prefix] for prefix in within if prefix in shelf.states]
        for state in own:
            state.pins += 1  # room is not made of what is to be kept
        shelf.guarded.add(name)
        room = shelf.make_room(KEY_BYTES * length + cells)
        for state in own:
            state.pins -= 1
        if not room:
            shelf.guarded.discard(name)
            shelf.forget_holder(name)
            return None
        for start, stop in new:
            lease, prefix = self._lease("parked", (stop - start) * self._bytes_per_token), dict(edges)[stop]
            shelf.spans[start, prefix] = Span(lease, start, stop, prefix, holders={name})
        shelf.keys[name] = self._lease("keys", KEY_BYTES * length)
        for state in own:
            state.holders.add(name)
        spans = tuple(shelf.spans[key] for key in keys)
        for span in spans:
            span.pins += 1
        self._copying[name] = _Copying(spans, tuple(s for s in spans if (s.start, s.stop) in new))
        used = shelf.stamp()
        holder = Holder(name, length, cuts, length, min(what.holder.last_start, length), used)
        self.conversations[name] = Conversation(
            holder, what.namespace, what.keys[:length], tuple(keys), at, used
        )
        shelf.let_go_spans(slot)
        return name, tuple(new)

    def _lease(self, kind: Kind, size: int) -> int:
        """Return a lease for which there is room."""
        lease = self._shelf.ledger.reserve(kind, size)
        assert lease is not None
        return lease

    def _complete(self, name: HolderId, kept: Conversation) -> None:
        """All cells are there: older copies of the same conversation go (K1)."""
        kept.whole = True
        if name not in self._loans:
            self._shelf.guarded.discard(name)
        self._shelf.news.kept(kept.told)
        for older in self._superseded(kept):
            self.drop(older)
        self._share_root_cells(kept)

    def _share_root_cells(self, kept: Conversation) -> None:
        """Let the roots that a conversation begins with hold their cells in it (T2)."""
        for number, (_, prefix) in enumerate(kept.spans, 1):
            if self._shelf.lacks_cells(prefix):
                self._shelf.hold_root_cells(prefix, kept.spans[:number])

    def _release(self, spans: Sequence[Span]) -> None:
        for span in spans:
            span.pins -= 1
            self._shelf.sweep_span(span)

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
            if older not in self._shelf.guarded and other is not kept and mine.issuperset(other.holder.cuts)
        ]

    def _evictions(self) -> Evictions:
        exclusive = self._shelf.exclusive_bytes()
        for name, kept in self.conversations.items():
            if name not in self._shelf.guarded:
                unit = Evictable(0, exclusive[name], kept.holder.length, kept.used, kept.uses, "parked")
                yield unit, partial(self.drop, name)
