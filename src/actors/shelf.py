"""The shelf: everything the cache holds, with its bytes in one ledger and its references (B1, B2, K, T).

Two kinds of things lie on it. *States*: running states by the prefix hash at their position, one for each
prefix however many hold it. *Spans*: cells [start, stop) in host memory, named by start and the prefix hash
at stop, so that equal spans of two conversations are stored once (K4). Who needs a state or a span is its set
of holders: a slot, a parked conversation (`parking.py`), a root. What nobody holds or uses is gone at once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from regrow.gpu.types import HostCells, Snapshot
from regrow.policy.directory import Holder, HolderId
from regrow.policy.eviction import ROOT_USES, Evictable, losses, value, yields
from regrow.policy.keys import Keys, Namespace
from regrow.policy.ledger import Kind, Ledger

SpanKey = tuple[int, bytes]
KEY_BYTES = 8


def root_holder(prefix: bytes) -> HolderId:
    return HolderId("root", prefix.hex())


@dataclass(slots=True, eq=False)
class State:
    """A running state. uses: requests that went on from it."""

    lease: int
    snapshot: Snapshot
    used: int
    uses: int = 0
    pins: int = 0
    holders: set[HolderId] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Span:
    """Cells in host memory; `cells` is None while the copy is on its way. prefix: the hash at `stop`. pins:
    uses of it now, the copy on its way among them."""

    lease: int
    start: int
    stop: int
    prefix: bytes
    cells: HostCells | None = None
    pins: int = 0
    holders: set[HolderId] = field(default_factory=set)

    @property
    def key(self) -> SpanKey:
        return self.start, self.prefix


States = Mapping[HolderId, Sequence[State]]


@dataclass(frozen=True, slots=True)
class Unit:
    """Something that can be evicted by itself, and whose it is: what else they have is worth more then."""

    worth: Evictable
    evict: Callable[[], None]
    of: frozenset[HolderId] = frozenset()


@dataclass(frozen=True, slots=True)
class Kept:
    """A parked conversation or a root with cells, as the directory should know it; keys to compare with."""

    holder: Holder
    namespace: Namespace | None = None
    keys: Keys | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed for the directory and the holders since it was last asked for."""

    states_added: frozenset[bytes] = frozenset()
    states_removed: frozenset[bytes] = frozenset()
    kept: tuple[Kept, ...] = ()
    gone: tuple[HolderId, ...] = ()
    evicted: tuple[tuple[HolderId, frozenset[bytes]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.states_added or self.states_removed or self.kept or self.gone or self.evicted)


class News:
    """Collects what has changed for the directory and for the holders, until it is asked for."""

    def __init__(self) -> None:
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._kept: dict[HolderId, Kept] = {}
        self._gone: dict[HolderId, None] = {}
        self._evicted: dict[HolderId, set[bytes]] = {}

    def state_added(self, prefix: bytes) -> None:
        self._removed.discard(prefix)
        self._added.add(prefix)

    def state_removed(self, prefix: bytes) -> None:
        self._added.discard(prefix)
        self._removed.add(prefix)

    def kept(self, kept: Kept) -> None:
        self._gone.pop(kept.holder.id, None)
        self._kept[kept.holder.id] = kept

    def gone(self, holder: HolderId) -> None:
        self._kept.pop(holder, None)
        self._gone[holder] = None

    def evicted(self, holder: HolderId, prefix: bytes) -> None:
        self._evicted.setdefault(holder, set()).add(prefix)

    def take(self) -> Changes:
        changes = Changes(
            frozenset(self._added),
            frozenset(self._removed),
            tuple(self._kept.values()),
            tuple(self._gone),
            tuple((holder, frozenset(prefixes)) for holder, prefixes in self._evicted.items()),
        )
        self.__init__()  # type: ignore[misc]
        return changes


class Shelf:
    """All sizes in bytes. Nothing here waits or talks; `news` says what there is to tell.

    keys: the leases of what a parked conversation holds beside states and spans. guarded: the conversations
    and roots that may not be evicted now. buffers: what the disk tier has leased.
    other_units: what else may be evicted, beside what lies here, given the states of each holder, ascending.
    life: of the actor that owns it. root_cells: a root may hold cells of its own; `roots_cells` says which.
    """

    def __init__(self, budget: int, life: int = 0, *, root_cells: bool = True) -> None:
        self.life = life
        self.root_cells = root_cells
        self.ledger = Ledger(budget, last=life << 32)
        self.news = News()
        self.states: dict[bytes, State] = {}
        self.spans: dict[SpanKey, Span] = {}
        self.roots: dict[bytes, int] = {}
        self.roots_used: dict[bytes, int] = {}
        self.roots_cells: dict[bytes, tuple[SpanKey, ...]] = {}
        self.keys: dict[HolderId, int] = {}
        self.guarded: set[HolderId] = set()
        self.buffers: set[int] = set()
        self.leases: dict[int, HolderId] = {}  # reserved for a state that is not there yet
        self.other_units: Callable[[States], Iterator[Unit]] = lambda states: iter(())
        self.evictions: Counter[str] = Counter()
        self.refusals = 0
        self._withdrawn: list[Span] = []
        self._orphaned_pins: Counter[bytes] = Counter()  # uses of states that are not there any more
        self.now = 0

    def stamp(self) -> int:
        """Return the next stamp of use; later is larger."""
        self.now += 1
        return self.now

    def reserve(self, kind: Kind, size: int) -> int | None:
        """Lease `size` bytes, evicting what is worth least; None where they cannot be had (B1)."""
        return self.ledger.reserve(kind, size) if self.make_room(size) else None

    def reserve_state(
        self, holder: HolderId, prefix: bytes, size: int, saved: float | None = None
    ) -> int | None:
        """Return a lease for a state that is to be taken; 0 where it is there already, and is held for
        `holder` from now on (P5); None where there is no room, or with a size of 0. saved: the tokens that it
        will save on average, so that nothing that saves more has to make room for it."""
        state = self.states.get(prefix)
        if state is not None:
            state.holders.add(holder)
            state.used = self.stamp()
            return 0
        worth = None if saved is None else Evictable(size, saved, self.now)
        if not size or not self.make_room(size, worth):
            return None
        lease = self.ledger.reserve("checkpoint", size)
        if lease is not None:
            self.leases[lease] = holder
        return lease

    def keep_state(self, lease: int, prefix: bytes, snapshot: Snapshot) -> bool:
        """Fill a lease with a state; False where the lease was given up meanwhile."""
        holder = self.leases.pop(lease, None)
        if holder is None:
            return False
        if prefix in self.states:  # somebody else took it first
            self.ledger.release(lease)
        else:
            self.ledger.commit(lease)
            self.states[prefix] = State(lease, snapshot, self.stamp())
            self.news.state_added(prefix)
            if prefix in self.roots:
                self.states[prefix].holders.add(root_holder(prefix))
        self.states[prefix].holders.add(holder)
        return True

    def give_back(self, leases: Iterable[int]) -> None:
        """Release leases that were never filled."""
        for lease in leases:
            if self.leases.pop(lease, None) is not None:
                self.ledger.release(lease)

    def pin(self, prefix: bytes) -> Snapshot | None:
        """Return a state and keep it from eviction until `unpin`; None where it is gone."""
        state = self.states.get(prefix)
        if state is None:
            return None
        state.pins += 1
        state.uses += 1
        state.used = self.stamp()
        return state.snapshot

    def unpin(self, prefix: bytes) -> None:
        if self._orphaned_pins[prefix]:
            self._orphaned_pins[prefix] -= 1
        elif prefix in self.states and self.states[prefix].pins:
            self.states[prefix].pins -= 1
            self._sweep_state(prefix)

    def let_go(self, holder: HolderId, prefixes: Iterable[bytes]) -> None:
        """`holder` needs these states no longer."""
        for prefix in prefixes:
            if prefix in self.states:
                self.states[prefix].holders.discard(holder)
                self._sweep_state(prefix)

    def let_go_spans(self, holder: HolderId, above: int = 0) -> None:
        """`holder` needs no span that ends above `above` any longer."""
        for span in list(self.spans.values()):
            if holder in span.holders and span.stop > above:
                span.holders.discard(holder)
                self.sweep_span(span)

    def forget_holder(self, holder: HolderId) -> None:
        """What only `holder` needs goes, with the leases it has not filled."""
        self.give_back([lease for lease, owner in self.leases.items() if owner == holder])
        self.let_go(holder, [p for p, state in self.states.items() if holder in state.holders])
        self.let_go_spans(holder)
        if holder in self.keys:
            self.ledger.release(self.keys.pop(holder))

    def add_root(self, prefix: bytes, position: int) -> None:
        """A root is kept from now on, with its state; again where it is used."""
        self.roots[prefix] = position
        self.roots_used[prefix] = self.stamp()
        if prefix in self.states:
            self.states[prefix].holders.add(root_holder(prefix))

    def drop_root(self, prefix: bytes) -> None:
        if self.roots.pop(prefix, None) is not None:
            self.roots_cells.pop(prefix, None)
            del self.roots_used[prefix]
            self.guarded.discard(root_holder(prefix))
            self.news.gone(root_holder(prefix))
            self.forget_holder(root_holder(prefix))

    def drop_roots(self) -> None:
        """Nobody knows of these roots any more."""
        for prefix in tuple(self.roots):
            self.drop_root(prefix)

    def lacks_cells(self, prefix: bytes) -> bool:
        """Say whether this is a root that should have cells of its own, and has none."""
        return self.root_cells and prefix in self.roots and prefix not in self.roots_cells

    def hold_root_cells(self, prefix: bytes, spans: Sequence[SpanKey]) -> None:
        """Let a root hold its cells, contiguous `spans`, so that it outlives its holders (T2)."""
        self.roots_cells[prefix] = tuple(spans)
        for key in spans:
            self.spans[key].holders.add(root_holder(prefix))
        self._tell_root(prefix)

    def evict_state(self, prefix: bytes) -> None:
        """Drop a state although it is held; its holders are told. A root without it is none."""
        state = self.states.pop(prefix)
        if state.pins:
            self._orphaned_pins[prefix] += state.pins
        self.ledger.release(state.lease)
        self.news.state_removed(prefix)
        for holder in state.holders:
            self.news.evicted(holder, prefix)
        self.drop_root(prefix)

    def evict_root(self, prefix: bytes) -> None:
        self.news.evicted(root_holder(prefix), prefix)
        self.drop_root(prefix)

    def purge(self, prefixes: frozenset[bytes], spans: Iterable[SpanKey] = ()) -> None:
        """Drop the roots and states of these prefixes, held or not, the spans that end there, and those of
        `spans` that only slots hold: from now on nobody finds them."""
        for prefix in prefixes & self.roots.keys():
            self.evict_root(prefix)
        for prefix in prefixes & self.states.keys():
            self.evict_state(prefix)
        doomed = [span for span in self.spans.values() if span.prefix in prefixes]
        doomed += [s for key in spans if (s := self.spans.get(key)) and _for_slots_only(s)]
        for prefix, keys in list(self.roots_cells.items()):
            if not {span.key for span in doomed}.isdisjoint(keys):
                self.evict_root(prefix)
        for span in doomed:
            self.withdraw(span)

    def withdraw(self, span: Span) -> None:
        """Let nobody find a span any more; its bytes count until its last use has ended."""
        if self.spans.get(span.key) is span:
            del self.spans[span.key]
            span.holders.clear()
            self._withdrawn.append(span)
            self.sweep_span(span)

    def forget_all(self) -> int:
        """Drop every root and every state that is not pinned; return how many."""
        roots, states = tuple(self.roots), [p for p, state in self.states.items() if not state.pins]
        for prefix in roots:
            self.evict_root(prefix)
        for prefix in states:
            if prefix in self.states:
                self.evict_state(prefix)
        for span in [s for s in self.spans.values() if _for_slots_only(s) and not s.pins]:
            self._drop_span(span)
        return len(roots) + len(states)

    def bytes_by_kind(self) -> dict[Kind, int]:
        """Return the leased bytes by kind; a span that only roots hold counts as theirs (T3)."""
        kinds = dict(self.ledger.by_kind)
        for span in self.spans.values():
            if span.holders and all(holder.kind == "root" for holder in span.holders):
                size = self.ledger.size(span.lease)
                kinds["parked"] -= size
                kinds["root"] += size
        return kinds

    def sweep_span(self, span: Span) -> None:
        """Drop a span that nobody holds or uses."""
        if span.holders or span.pins:
            return
        self.ledger.release(span.lease)
        if self.spans.get(span.key) is span:
            del self.spans[span.key]
        else:
            self._withdrawn.remove(span)

    @property
    def obtainable(self) -> int:
        """The bytes that are free or could be made so."""
        return self.ledger.free + self._evictable_bytes()

    def make_room(self, size: int, worth: Evictable | None = None) -> bool:
        """Evict what is worth least until `size` bytes are free; nothing where that cannot be (B1, B2).

        worth: of what the room is for; nothing that is clearly worth more per byte has to go.
        """
        if size > self.ledger.free and size <= self.obtainable:
            while size > self.ledger.free and self._evict(size, worth):
                pass
        if size > self.ledger.free:
            self.refusals += 1
            return False
        return True

    def _evict(self, size: int, worth: Evictable | None) -> bool:
        """Evict in the order of value until `size` bytes are free, or what comes next is of a holder that
        has lost something, so that its value has changed. Say whether anything went."""
        evicted: set[HolderId] = set()
        count = 0
        for unit in sorted(self._units(), key=lambda unit: value(unit.worth, self.now)):
            if size <= self.ledger.free or not evicted.isdisjoint(unit.of):
                break
            if not yields(unit.worth, worth, self.now):
                return False
            unit.evict()
            evicted |= unit.of
            count += 1
            self.evictions[unit.worth.kind] += 1
        return count > 0

    def announce(self) -> None:
        """Have everything told anew, to an engine that knows nothing."""
        for prefix in self.states:
            self.news.state_added(prefix)
        for prefix in self.roots_cells:
            self._tell_root(prefix)

    def check_integrity(self) -> None:
        """Assert that every state and span is held or in use, and that the ledger is the sum of them (B1)."""
        for state in self.states.values():
            assert state.pins >= 0
            assert state.holders or state.pins
            assert state.snapshot.nbytes <= self.ledger.size(state.lease)
        for key, span in self.spans.items():
            assert span.pins >= 0
            assert span.holders or span.pins
            assert key == span.key
            assert span.start < span.stop
            assert span.cells is None or span.cells.nbytes == self.ledger.size(span.lease)
        assert all(span.pins for span in self._withdrawn)
        leases = [state.lease for state in self.states.values()]
        leases += [span.lease for span in (*self.spans.values(), *self._withdrawn)]
        leases += [*self.keys.values(), *self.leases, *self.buffers]
        assert sum(map(self.ledger.size, leases)) == self.ledger.used <= self.ledger.budget

    def exclusive_bytes(self) -> Counter[HolderId]:
        """Return the bytes that would be free if a holder let go of everything."""
        exclusive = Counter({holder: self.ledger.size(lease) for holder, lease in self.keys.items()})
        everything: list[State | Span] = [*self.states.values(), *self.spans.values()]
        for kept in everything:
            if len(kept.holders) == 1 and not kept.pins:
                exclusive[next(iter(kept.holders))] += self.ledger.size(kept.lease)
        return exclusive

    def share(self, kept: "State | Span") -> float:
        """Return the bytes of a state or span for each of its holders; 0 of what is in use."""
        return 0.0 if kept.pins else self.ledger.size(kept.lease) / len(kept.holders)

    def _fixed(self) -> set[HolderId]:
        """Return who may not be evicted now: what is guarded, and roots whose state is in use (B2)."""
        roots = {root_holder(p) for p in self.roots if p in self.states and self.states[p].pins}
        return self.guarded | roots

    def _evictable_bytes(self) -> int:
        fixed = self._fixed()
        leases = [s.lease for p, s in self.states.items() if not s.pins and root_holder(p) not in fixed]
        leases += [s.lease for s in self.spans.values() if not s.pins and s.holders.isdisjoint(fixed)]
        leases += [lease for holder, lease in self.keys.items() if holder not in fixed]
        return sum(map(self.ledger.size, leases))

    def _units(self) -> Iterator[Unit]:
        """What may go: spans that only slots still hold, states, roots, and the rest. The last state of a
        parked conversation goes with the cells that are of no use without it."""
        fixed, lines = self._fixed(), self._lines()
        for span in self.spans.values():
            if _for_slots_only(span) and not span.pins:
                yield Unit(
                    Evictable(self.ledger.size(span.lease), 0, 0, 0, "cells"), partial(self._drop_span, span)
                )
        worth: dict[bytes, tuple[float, int]] = {}
        for states in lines.values():
            used = 0
            costs = losses([state.snapshot.position for _, state in states])
            for (prefix, state), loss in zip(reversed(states), reversed(costs), strict=True):
                used = max(used, state.used)  # what goes on from above it goes on from it too
                before = worth.get(prefix, (0.0, 0))
                worth[prefix] = max(loss, before[0]), max(used, before[1])
        last = {states[-1][0]: holder for holder, states in lines.items() if holder.kind == "parked"}
        for prefix, state in self.states.items():
            if state.pins or root_holder(prefix) in fixed or state.holders == {last.get(prefix)}:
                continue
            loss, used = worth[prefix]
            unit = Evictable(self.ledger.size(state.lease), loss, used, state.uses, "checkpoint")
            yield Unit(unit, partial(self.evict_state, prefix), frozenset(state.holders))
        for prefix, position in self.roots.items():
            name = root_holder(prefix)
            if name not in fixed:
                size = sum(self.share(self.spans[key]) for key in self.roots_cells.get(prefix, ()))
                if prefix in self.states:
                    size += self.share(self.states[prefix])
                unit = Evictable(size, position, self.roots_used[prefix], ROOT_USES, "root")
                yield Unit(unit, partial(self.evict_root, prefix), frozenset({name}))
        yield from self.other_units({holder: [s for _, s in states] for holder, states in lines.items()})

    def _lines(self) -> Mapping[HolderId, list[tuple[bytes, State]]]:
        """Return the states of each holder with their prefixes, ascending."""
        lines: dict[HolderId, list[tuple[bytes, State]]] = {}
        for kept in sorted(self.states.items(), key=lambda kept: kept[1].snapshot.position):
            for holder in kept[1].holders:
                lines.setdefault(holder, []).append(kept)
        return lines

    def _tell_root(self, prefix: bytes) -> None:
        position, name = self.roots[prefix], root_holder(prefix)
        self.news.kept(Kept(Holder(name, position, ((position, prefix),), position, position, self.stamp())))

    def _drop_span(self, span: Span) -> None:
        span.holders.clear()
        self.sweep_span(span)

    def _sweep_state(self, prefix: bytes) -> None:
        state = self.states[prefix]
        if not state.holders and not state.pins:
            del self.states[prefix]
            self.ledger.release(state.lease)
            self.news.state_removed(prefix)


def _for_slots_only(span: Span) -> bool:
    """Say whether nobody but slots would miss a span, at their next park (K3)."""
    return all(holder.kind == "slot" for holder in span.holders)
