"""Restoring by itself: what is read of a record, and what is left where it cannot be (K2, B1, S5)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from regrow.actors.disk_messages import ReadRecord, RecordRead
from regrow.actors.on_disk import OnDisk
from regrow.actors.restoring import Restoring
from regrow.policy.directory import Holder, HolderId
from tests.actors.kept import CELL, KEY, ROOT, SPACE, STATE, TURN, Store, Talk, copy_of, holds, slot, snapshot

CHAT = Talk(0, (1, 2, 3))
EDGES = (ROOT, ROOT + TURN, CHAT.length)
Waiter = asyncio.Future[HolderId | None]


def record(talk: Talk = CHAT, states: Sequence[int] = EDGES) -> OnDisk:
    edges = [0, *(edge for edge in EDGES if edge <= talk.length)]
    return OnDisk(
        kind="chat",
        holder=Holder(HolderId("disk", "a record"), talk.length, talk.cuts, talk.length, talk.length),
        namespace=SPACE,
        keys=talk.keys,
        spans=tuple((a, b, talk.prefix(b)) for a, b in pairwise(edges)),
        states=tuple((position, talk.prefix(position)) for position in states),
    )


@dataclass
class Shelved:
    """A store that restores; `reads` is what the disk was asked for."""

    budget: int = 10_000
    state: int = STATE
    reads: list[ReadRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Store(self.budget)
        self.restoring = Restoring(self.store.shelf, self.store.parking, self.state, self.reads.append)

    def restore(self, position: int, of: OnDisk | None = None) -> Waiter:
        waiter = self.restoring.restore(of or record(), position, 0.0)
        self.store.check()
        return waiter

    def come(self, *, well: bool = True) -> ReadRecord:
        """The disk has read what it was asked for first, or could not."""
        read = self.reads.pop(0)
        cells = tuple(copy_of(CHAT, start, stop) for start, stop, _ in read.spans)
        states = tuple((prefix, snapshot(position)) for position, prefix in read.states)
        self.restoring.came(RecordRead(read.name, (cells, states) if well else None))
        self.restoring.settle()
        self.store.check()
        return read


async def test_what_is_read_is_a_parked_conversation_with_its_states() -> None:
    shelved = Shelved()
    waiter = shelved.restore(CHAT.length)
    assert not waiter.done()
    read = shelved.come()
    assert [span[:2] for span in read.spans] == [(0, ROOT), (ROOT, ROOT + TURN), (ROOT + TURN, CHAT.length)]
    assert [position for position, _ in read.states] == list(EDGES)
    name = await waiter
    assert name is not None
    loan = shelved.store.lend(name, CHAT.length)
    assert loan is not None
    assert holds(loan.cells, CHAT, CHAT.length)
    assert shelved.store.used == CHAT.length * (CELL + KEY) + 3 * STATE


@pytest.mark.parametrize(
    ("position", "end"), [(ROOT, ROOT), (ROOT + 3, ROOT + TURN), (ROOT + TURN, ROOT + TURN)]
)
async def test_of_a_longer_record_only_the_spans_up_to_the_position_are_read(position: int, end: int) -> None:
    shelved = Shelved(state=0)
    waiter = shelved.restore(position)
    assert max(stop for _, stop, _ in shelved.come().spans) == end
    name = await waiter
    assert name is not None
    assert shelved.store.parking.conversations[name].holder.length == end


async def test_what_memory_has_is_not_read() -> None:
    shelved = Shelved()
    shelved.store.keep(0, CHAT.upto(1), edges=(ROOT,), states=(ROOT,))
    waiter = shelved.restore(CHAT.length)
    read = shelved.come()
    assert [span[:2] for span in read.spans] == [(ROOT + TURN, CHAT.length)]
    assert ROOT not in [position for position, _ in read.states]
    assert await waiter is not None


async def test_those_that_want_one_record_wait_for_one_read() -> None:
    shelved = Shelved()
    waiters = [shelved.restore(CHAT.length), shelved.restore(CHAT.length)]
    assert len(shelved.reads) == 1
    shelved.come()
    first, second = [await waiter for waiter in waiters]
    assert first == second is not None
    assert await shelved.restore(CHAT.length) == first
    assert shelved.reads == []


async def test_a_conversation_in_memory_that_lost_the_state_gets_that_alone() -> None:
    shelved = Shelved()
    name = shelved.store.keep(0, CHAT, edges=EDGES)
    waiter = shelved.restore(CHAT.length)
    read = shelved.come()
    assert read.spans == ()
    assert [position for position, _ in read.states] == [CHAT.length]
    assert await waiter == name
    assert shelved.store.shelf.states[CHAT.end].holders == {name}


async def test_a_conversation_on_its_way_from_a_slot_is_waited_for() -> None:
    shelved = Shelved(state=0)
    granted = shelved.store.park(0, CHAT, edges=EDGES)
    assert granted is not None
    waiter = shelved.restore(CHAT.length)
    assert not waiter.done()
    shelved.store.copied(granted[0])
    shelved.restoring.settle()
    assert await waiter == granted[0]


async def test_b1_without_room_nothing_is_read_and_nothing_is_left() -> None:
    for budget in (CHAT.length * (CELL + KEY) - 1, CHAT.length * (CELL + KEY) + STATE - 1):
        shelved = Shelved(budget=budget)
        assert await shelved.restore(CHAT.length) is None
        assert shelved.reads == []
        assert not shelved.store.shelf.leases
        assert not shelved.store.shelf.guarded


async def test_the_state_that_is_wanted_comes_before_the_others() -> None:
    shelved = Shelved(budget=CHAT.length * (CELL + KEY) + STATE)
    waiter = shelved.restore(CHAT.length)
    assert [position for position, _ in shelved.come().states] == [CHAT.length]
    assert await waiter is not None


@pytest.mark.parametrize("end", ["failed", "disk lost", "forgotten"])
async def test_what_does_not_come_leaves_nothing(end: str) -> None:
    shelved = Shelved()
    waiter = shelved.restore(CHAT.length)
    match end:
        case "failed":
            shelved.come(well=False)
        case "disk lost":
            shelved.restoring.disk_lost()
            shelved.restoring.settle()
        case "forgotten":
            shelved.store.parking.purge(frozenset({CHAT.prefix(ROOT)}))
            shelved.come()
    assert await waiter is None
    assert shelved.store.used == 0
    if shelved.reads:
        shelved.come()  # too late: nobody waits for it
    assert shelved.store.used == 0


async def test_a_waiter_that_has_given_up_is_no_trouble() -> None:
    shelved = Shelved()
    waiter = shelved.restore(CHAT.length)
    waiter.cancel()
    shelved.come()
    assert await shelved.restore(CHAT.length) is not None
    assert slot(0) not in shelved.store.parking.conversations
