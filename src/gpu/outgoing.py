"""Events on their way out of the device loop, in order; those of a slot wait for the snapshot before them."""

from collections.abc import Callable
from typing import Generic, TypeVar

from regrow.gpu.types import Snapshot, StateCopy

E = TypeVar("E")


class Outgoing(Generic[E]):
    """slot: whose an event is; None where it waits for nothing. keep: gives an event its snapshot."""

    def __init__(self, slot: Callable[[E], int | None], keep: Callable[[E, Snapshot | None], E]) -> None:
        self._slot, self._keep = slot, keep
        self._events: list[tuple[E, StateCopy | None]] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, event: E, copy: StateCopy | None = None) -> None:
        self._events.append((event, copy))

    def look(self, seconds: float) -> None:
        """Give the events their snapshots that are there by now, or after a while where `seconds` are
        infinite. Raises what went wrong with one."""
        for i, (event, copy) in enumerate(self._events):
            if copy is not None and copy.advance(seconds):
                self._events[i] = self._keep(event, copy.snapshot), None

    def give_up(self) -> None:
        """Wait for no snapshot any more."""
        self._events = [(event, None) for event, _ in self._events]

    def ready(self) -> list[E]:
        """Take out what may go."""
        ready, events, held = [], self._events, set()
        self._events = []
        for event, copy in events:
            slot = self._slot(event)
            if copy is None and slot not in held:
                ready.append(event)
            else:
                held.add(slot)
                self._events.append((event, copy))
        return ready
