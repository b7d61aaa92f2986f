"""A shelf with its parking, small talks to keep there, and cells that tell which keys they are of.

A talk is a system prompt of `ROOT` keys and turns of `TURN` keys; every message end is a cut.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from regrow.actors.parking import Loan, Parkable, Parking, Range
from regrow.actors.shelf import Changes, Shelf, root_holder
from regrow.gpu.types import HostCells, Snapshot
from regrow.policy.directory import Holder, HolderId
from regrow.policy.keys import Keys, Namespace, as_keys, prefix_hashes

SPACE = Namespace.of("test")
ROOT, TURN = 16, 8
CELL, STATE, KEY = 4, 24, 8  # bytes


@dataclass(frozen=True)
class Talk:
    """root: which system prompt. turns: what was said in each turn."""

    root: int = 0
    turns: tuple[int, ...] = ()

    @property
    def keys(self) -> Keys:
        said = [100 + turn for turn in self.turns for _ in range(TURN)]
        return as_keys([self.root] * ROOT + said)

    @property
    def length(self) -> int:
        return ROOT + TURN * len(self.turns)

    @property
    def cuts(self) -> tuple[tuple[int, bytes], ...]:
        return _cuts(self)

    def prefix(self, position: int) -> bytes:
        return dict(self.cuts)[position]

    @property
    def end(self) -> bytes:
        return self.prefix(self.length)

    def upto(self, turns: int) -> "Talk":
        return Talk(self.root, self.turns[:turns])


@functools.cache
def _cuts(talk: Talk) -> tuple[tuple[int, bytes], ...]:
    positions = range(ROOT, talk.length + 1, TURN)
    return tuple(zip(positions, prefix_hashes(SPACE, talk.keys, positions), strict=True))


@functools.cache
def cells_of(talk: Talk) -> torch.Tensor:
    """The cells [1, length, CELL] of a talk: each depends on all the keys up to its own."""
    keys, value, values = talk.keys.tolist(), 7, []
    for key in keys:
        value = (value * 31 + key + 1) % 251
        values.append([value] * CELL)
    return torch.tensor([values], dtype=torch.uint8)


def copy_of(talk: Talk, start: int, stop: int) -> HostCells:
    return HostCells(start, stop, (cells_of(talk)[:, start:stop].clone(),))


def holds(cells: Sequence[HostCells], talk: Talk, position: int) -> bool:
    """Say whether these are the cells [0, position) of a talk, contiguous."""
    edges = [0, *(part.stop for part in cells)]
    return (
        [part.start for part in cells] == edges[:-1]
        and edges[-1] == position
        and torch.equal(torch.cat([part.tensors[0] for part in cells], 1), cells_of(talk)[:, :position])
    )


def snapshot(position: int) -> Snapshot:
    return Snapshot(position, (torch.zeros(STATE, dtype=torch.uint8),))


def slot(number: int) -> HolderId:
    return HolderId("slot", number)


@dataclass
class Told:
    """What the engine and the holders know from the news alone."""

    states: set[bytes] = field(default_factory=set)
    kept: dict[HolderId, int] = field(default_factory=dict)
    evicted: list[tuple[HolderId, bytes]] = field(default_factory=list)

    def hear(self, changes: Changes) -> None:
        self.states = (self.states | changes.states_added) - changes.states_removed
        for kept in changes.kept:
            self.kept[kept.holder.id] = kept.holder.length
        for gone in changes.gone:
            self.kept.pop(gone, None)
        self.evicted += [(holder, prefix) for holder, prefixes in changes.evicted for prefix in prefixes]


@dataclass
class Store:
    """A shelf and its parking. copying: the conversations whose cells are on their way, and which cells."""

    budget: int = 10_000
    root_cells: bool = True
    life: int = 0
    told: Told = field(default_factory=Told)
    copying: dict[HolderId, tuple[Talk, tuple[Range, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shelf = Shelf(self.budget, self.life, root_cells=self.root_cells)
        self.parking = Parking(self.shelf, CELL)
        self._clock = itertools.count(1.0)

    def state(self, holder: HolderId, talk: Talk, position: int | None = None) -> bytes | None:
        """Keep the running state of a talk at a cut, its end unless said otherwise; None where there is no
        room."""
        position = position or talk.length
        prefix = talk.prefix(position)
        lease = self.shelf.reserve_state(holder, prefix, STATE)
        if lease:
            self.shelf.keep_state(lease, prefix, snapshot(position))
        return None if lease is None else prefix

    def park(
        self,
        number: int,
        talk: Talk,
        edges: Sequence[int] = (ROOT,),
        states: Sequence[int] = (),
    ) -> tuple[HolderId, tuple[Range, ...]] | None:
        """Park a talk from a slot, in spans cut at `edges`, with its states at `states`; the cells are on
        their way then."""
        stops = [*sorted(edge for edge in edges if edge < talk.length), talk.length]
        granted = self.parking.park(
            slot(number),
            Parkable(
                holder=Holder(slot(number), talk.length, talk.cuts, talk.length, talk.length),
                namespace=SPACE,
                keys=talk.keys,
                edges=tuple((stop, talk.prefix(stop)) for stop in stops),
                states=tuple(talk.prefix(position) for position in states),
            ),
            next(self._clock),
        )
        if granted is not None:
            self.copying[granted[0]] = (talk, granted[1])
        return granted

    def copied(self, name: HolderId, *, failed: bool = False) -> None:
        """The cells of a conversation have come, or have not."""
        talk, ranges = self.copying.pop(name)
        cells = None if failed else tuple(copy_of(talk, start, stop) for start, stop in ranges)
        self.parking.parked(name, cells)

    def keep(
        self, number: int, talk: Talk, edges: Sequence[int] = (ROOT,), states: Sequence[int] = ()
    ) -> HolderId:
        """Park a talk to the end, with states that the slot has let go of since."""
        prefixes = [self.state(slot(number), talk, position) for position in states]
        granted = self.park(number, talk, edges, states)
        assert granted is not None
        self.copied(granted[0])
        self.shelf.let_go(slot(number), [prefix for prefix in prefixes if prefix])
        return granted[0]

    def root(self, talk: Talk, *, state: bool = True) -> HolderId:
        """Make the system prompt of a talk a root."""
        if state:
            self.state(slot(9), talk, ROOT)
        self.parking.add_root(talk.prefix(ROOT), ROOT)
        self.shelf.let_go(slot(9), [talk.prefix(ROOT)])
        return root_holder(talk.prefix(ROOT))

    def lend(self, name: HolderId, position: int) -> Loan | None:
        return self.parking.lend(name, position)

    @property
    def names(self) -> set[HolderId]:
        return set(self.parking.conversations)

    @property
    def used(self) -> int:
        return self.shelf.ledger.used

    def check(self) -> None:
        """Assert all that must be true at any time; the news is taken."""
        self.told.hear(self.shelf.news.take())
        self.shelf.check_integrity()
        self.parking.check_integrity()
        shelf, talks = self.shelf, self.parking.conversations
        sizes = [state.snapshot.nbytes for state in shelf.states.values()]
        sizes += [(s.stop - s.start) * CELL for s in (*shelf.spans.values(), *shelf._withdrawn)]
        sizes += [len(kept.keys) * KEY for kept in talks.values()]
        sizes += [shelf.ledger.size(lease) for lease in shelf.leases]
        assert shelf.ledger.used == sum(sizes) <= self.budget
        assert sum(shelf.bytes_by_kind().values()) == shelf.ledger.used
        for state_or_span in (*shelf.states.values(), *shelf.spans.values()):
            assert state_or_span.holders or state_or_span.pins > 0, "kept for nobody"
            for holder in state_or_span.holders:
                assert holder.kind != "parked" or holder in talks
                assert holder.kind != "root" or bytes.fromhex(str(holder.key)) in shelf.roots
        assert self.told.states == set(shelf.states)
        whole = {name: kept.holder.length for name, kept in talks.items() if kept.whole}
        roots = {name: length for name, length in self.told.kept.items() if name.kind == "root"}
        assert self.told.kept == whole | roots
        assert all(bytes.fromhex(str(name.key)) in shelf.roots for name in roots)


def size(talk: Talk, states: int = 0) -> int:
    """The bytes of a talk that shares nothing."""
    return talk.length * (CELL + KEY) + states * STATE


def lent(store: Store, name: HolderId, talk: Talk, position: int) -> bool:
    """Say whether exactly these cells are lent; they are given back at once."""
    loan = store.lend(name, position)
    assert loan is not None
    store.parking.repay(name, None)
    store.check()
    return holds(loan.cells, talk, position)
