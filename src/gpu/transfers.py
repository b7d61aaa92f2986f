"""Copies on their way, and the order they must keep with what writes to the slots they touch.

A fill makes a slot hold a prefix from another slot or from host memory, and the running state there; a save
copies cells to host memory. What reads from a slot is finished before anything writes to those cells: the
order is kept here, on the device thread, whatever the actors do and whichever way the device copies. A fill
waits for the copies from its slot without stopping anybody else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from regrow.errors import DeviceFailed
from regrow.gpu.types import CellCopy, HostCells, Runner, Snapshot


@dataclass(frozen=True, slots=True)
class Fill:
    """Make `slot` hold the first `position` cells of `source` with the running state there (R4, S4).

    source: another slot, host cells contiguous from 0, or None where the slot's own cells reach there. done:
    gets None, or the error; then the slot is empty, or as it was where the fill was refused. lend: the slot
    reads a chunk next, so that cells may be lent to it until then.
    """

    generation: int
    slot: int
    position: int
    source: int | Sequence[HostCells] | None
    state: Snapshot | None
    done: Callable[[object], None]
    lend: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the cells of each of `ranges` (start, stop) of `slot` to host memory; done gets the copies in
    order, or the error."""

    generation: int
    slot: int
    ranges: tuple[tuple[int, int], ...]
    done: Callable[[object], None]


@dataclass(slots=True, eq=False)
class _Copying:
    """reads: the slot that cells below `below` are copied from. writes: the slot whose cells from `above` on
    may be overwritten once it has begun. copies: what is left of it; None before it has begun."""

    urgent: bool
    begin: Callable[[], list[CellCopy]]
    finish: Callable[[], object]
    done: Callable[[object], None]
    reads: int | None = None
    below: int = 0
    writes: int | None = None
    above: int = 0
    copies: list[CellCopy] | None = None


@dataclass(slots=True)
class Transfers:
    """The copies in progress on `runner`, oldest first. Whatever is given here is answered once. filled: how
    many fills were."""

    runner: Runner
    filled: int = 0
    _active: list[_Copying] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._active)

    def fill(self, fill: Fill) -> None:
        """Begin a fill, or let it wait for what is copied from its slot. One that is refused (ValueError) is
        answered at once."""
        runner, slot = self.runner, fill.slot

        def begin() -> list[CellCopy]:
            copies: list[CellCopy] = []
            if isinstance(fill.source, int):
                copies.append(runner.copy_cells(fill.source, slot, fill.position, lend=fill.lend))
            elif fill.source is not None:
                copies.append(runner.load_cells(slot, fill.source, lend=fill.lend))
            if fill.state is not None and runner.geometry.hybrid:
                copies.append(runner.load_state(slot, fill.state))
            return copies

        def finish() -> None:
            try:
                if fill.source is not None:
                    runner.filled(slot, fill.position)
                runner.mount(slot, fill.position, fill.state)
            except ValueError:
                runner.empty(slot)
                raise

        reads = fill.source if isinstance(fill.source, int) else None
        above = fill.position if fill.source is None else 0
        self._add(_Copying(True, begin, finish, fill.done, reads, fill.position, slot, above))

    def save(self, save: Save) -> None:
        """Begin a save; refused with the reason where the slot does not hold the ranges."""
        cells: list[HostCells] = []

        def begin() -> list[CellCopy]:
            saved = [self.runner.save_cells(save.slot, start, stop) for start, stop in save.ranges]
            cells.extend(host for host, _ in saved)
            return [copy for _, copy in saved]

        below = max((stop for _, stop in save.ranges), default=0)
        self._add(_Copying(False, begin, lambda: tuple(cells), save.done, save.slot, below))

    def settle(self, slot: int, position: int = 0) -> None:
        """Finish every copy that touches cells of `slot` from `position` on, before they are written to."""
        for copying in list(self._active):
            if (copying.reads == slot and copying.below > position) or copying.writes == slot:
                while copying in self._active:
                    self._advance(copying, math.inf)

    @property
    def urgent(self) -> bool:
        """Whether a request waits for any of them."""
        return any(copying.urgent for copying in self._active)

    def look(self) -> None:
        """Take note of what has ended by itself, and begin what waited for it; nothing else goes on."""
        for copying in list(self._active):
            self._look_at(copying)

    def advance(self, seconds: float) -> bool:
        """Let the oldest go on for about so many seconds, those that requests wait for first; what it waits
        for before it. True where that has ended, so that there may be time left for more."""
        oldest = min(self._active, key=lambda copying: not copying.urgent, default=None)
        return oldest is not None and self._advance(oldest, seconds)

    def fail(self, error: Exception) -> None:
        """Give up every copy."""
        active, self._active = self._active, []
        for copying in active:
            copying.done(error)

    def _add(self, copying: _Copying) -> None:
        self._active.append(copying)
        self._look_at(copying)

    def _before(self, copying: _Copying) -> _Copying | None:
        """Return a copy that must end before this one begins."""
        if copying.copies is not None or copying.writes is None:
            return None
        slot, older = copying.writes, self._active[: self._active.index(copying)]
        reading = (c for c in self._active if c.copies and c.reads == slot and c.below > copying.above)
        return next(reading, None) or next((c for c in older if c.writes == slot), None)

    def _look_at(self, copying: _Copying) -> None:
        while copying in self._active and self._waits_for_nothing(copying):
            self._advance(copying, 0.0)

    def _waits_for_nothing(self, copying: _Copying) -> bool:
        if copying.copies is None:
            return self._before(copying) is None
        return copying.copies[0].ended

    def _begin(self, copying: _Copying) -> None:
        try:
            copying.copies = copying.begin()
        except ValueError as error:
            self._end(copying, DeviceFailed(str(error)))
        else:
            if not copying.copies:
                self._finish(copying)

    def _advance(self, copying: _Copying, seconds: float) -> bool:
        before = self._before(copying)
        if before is not None:
            return self._advance(before, seconds)
        if copying.copies is None:
            self._begin(copying)
            return True
        if not copying.copies[0].advance(seconds):
            return False
        del copying.copies[0]
        if not copying.copies:
            self._finish(copying)
        return True

    def _finish(self, copying: _Copying) -> None:
        """What is raised here, but for a refusal, leaves the copy to `fail`."""
        try:
            result = copying.finish()
        except ValueError as error:
            result = DeviceFailed(str(error))
        self._end(copying, result)

    def _end(self, copying: _Copying, result: object) -> None:
        self._active.remove(copying)
        self.filled += copying.urgent
        copying.done(result)
