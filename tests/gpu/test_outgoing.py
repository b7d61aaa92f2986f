"""Events keep the order of their slot, whatever snapshots are on their way."""

from dataclasses import dataclass, replace

import pytest

from regrow.gpu.outgoing import Outgoing
from regrow.gpu.types import Snapshot


@dataclass(frozen=True)
class Event:
    slot: int | None
    name: str
    snapshot: Snapshot | None = None


class Coming:
    """A snapshot that comes when the test says so."""

    def __init__(self) -> None:
        self.ended = False
        self.error: Exception | None = None

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(64, ())

    def advance(self, seconds: float) -> bool:
        if self.error is not None:
            raise self.error
        return self.ended


@pytest.fixture
def outgoing() -> Outgoing[Event]:
    return Outgoing(lambda event: event.slot, lambda event, snapshot: replace(event, snapshot=snapshot))


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


def test_a_slots_events_wait_for_the_snapshot_before_them_and_others_pass(outgoing: Outgoing[Event]) -> None:
    coming = Coming()
    outgoing.add(Event(0, "chunk"), coming)
    outgoing.add(Event(0, "token"))
    outgoing.add(Event(1, "other"))
    outgoing.add(Event(None, "broken"))
    outgoing.look(0.0)
    assert names(outgoing.ready()) == ["other", "broken"]
    assert outgoing
    outgoing.add(Event(0, "end"))
    coming.ended = True
    outgoing.look(0.0)
    ready = outgoing.ready()
    assert names(ready) == ["chunk", "token", "end"]
    assert [event.snapshot for event in ready] == [Snapshot(64, ()), None, None]
    assert not outgoing


def test_of_two_snapshots_of_one_slot_the_later_one_does_not_overtake(outgoing: Outgoing[Event]) -> None:
    first, second = Coming(), Coming()
    outgoing.add(Event(0, "first"), first)
    outgoing.add(Event(0, "second"), second)
    second.ended = True
    outgoing.look(0.0)
    assert outgoing.ready() == []
    first.ended = True
    outgoing.look(0.0)
    assert names(outgoing.ready()) == ["first", "second"]


def test_what_is_given_up_goes_out_without_its_snapshot(outgoing: Outgoing[Event]) -> None:
    coming = Coming()
    outgoing.add(Event(0, "chunk"), coming)
    coming.error = OSError("the bus fell off")
    with pytest.raises(OSError, match="bus"):
        outgoing.look(0.0)
    outgoing.give_up()
    outgoing.look(0.0)
    assert outgoing.ready() == [Event(0, "chunk")]
