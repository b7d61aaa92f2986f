"""Parked conversations: whole conversations in host memory, as spans and states on the shelf (K1 to K4)."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from regrow.actors.room import Decision
from regrow.actors.shelf import KEY_BYTES, Conversation, Shelf, Span, SpanKey, Unit
from regrow.actors.weights import Weights
from regrow.gpu.types import HostCells
from regrow.policy.directory import Holder, HolderId
from regrow.policy.eviction import Evictable
from regrow.policy.keys import Keys, Namespace
from regrow.policy.ledger import Kind

Range = tuple[int, int]
Part = tuple[int, int, bytes]  # of a conversation: start, stop and the prefix hash there


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


@dataclass(frozen=True, slots=True)
class _Copying:
    """A conversation whose cells are on their way: all its spans, which the copy uses, and the new ones."""

    spans: tuple[Span, ...]
    new: tuple[Span, ...]


class Parking:
    """bytes_per_token: what a cell of all layers weighs. weights: to be refreshed after every change."""

    def __init__(self, shelf: Shelf, bytes_per_token: int) -> None:
        self.conversations: dict[HolderId, Conversation] = {}
        self.weights = Weights(shelf, self.conversations)
        self._shelf = shelf
        self._bytes_per_token = bytes_per_token
        self._copying: dict[HolderId, _Copying] = {}
        self._loans: dict[HolderId, list[tuple[Span, ...]]] = {}
        self._numbers = itertools.count((shelf.life << 32) + 1)  # never those of an earlier life
        shelf.victims = self._victims

    def park(self, slot: HolderId, what: Parkable, at: float) -> tuple[HolderId, tuple[Range, ...]] | None:
        """Make room for a conversation whose cells are in `slot`, and name the ranges to be copied.

        Spans that are there already are shared (K3, K4). Where there is no room for all of it, or only that
        of what is worth more, as much of it is parked as fits and can be resumed. None where it is kept
        already, or not even its beginning fits.
        """
        if self._kept_already(what.holder):
            return None
        shelf, name = self._shelf, HolderId("parked", next(self._numbers))
        starts = [0, *(stop for stop, _ in what.edges[:-1])]
        spans = [(start, *edge) for start, edge in zip(starts, what.edges, strict=True)]
        there = [span for start, _, prefix in spans if (span := shelf.spans.get((start, prefix)))]
        own = [shelf.states[prefix] for prefix in what.states if prefix in shelf.states]
        for span in there:
            shelf.hold(span, name)  # held, and fixed, before room is made
        for state in own:
            shelf.fix(state)
        shelf.guarded.add(name)
        count = self._fitting(what, spans, max((state.used for state in own), default=shelf.now))
        ranges = self._take_in(slot, name, what, spans[:count], at) if count else None
        for state in own:
            shelf.loosen(state)
        if ranges is None:
            shelf.guarded.discard(name)
            shelf.forget_holder(name)
            return None
        return name, ranges

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
            self._shelf.fix(span)
        self._loans.setdefault(name, []).append(spans)
        self._shelf.guarded.add(name)
        if kept is not None:
            kept.uses += 1
            self._used(name, kept)
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
                self._shelf.hold(span, taker)
            if name not in self._loans:
                self.drop(name)
        self._release(spans)

    def add_root(self, prefix: bytes, position: int) -> None:
        """A root is kept from now on, with its cells where a conversation has them."""
        self._shelf.add_root(prefix, position)
        for kept in self.conversations.values() if self._shelf.lacks_cells(prefix) else ():
            if kept.whole:
                self._share_root_cells(kept)

    def drop(self, name: HolderId) -> None:
        """Forget a parked conversation; what others hold of it stays."""
        if self.conversations.pop(name).whole:
            self._shelf.news.gone(name)
        self._shelf.touch(name)
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
        self.weights.check_integrity()

    def _fitting(self, what: Parkable, spans: Sequence[Part], used: int) -> int:
        """Make room for as many of the spans as possible and return how many they are."""
        shelf, sizes, size, tokens = self._shelf, {}, 0, 0
        for count, (start, stop, prefix) in enumerate(spans, 1):
            if (start, prefix) not in shelf.spans:
                size += (stop - start) * self._bytes_per_token
                tokens += stop - start
            if count == len(spans) or not what.states or prefix in what.states or shelf.lacks_cells(prefix):
                sizes[count] = size + KEY_BYTES * stop, tokens
        size, tokens = sizes[len(spans)]
        going = shelf.decide(size, Evictable(size, tokens, used))
        obtainable = shelf.obtainable(going)
        fits = max((count for count, (size, _) in sizes.items() if size <= obtainable), default=0)
        root = max((n for n, (_, _, prefix) in enumerate(spans, 1) if shelf.lacks_cells(prefix)), default=0)
        if fits < len(spans):
            shelf.refusals += 1
        if fits < root and shelf.make_room(sizes[root][0]):
            return root  # T2
        if fits:
            shelf.evict(going, sizes[fits][0])
        return fits

    def _take_in(
        self, slot: HolderId, name: HolderId, what: Parkable, parts: Sequence[Part], at: float
    ) -> tuple[Range, ...]:
        """Note a conversation for which there is room, and name the ranges to be copied."""
        shelf, length = self._shelf, parts[-1][1]
        shelf.let_go_spans(name, length)
        new = tuple((start, stop) for start, stop, prefix in parts if (start, prefix) not in shelf.spans)
        for start, stop, prefix in parts:
            if (start, stop) in new:
                lease = self._lease("parked", (stop - start) * self._bytes_per_token)
                span = shelf.spans[start, prefix] = Span(lease, start, stop, prefix)
                shelf.hold(span, name)
        shelf.keys[name] = self._lease("keys", KEY_BYTES * length)
        cuts = tuple(cut for cut in what.holder.cuts if cut[0] <= length)
        own = [shelf.states[p] for _, p in cuts if p in what.states and p in shelf.states]
        for state in own:
            shelf.hold(state, name)
        keys = tuple((start, prefix) for start, _, prefix in parts)
        spans = tuple(shelf.spans[key] for key in keys)
        for span in spans:
            shelf.fix(span)
        self._copying[name] = _Copying(spans, tuple(s for s in spans if (s.start, s.stop) in new))
        stamp = shelf.stamp()
        holder = Holder(name, length, cuts, length, min(what.holder.last_start, length), stamp)
        used = max((state.used for state in own), default=stamp)
        self.conversations[name] = Conversation(
            holder, what.namespace, what.keys[:length], keys, at, used, hybrid=bool(what.states)
        )
        shelf.touch(name)
        shelf.let_go_spans(slot)
        return new

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
            self._shelf.loosen(span)

    def _kept_already(self, holder: Holder) -> bool:
        """Say whether a parked conversation holds all of this one (it was borrowed, and nothing is new)."""
        for name, kept in self.conversations.items():
            if holder.cuts[-1] in kept.cuts:
                self._used(name, kept)
                return True
        return False

    def _used(self, name: HolderId, kept: Conversation) -> None:
        kept.used = self._shelf.stamp()
        self._shelf.touch(name)

    def _superseded(self, kept: Conversation) -> list[HolderId]:
        """Return the older copies of the same conversation that hold no branch the new one lacks (K1)."""
        return [
            older
            for older, other in self.conversations.items()
            if older not in self._shelf.guarded and other is not kept and other.cuts <= kept.cuts
        ]

    def _victims(self, size: int, worth: Evictable | None) -> Sequence[tuple[int, Unit]]:
        self.weights.refresh()
        return Decision(self._shelf, self.conversations, self.weights, self._cut_back).victims(size, worth)

    def _cut_back(self, name: HolderId, position: int) -> None:
        """Keep only the spans of a conversation that end at or below `position`, and their states."""
        shelf, kept = self._shelf, self.conversations[name]
        spans = tuple(key for key in kept.spans if shelf.spans[key].stop <= position)
        if not spans:
            self.drop(name)
            return
        length = shelf.spans[spans[-1]].stop
        shelf.let_go(name, [prefix for at, prefix in kept.holder.cuts if at > length])
        shelf.let_go_spans(name, length)
        shelf.ledger.release(shelf.keys[name])
        shelf.keys[name] = self._lease("keys", KEY_BYTES * length)
        kept.cut_back(spans, length)
        shelf.touch(name)
        shelf.news.kept(kept.told)
