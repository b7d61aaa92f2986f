"""Copies on their way, and the order they must keep with what writes to the slots they touch.

A fill makes a slot hold a prefix from another slot or from host memory, then restores the running state; a
save copies cells to host memory. What reads from a slot is finished before anything writes below it: the
order is kept here, on the device thread, whatever the actors do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from regrow.errors import DeviceFailed
from regrow.gpu.types import CellCopy, HostCells, Runner, Snapshot


@dataclass(frozen=True, slots=True)
class Fill:
    """Make `slot` hold the first `position` cells of `source` with the running state there (R4, S4).

    source: another slot, host cells contiguous from 0, or None where the slot's own cells reach there. done:
    gets None, or the error; then the slot is empty.
    """

    generation: int
    slot: int
    position: int
    source: int | Sequence[HostCells] | None
    state: Snapshot | None
    done: Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the cells of each of `ranges` (start, stop) of `slot` to host memory; done gets the copies in
    order, or the error."""

    generation: int
    slot: int
    ranges: tuple[tuple[int, int], ...]
    done: Callable[[object], None]


@dataclass(slots=True)
class _Copying:
    reads: int | None
    writes: int | None
    urgent: bool
    copies: list[CellCopy]
    finish: Callable[[], None]
    done: Callable[[object], None]


@dataclass(slots=True)
class Transfers:
    """The copies in progress on `runner`, oldest first."""

    runner: Runner
    _active: list[_Copying] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._active)

    def fill(self, fill: Fill) -> None:
        """Begin a fill. One that is refused before a cell is touched (ValueError) is answered at once."""
        runner, slot = self.runner, fill.slot
        self.settle(slot)
        for older in [c for c in self._active if c.writes == slot]:
            self._active.remove(older)
            older.done(DeviceFailed(f"another fill of slot {slot} took its place"))
        try:
            match fill.source:
                case None:
                    copies: list[CellCopy] = []
                case int():
                    copies = [runner.copy_cells(fill.source, slot, fill.position)]
                case _:
                    copies = [runner.load_cells(slot, fill.source)]
        except ValueError as error:
            fill.done(DeviceFailed(str(error)))
            return

        def finish() -> None:
            try:
                if fill.source is not None:
                    runner.filled(slot, fill.position)
                runner.mount(slot, fill.position, fill.state)
            except ValueError as error:
                runner.empty(slot)
                fill.done(DeviceFailed(str(error)))
            except Exception as error:
                fill.done(DeviceFailed(f"{type(error).__name__}: {error}"))
                raise
            else:
                fill.done(None)

        reads = fill.source if isinstance(fill.source, int) else None
        self._begin(_Copying(reads, slot, True, copies, finish, fill.done))

    def save(self, save: Save) -> None:
        """Begin a save; refused with the reason where the slot does not hold the ranges."""
        try:
            saved = [self.runner.save_cells(save.slot, start, stop) for start, stop in save.ranges]
        except ValueError as error:
            save.done(DeviceFailed(str(error)))
            return
        cells = tuple(host for host, _ in saved)
        self._begin(
            _Copying(save.slot, None, False, [copy for _, copy in saved], lambda: save.done(cells), save.done)
        )

    def settle(self, slot: int) -> None:
        """Finish every copy that reads from `slot`, before something writes to it."""
        for copying in [c for c in self._active if c.reads == slot]:
            while not self._advance(copying, float("inf")):
                pass

    def advance(self, urgent_s: float, background_s: float) -> None:
        """Let each kind of copy go on for about so many seconds, oldest first."""
        for urgent, seconds in ((True, urgent_s), (False, background_s)):
            oldest = next((c for c in self._active if c.urgent is urgent), None)
            if oldest is not None:
                self._advance(oldest, seconds)

    def fail(self, error: Exception) -> None:
        """Give up every copy."""
        active, self._active = self._active, []
        for copying in active:
            copying.done(error)

    def _begin(self, copying: _Copying) -> None:
        self._active.append(copying)
        if not copying.copies:
            self._advance(copying, 0.0)

    def _advance(self, copying: _Copying, seconds: float) -> bool:
        while copying.copies and copying.copies[0].advance(seconds):
            del copying.copies[0]
            if seconds <= 0:
                break
        if copying.copies:
            return False
        self._active.remove(copying)
        copying.finish()
        return True
