"""The shelf: everything the cache holds, with its bytes in one ledger and its references (B1, B2, K, T).

Two kinds of things lie on it. *States*: running states by the prefix hash at their position, one for each
prefix however many hold it. *Spans*: cells [start, stop) in host memory, named by start and the prefix hash
at stop, so that equal spans of two conversations are stored once (K4). Who needs a state or a span is its set
of holders: a slot, a parked conversation (`parking.py`), a root. What nobody holds or uses is gone at once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from regrow.gpu.types import HostCells, Snapshot
from regrow.policy.directory import CutHash, Holder, HolderId
from regrow.policy.eviction import Evictable
from regrow.policy.keys import Keys, Namespace
from regrow.policy.ledger import Kind, Ledger

SpanKey = tuple[int, bytes]
KEY_BYTES = 8


def root_holder(prefix: bytes) -> HolderId:
    return HolderId("root", prefix.hex())


@dataclass(slots=True, eq=False)
class State:
    """A running state. prefix: the hash at its position."""

    prefix: bytes
    lease: int
    snapshot: Snapshot
    used: int
    pins: int = 0
    holders: set[HolderId] = field(default_factory=set)

    @property
    def stop(self) -> int:
        return self.snapshot.position


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


Thing = State | Span


@dataclass(frozen=True, slots=True)
class Unit:
    """Something that can be evicted by itself."""

    worth: Evictable
    evict: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """A parked conversation or a root with cells, as the directory should know it; keys to compare with."""

    holder: Holder
    namespace: Namespace | None = None
    keys: Keys | None = None


@dataclass(slots=True)
class Conversation:
    """A parked conversation. whole: every span is filled, so it can be restored. hybrid: it can be resumed
    where it has a running state, else at the end of each span. cuts: those of its holder."""

    holder: Holder
    namespace: Namespace
    keys: Keys
    spans: tuple[SpanKey, ...]
    parked_at: float
    used: int
    hybrid: bool
    uses: int = 0
    whole: bool = False
    cuts: frozenset[CutHash] = field(init=False)

    def __post_init__(self) -> None:
        self.cuts = frozenset(self.holder.cuts)

    def cut_back(self, spans: tuple[SpanKey, ...], length: int) -> None:
        """Keep the first `length` keys, which lie in these spans."""
        self.spans, self.keys, self.holder = spans, self.keys[:length], self.holder.upto(length)
        self.cuts = frozenset(self.holder.cuts)

    @property
    def told(self) -> Kept:
        """What the engine is told of it."""
        return Kept(self.holder, self.namespace, self.keys)


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
    victims: what goes for so many bytes, in order, each with the bytes that are free by then (`room.py`).
    changed: the states, spans and holders that have changed since this was cleared (`weights.py`).
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
        self.victims: Callable[[int, Evictable | None], Sequence[tuple[int, Unit]]] = lambda size, worth: ()
        self.evictions: Counter[str] = Counter()
        self.refusals = 0
        self._held: dict[HolderId, dict[Thing, None]] = {}
        self._withdrawn: list[Span] = []
        self._orphaned_pins: Counter[bytes] = Counter()  # uses of states that are not there any more
        self.now = 0
        self.changed: dict[Thing | HolderId, None] = {}

    @property
    def things(self) -> tuple[Thing, ...]:
        """Every state and span that can be found."""
        return (*self.states.values(), *self.spans.values())

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
            self.hold(state, holder)
            state.used = self.stamp()
            self.changed[state] = None
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
            self.states[prefix] = State(prefix, lease, snapshot, self.stamp())
            self.news.state_added(prefix)
            if prefix in self.roots:
                self.hold(self.states[prefix], root_holder(prefix))
        self.hold(self.states[prefix], holder)
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
        state.used = self.stamp()
        self.fix(state)
        return state.snapshot

    def unpin(self, prefix: bytes) -> None:
        if self._orphaned_pins[prefix]:
            self._orphaned_pins[prefix] -= 1
        elif prefix in self.states and self.states[prefix].pins:
            self.loosen(self.states[prefix])

    def fix(self, thing: Thing) -> None:
        """Keep a state or span from eviction until `loosen`."""
        thing.pins += 1
        self.changed[thing] = None

    def loosen(self, thing: Thing) -> None:
        """A use has ended; what nobody holds or uses goes."""
        thing.pins -= 1
        self.changed[thing] = None
        self._sweep(thing)

    def touch(self, name: HolderId) -> None:
        """A conversation has come, gone, become shorter or been used."""
        self.changed[name] = None

    def hold(self, thing: Thing, holder: HolderId) -> None:
        self.changed.update({thing: None, holder: None})
        thing.holders.add(holder)
        self._held.setdefault(holder, {})[thing] = None

    def held(self, holder: HolderId) -> tuple[Thing, ...]:
        """Return the states and spans that a holder has."""
        return tuple(self._held.get(holder, ()))

    def let_go(self, holder: HolderId, prefixes: Iterable[bytes]) -> None:
        """`holder` needs these states no longer."""
        for prefix in prefixes:
            if prefix in self.states:
                self._release(self.states[prefix], holder)

    def let_go_spans(self, holder: HolderId, above: int = 0) -> None:
        """`holder` needs no span that ends above `above` any longer."""
        for thing in self.held(holder):
            if isinstance(thing, Span) and thing.stop > above:
                self._release(thing, holder)

    def forget_holder(self, holder: HolderId) -> None:
        """What only `holder` needs goes, with the leases it has not filled."""
        self.give_back([lease for lease, owner in self.leases.items() if owner == holder])
        for thing in self.held(holder):
            self._release(thing, holder)
        if holder in self.keys:
            self.ledger.release(self.keys.pop(holder))

    def _release(self, thing: Thing, holder: HolderId) -> None:
        """`holder` needs this no longer; what nobody holds or uses goes."""
        self._unhold(thing, holder)
        self._sweep(thing)

    def _unhold(self, thing: Thing, holder: HolderId) -> None:
        self.changed.update({thing: None, holder: None})
        thing.holders.discard(holder)
        things = self._held.get(holder, {})
        things.pop(thing, None)
        if not things:
            self._held.pop(holder, None)

    def add_root(self, prefix: bytes, position: int) -> None:
        """A root is kept from now on, with its state; again where it is used."""
        self.roots[prefix] = position
        self.roots_used[prefix] = self.stamp()
        self.touch(root_holder(prefix))
        if prefix in self.states:
            self.hold(self.states[prefix], root_holder(prefix))

    def drop_root(self, prefix: bytes) -> None:
        if self.roots.pop(prefix, None) is not None:
            self.roots_cells.pop(prefix, None)
            del self.roots_used[prefix]
            self.guarded.discard(root_holder(prefix))
            self.news.gone(root_holder(prefix))
            self.touch(root_holder(prefix))
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
            self.hold(self.spans[key], root_holder(prefix))
        self._tell_root(prefix)

    def evict_state(self, prefix: bytes) -> None:
        """Drop a state although it is held; its holders are told. A root without it is none."""
        state = self.states.pop(prefix)
        if state.pins:
            self._orphaned_pins[prefix] += state.pins
        self.ledger.release(state.lease)
        self.news.state_removed(prefix)
        for holder in tuple(state.holders):
            self._unhold(state, holder)
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
            self._withdrawn.append(span)
            self.drop_span(span)

    def forget_all(self) -> int:
        """Drop every root and every state that is not pinned; return how many."""
        roots, states = tuple(self.roots), [p for p, state in self.states.items() if not state.pins]
        for prefix in roots:
            self.evict_root(prefix)
        for prefix in states:
            if prefix in self.states:
                self.evict_state(prefix)
        for span in [s for s in self.spans.values() if _for_slots_only(s) and not s.pins]:
            self.drop_span(span)
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

    def make_room(self, size: int, worth: Evictable | None = None) -> bool:
        """Evict what is worth least until `size` bytes are free; nothing where that cannot be (B1, B2).

        worth: of what the room is for; nothing that is clearly worth more per byte has to go.
        """
        going = self.decide(size, worth)
        if size > self.obtainable(going):
            self.refusals += 1
            return False
        self.evict(going, size)
        return True

    def decide(self, size: int, worth: Evictable | None) -> Sequence[tuple[int, Unit]]:
        """Return what would go for `size` bytes to be free, in order; as much as may."""
        return self.victims(size - self.ledger.free, worth) if size > self.ledger.free else ()

    def obtainable(self, going: Sequence[tuple[int, Unit]]) -> int:
        """Return the bytes that are free once this has gone."""
        return self.ledger.free + (going[-1][0] if going else 0)

    def evict(self, going: Sequence[tuple[int, Unit]], size: int) -> None:
        """Let go of what was decided, until `size` bytes are free."""
        for _, unit in going:
            if size <= self.ledger.free:
                break
            unit.evict()
            self.evictions[unit.worth.kind] += 1

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
        for kept in self.things:
            if len(kept.holders) == 1 and not kept.pins:
                exclusive[next(iter(kept.holders))] += self.ledger.size(kept.lease)
        return exclusive

    def _tell_root(self, prefix: bytes) -> None:
        position, name = self.roots[prefix], root_holder(prefix)
        self.news.kept(Kept(Holder(name, position, ((position, prefix),), position, position, self.stamp())))

    def drop_span(self, span: Span) -> None:
        """Drop a span although it is held, once its last use has ended."""
        for holder in tuple(span.holders):
            self._unhold(span, holder)
        self._sweep(span)

    def _sweep(self, thing: Thing) -> None:
        """Drop a state or span that nobody holds or uses."""
        if thing.holders or thing.pins:
            return
        if isinstance(thing, Span):
            self.ledger.release(thing.lease)
            if self.spans.get(thing.key) is thing:
                del self.spans[thing.key]
            else:
                self._withdrawn.remove(thing)
        elif self.states.get(thing.prefix) is thing:
            self.ledger.release(thing.lease)
            del self.states[thing.prefix]
            self.news.state_removed(thing.prefix)


def _for_slots_only(span: Span) -> bool:
    """Say whether nobody but slots would miss a span, at their next park (K3)."""
    return all(holder.kind == "slot" for holder in span.holders)
