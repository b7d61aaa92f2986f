"""Write-behind by itself: what is copied, what it keeps in memory until the write has ended, and what waits
(B1, B3, D5)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from regrow.actors.behind import WriteBehind
from regrow.actors.on_disk import OnDisk, ToSave
from regrow.actors.parking import Parkable, Range
from regrow.policy.directory import Holder, HolderId
from tests.actors.kept import CELL, KEY, ROOT, SPACE, STATE, TURN, Store, Talk, copy_of, slot

CHAT = Talk(0, (1, 2, 3))
Granted = tuple[HolderId, tuple[Range, ...]]


def parkable(number: int, talk: Talk, edges: Sequence[int] = (ROOT,), states: Sequence[int] = ()) -> Parkable:
    stops = [*sorted(edge for edge in edges if edge < talk.length), talk.length]
    return Parkable(
        holder=Holder(slot(number), talk.length, talk.cuts, talk.length, talk.length),
        namespace=SPACE,
        keys=talk.keys,
        edges=tuple((stop, talk.prefix(stop)) for stop in stops),
        states=tuple(talk.prefix(position) for position in states),
    )


def on_disk(saved: ToSave) -> OnDisk:
    name = HolderId("disk", f"{saved.kind}-{saved.holder.cuts[-1][1].hex()}")
    holder = Holder(name, saved.holder.length, saved.holder.cuts, saved.holder.length)
    return OnDisk(saved.kind, holder, saved.namespace, saved.keys, saved.spans, saved.states)


@dataclass
class Desk:
    """A store and its write-behind. written: what the disk was asked for; ready: which slots were told."""

    budget: int = 10_000
    written: list[tuple[HolderId, tuple[ToSave, ...]]] = field(default_factory=list)
    ready: list[HolderId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Store(self.budget)
        self.behind = WriteBehind(
            self.store.shelf,
            self.store.parking.conversations,
            CELL,
            lambda name, records: self.written.append((name, records)),
            self.ready.append,
        )

    def save(
        self, number: int, talk: Talk, edges: Sequence[int] = (ROOT,), states: Sequence[int] = ()
    ) -> Granted | None:
        granted = self.behind.save(slot(number), parkable(number, talk, edges, states))
        self.store.shelf.check_integrity()
        return granted

    def granted(self, number: int, talk: Talk, states: Sequence[int] = ()) -> Granted:
        granted = self.save(number, talk, states=states)
        assert granted is not None
        return granted

    def copied(self, granted: Granted, talk: Talk) -> None:
        self.behind.copied(granted[0], [copy_of(talk, start, stop) for start, stop in granted[1]])

    def end_write(self, *, well: bool = True) -> tuple[ToSave, ...]:
        """The disk has written what it was asked for first, or could not."""
        name, records = self.written.pop(0)
        if well:
            self.behind.changed([on_disk(saved) for saved in records], ())
        self.behind.written(name, well=well)
        return records

    def keep(self, number: int, talk: Talk) -> HolderId:
        """A conversation has come into memory."""
        name = self.store.keep(number, talk)
        self.behind.kept([name])
        return name


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_b3_what_is_copied_from_a_slot_counts_until_its_write_has_ended(desk: Desk) -> None:
    granted = desk.granted(0, CHAT)
    assert granted[1] == ((0, ROOT), (ROOT, CHAT.length))
    assert desk.store.shelf.ledger.by_kind["buffer"] == desk.store.used - 0 == CHAT.length * CELL
    desk.copied(granted, CHAT)
    assert desk.store.used == CHAT.length * CELL
    [saved] = desk.end_write()
    assert desk.store.used == CHAT.length * KEY  # what a record is known by
    assert (saved.kind, saved.holder.length, len(saved.keys)) == ("chat", CHAT.length, CHAT.length)
    assert sorted(saved.cells) == sorted(saved.spans)
    assert desk.behind.at_rest


def test_states_are_kept_from_eviction_until_they_are_written(desk: Desk) -> None:
    prefix = desk.store.state(slot(0), CHAT)
    granted = desk.granted(0, CHAT, states=(CHAT.length,))
    assert prefix is not None
    assert desk.store.shelf.states[prefix].pins == 1
    desk.copied(granted, CHAT)
    [saved] = desk.end_write()
    assert set(saved.snapshots) == {prefix}
    assert saved.states == ((CHAT.length, prefix),)
    assert desk.store.shelf.states[prefix].pins == 0


def test_what_the_disk_has_already_is_neither_copied_nor_written(desk: Desk) -> None:
    first = CHAT.upto(2)
    desk.copied(desk.granted(0, first), first)
    desk.end_write()
    assert desk.save(0, first) is None
    assert desk.written == []
    name, ranges = granted = desk.save(0, CHAT, edges=(ROOT, first.length)) or (slot(0), ())
    assert ranges == ((first.length, CHAT.length),)
    desk.copied((name, ranges), CHAT)
    [saved] = desk.end_write()
    assert [part[:2] for part in saved.cells] == [(first.length, CHAT.length)]
    assert len(saved.spans) == 3
    assert granted


def test_records_that_are_gone_are_written_again(desk: Desk) -> None:
    desk.copied(desk.granted(0, CHAT), CHAT)
    desk.end_write()
    desk.behind.changed((), tuple(desk.behind.records))
    assert desk.store.used == 0
    assert desk.save(0, CHAT) is not None


def test_what_is_in_memory_is_written_from_there_and_cannot_go_meanwhile(desk: Desk) -> None:
    name = desk.keep(0, CHAT)
    assert len(desk.written) == 1
    desk.store.parking.drop(name)
    assert desk.store.used == CHAT.length * CELL  # the cells, until they are written
    [saved] = desk.end_write()
    assert sum(cells.nbytes for cells in saved.cells.values()) == CHAT.length * CELL
    assert desk.store.used == CHAT.length * KEY


def test_one_conversation_is_written_at_a_time_those_in_memory_first_and_slots_are_told_once(
    desk: Desk,
) -> None:
    talks = [Talk(n, (1,)) for n in range(4)]
    granted = desk.granted(0, talks[0])
    assert desk.save(1, talks[1]) is None
    assert desk.save(2, talks[2]) is None
    assert not desk.ready
    desk.copied(granted, talks[0])
    desk.keep(3, talks[3])
    desk.end_write()
    assert not desk.ready
    assert len(desk.written) == 1
    desk.end_write()
    assert desk.ready == [slot(1), slot(2)]
    desk.behind.go_on()
    assert len(desk.ready) == 2
    assert not desk.behind.at_rest
    assert desk.behind.save(slot(1), None) is None
    desk.behind.slot_lost(slot(2))
    assert desk.behind.at_rest


def test_a_conversation_that_left_memory_before_its_turn_is_not_waited_for(desk: Desk) -> None:
    granted = desk.granted(0, CHAT)
    name = desk.keep(1, Talk(5, (1,)))
    desk.store.parking.drop(name)
    desk.copied(granted, CHAT)
    desk.end_write()
    assert desk.behind.at_rest


def test_what_could_not_be_written_is_tried_again_after_the_next_that_could(desk: Desk) -> None:
    talks = [Talk(n, (1,)) for n in range(4)]
    desk.copied(desk.granted(0, talks[0]), talks[0])
    desk.end_write(well=False)
    name = desk.keep(1, talks[1])
    desk.end_write(well=False)
    assert desk.behind.at_rest
    desk.behind.slot_lost(slot(9))
    desk.copied(desk.granted(2, talks[2]), talks[2])
    desk.end_write()
    [(_, [again])] = desk.written
    assert again.holder.cuts == talks[1].cuts
    assert name in desk.store.names
    assert not desk.ready
    desk.end_write()
    assert desk.ready == [slot(0)]


def test_a_known_root_is_written_before_the_conversation_and_once(desk: Desk) -> None:
    desk.store.root(CHAT)
    desk.copied(desk.granted(0, CHAT, states=(ROOT,)), CHAT)
    root, chat = desk.end_write()
    assert (root.kind, root.holder.length, root.holder.cuts) == ("root", ROOT, CHAT.cuts[:1])
    assert set(root.snapshots) == {CHAT.prefix(ROOT)}
    assert (chat.kind, chat.holder.length) == ("chat", CHAT.length)
    other = Talk(0, (7,))
    desk.copied(desk.granted(1, other), other)
    [only] = desk.end_write()
    assert only.kind == "chat"
    assert desk.save(2, Talk(0)) is None


def test_a_conversation_that_is_a_root_is_written_as_that_alone(desk: Desk) -> None:
    desk.store.root(CHAT)
    desk.copied(desk.granted(0, Talk(0)), CHAT)
    [root] = desk.end_write()
    assert (root.kind, root.holder.length) == ("root", ROOT)


def test_b1_where_not_even_the_keys_of_a_record_fit_it_is_known_all_the_same() -> None:
    desk = Desk(budget=CHAT.length * KEY - 1)
    saved = ToSave("chat", Holder(slot(0), CHAT.length, CHAT.cuts), SPACE, CHAT.keys, (), (), {}, {})
    desk.behind.changed([on_disk(saved)], ())
    assert len(desk.behind.records) == 1
    desk.behind.changed((), tuple(desk.behind.records))
    assert desk.store.used == 0


def test_s3_without_room_nothing_is_copied_and_nothing_is_held() -> None:
    desk = Desk(budget=STATE + CHAT.length * CELL - 1)
    prefix = desk.store.state(slot(0), CHAT)
    assert prefix is not None
    desk.store.shelf.pin(prefix)  # so that there is no room
    assert desk.save(0, CHAT, states=(CHAT.length,)) is None
    assert desk.store.shelf.states[prefix].pins == 1
    assert desk.store.used == STATE
    assert desk.behind.at_rest


@pytest.mark.parametrize("end", ["copy failed", "device lost", "given up", "all given up"])
def test_what_ends_before_it_is_written_leaves_nothing(desk: Desk, end: str) -> None:
    granted = desk.granted(0, CHAT)
    match end:
        case "copy failed":
            desk.behind.copied(granted[0], None)
        case "device lost":
            desk.behind.device_lost()
        case "given up":
            desk.behind.give_up(frozenset({Talk(9).prefix(ROOT)}))
            desk.behind.give_up(frozenset({CHAT.prefix(ROOT + TURN)}))
            desk.copied(granted, CHAT)
        case "all given up":
            desk.behind.give_up(None)
            desk.copied(granted, CHAT)
    desk.store.shelf.check_integrity()
    assert desk.written == []
    assert desk.store.used == 0
    assert desk.behind.at_rest
    desk.copied(granted, CHAT)  # too late: nobody waits for it
    desk.behind.written(granted[0])
    assert desk.written == []


def test_without_the_disk_what_it_was_writing_is_let_go_and_its_records_are_unknown(desk: Desk) -> None:
    desk.copied(desk.granted(0, CHAT), CHAT)
    desk.end_write()
    other = Talk(5, (1,))
    desk.copied(desk.granted(1, other), other)
    desk.behind.device_lost()  # does not matter any more
    assert desk.store.used > 0
    desk.behind.disk_lost()
    assert desk.store.used == 0
    assert desk.behind.records == {}
    granted = desk.granted(0, CHAT)
    desk.behind.disk_lost()  # what is still being copied is written by the next one
    desk.copied(granted, CHAT)
    assert len(desk.written) == 2
