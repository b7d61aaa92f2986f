"""Whatever slots, roots and parked conversations do to the shelf, in whatever order.

After every operation the ledger is the bytes that are held, nothing is kept for nobody, what is in use stays,
what is lent is right, what cannot fit evicts nothing, and everybody knows what is there (B1, B2, K, T1, T2).
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from regrow.actors.parking import Loan
from regrow.actors.shelf import root_holder
from regrow.policy.directory import HolderId
from tests.actors.kept import ROOT, STATE, TURN, Store, Talk, holds, slot, snapshot

SLOTS = 3
talks = st.builds(Talk, st.integers(0, 1), st.lists(st.integers(0, 1), max_size=3).map(tuple))
slots = st.integers(0, SLOTS - 1)


@dataclass
class Lent:
    name: HolderId
    talk: Talk
    position: int
    loan: Loan
    purged: bool = False


@dataclass
class Pinned:
    prefix: bytes
    purged: bool = False


@dataclass
class Model:
    """What the machine's own book-keeping says."""

    talks: dict[HolderId, Talk] = field(default_factory=dict)
    states: list[set[bytes]] = field(default_factory=lambda: [set() for _ in range(SLOTS)])
    leases: dict[int, tuple[int, Talk]] = field(default_factory=dict)
    lent: list[Lent] = field(default_factory=list)
    pinned: list[Pinned] = field(default_factory=list)
    roots: dict[HolderId, Talk] = field(default_factory=dict)


class AnyUse(RuleBasedStateMachine):
    @initialize(budget=st.sampled_from([100, 700, 1500, 100_000]), root_cells=st.booleans())
    def open(self, budget: int, root_cells: bool) -> None:
        self.store = Store(budget, root_cells)
        self.model = Model()

    def there(self) -> tuple[set[bytes], set[object], set[bytes], set[HolderId]]:
        shelf = self.store.shelf
        return set(shelf.states), set(shelf.spans), set(shelf.roots), self.store.names

    # Slots and their states

    @rule(number=slots, talk=talks, turns=st.integers(0, 3))
    def take_a_state(self, number: int, talk: Talk, turns: int) -> None:
        talk, before = talk.upto(turns), self.there()
        lease = self.store.shelf.reserve_state(slot(number), talk.end, STATE)
        if lease is None:
            assert self.there() == before, "what does not fit evicts nothing"
        elif lease:
            assert self.store.shelf.keep_state(lease, talk.end, snapshot(talk.length))
        if lease is not None:
            self.model.states[number].add(talk.end)

    @rule(number=slots, talk=talks)
    def reserve(self, number: int, talk: Talk) -> None:
        lease = self.store.shelf.reserve_state(slot(number), talk.end, STATE)
        if lease == 0:
            self.model.states[number].add(talk.end)
        elif lease is not None:
            self.model.leases[lease] = number, talk

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), fill=st.booleans())
    def settle_a_lease(self, data: st.DataObject, fill: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.model.leases)))
        number, talk = self.model.leases.pop(lease)
        if fill:
            assert self.store.shelf.keep_state(lease, talk.end, snapshot(talk.length))
            self.model.states[number].add(talk.end)
        else:
            self.store.shelf.give_back([lease])

    @rule(number=slots, data=st.data())
    def let_go(self, number: int, data: st.DataObject) -> None:
        held = sorted(self.model.states[number])
        gone = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        self.store.shelf.let_go(slot(number), gone)
        self.model.states[number] -= set(gone)

    @rule(number=slots, above=st.sampled_from([0, ROOT, ROOT + TURN, 100]))
    def rewrite(self, number: int, above: int) -> None:
        self.store.shelf.let_go_spans(slot(number), above)
        shelf = self.store.shelf
        assert not any(slot(number) in s.holders and s.stop > above for s in shelf.spans.values())

    @rule(number=slots)
    def crash(self, number: int) -> None:
        self.store.shelf.forget_holder(slot(number))
        self.model.states[number].clear()
        self.model.leases = {k: v for k, v in self.model.leases.items() if v[0] != number}

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        prefixes = sorted(self.store.shelf.states)
        if prefixes:
            prefix = data.draw(st.sampled_from(prefixes))
            assert self.store.shelf.pin(prefix) is self.store.shelf.states[prefix].snapshot
            self.model.pinned.append(Pinned(prefix))

    @precondition(lambda self: self.model.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.model.pinned) - 1))
        self.store.shelf.unpin(self.model.pinned.pop(number).prefix)

    # Roots

    @rule(root=st.integers(0, 1))
    def add_root(self, root: int) -> None:
        talk = Talk(root)
        self.store.parking.add_root(talk.end, ROOT)

    @rule(root=st.integers(0, 1))
    def drop_root(self, root: int) -> None:
        self.store.shelf.drop_root(Talk(root).end)

    # Parked conversations

    @rule(number=slots, talk=talks, edges=st.sets(st.sampled_from([ROOT, ROOT + TURN, ROOT + 2 * TURN])))
    def park(self, number: int, talk: Talk, edges: set[int]) -> None:
        before = self.there()
        states = [position for position, prefix in talk.cuts if prefix in self.model.states[number]]
        granted = self.store.park(number, talk, sorted(edges), states)
        if granted is None:
            left = self.there()
            assert all(now <= then for now, then in zip(left, before, strict=True))
            return
        name, ranges = granted
        self.model.talks[name] = talk
        kept = self.store.parking.conversations[name]
        assert all(stop <= kept.holder.length for _, stop in ranges)
        if kept.holder.length < talk.length:
            assert kept.keys.tolist() == talk.keys[: kept.holder.length].tolist()
            assert kept.holder.length in edges
        for position in states:
            if position <= kept.holder.length:
                assert name in self.store.shelf.states[talk.prefix(position)].holders

    @precondition(lambda self: self.store.copying)
    @rule(data=st.data(), failed=st.sampled_from([False, False, False, True]))
    def copied(self, data: st.DataObject, failed: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.store.copying)))
        _, ranges = self.store.copying[name]
        self.store.copied(name, failed=failed)
        if failed and ranges:  # else it had no cells of its own to wait for
            assert name not in self.store.names

    @rule(data=st.data(), whole=st.booleans())
    def lend(self, data: st.DataObject, whole: bool) -> None:
        names = sorted(self.store.told.kept)
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        talk = next((t for t in map(Talk, (0, 1)) if root_holder(t.end) == name), None)
        talk = talk or self.model.talks[name]
        length = self.store.told.kept[name]
        cuts = [position for position, _ in talk.cuts if position <= length]
        position = length if whole else data.draw(st.sampled_from(cuts))
        loan = self.store.lend(name, position)
        assert loan is not None
        assert loan.whole == (name.kind == "parked" and position == length)
        self.model.lent.append(Lent(name, talk, position, loan))

    @precondition(lambda self: self.model.lent)
    @rule(data=st.data(), number=st.none() | slots)
    def repay(self, data: st.DataObject, number: int | None) -> None:
        lent = self.model.lent.pop(data.draw(st.integers(0, len(self.model.lent) - 1)))
        taker = slot(number) if number is not None and lent.loan.whole else None
        others = [other for other in self.model.lent if other.name == lent.name]
        self.store.parking.repay(lent.name, taker)
        if taker is not None and not others:
            assert lent.name not in self.store.names
            if not lent.purged:
                mine = [s for s in self.store.shelf.spans.values() if taker in s.holders]
                assert max(span.stop for span in mine) >= lent.position

    # Everybody

    @rule(size=st.integers(1, 2000))
    def make_room(self, size: int) -> None:
        before = self.there()
        if self.store.shelf.make_room(size):
            assert self.store.shelf.ledger.free >= size
        else:
            assert self.there() == before, "what cannot fit evicts nothing"

    @rule(talk=talks)
    def purge(self, talk: Talk) -> None:
        """A request failed: everything that shares its cuts goes, in use or not."""
        prefixes = frozenset(prefix for _, prefix in talk.cuts)
        self.store.parking.purge(prefixes)
        for pinned in self.model.pinned:
            pinned.purged |= pinned.prefix in prefixes
        for lent in self.model.lent:
            lent.purged |= lent.talk.root == talk.root
        left = [kept for name, kept in self.store.parking.conversations.items()]
        assert not any(prefix in prefixes for kept in left for _, prefix in kept.holder.cuts)
        assert not prefixes & self.store.shelf.states.keys()
        assert not prefixes & self.store.shelf.roots.keys()
        assert not any(key[1] in prefixes for key in self.store.shelf.spans)

    @rule()
    def forget_all(self) -> None:
        self.store.parking.forget_all()
        self.store.shelf.forget_all()
        in_use = {lent.name for lent in self.model.lent}
        whole = {name for name, kept in self.store.parking.conversations.items() if kept.whole}
        assert whole <= in_use
        assert set(self.store.shelf.states) <= {pinned.prefix for pinned in self.model.pinned}

    @invariant()
    def everything_is_true(self) -> None:
        seen = len(self.store.told.evicted)
        self.store.check()
        for holder, prefix in self.store.told.evicted[seen:]:
            if holder.kind == "slot":
                self.model.states[int(holder.key)].discard(prefix)
        shelf = self.store.shelf
        for number, states in enumerate(self.model.states):
            held = {prefix for prefix, state in shelf.states.items() if slot(number) in state.holders}
            assert held == states, "a slot knows what it holds"
        for pinned in self.model.pinned:
            assert pinned.purged or pinned.prefix in shelf.states
        for lent in self.model.lent:
            assert holds(lent.loan.cells, lent.talk, lent.position)
            if not lent.purged:
                parts = {id(part.tensors[0].untyped_storage()) for part in lent.loan.cells}
                assert len(parts) == len(lent.loan.cells)
                assert lent.name.kind == "root" or lent.name in self.store.names
        if not (self.model.lent or self.model.pinned or self.store.copying or self.model.leases):
            assert not any(span.pins for span in shelf.spans.values())
            assert not any(state.pins for state in shelf.states.values())
            assert not shelf.guarded

    def teardown(self) -> None:
        """When everybody has let go of everything nothing is left."""
        for pinned in self.model.pinned:
            self.store.shelf.unpin(pinned.prefix)
        for lent in self.model.lent:
            self.store.parking.repay(lent.name, None)
        for name in list(self.store.copying):
            self.store.copied(name)
        for number in range(SLOTS):
            self.store.shelf.forget_holder(slot(number))
        self.store.parking.forget_all()
        self.store.shelf.forget_all()
        self.store.check()
        assert self.store.used == 0
        assert not self.store.told.kept


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
