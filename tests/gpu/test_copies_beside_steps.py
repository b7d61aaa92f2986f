"""Copies beside what runs: who waits for them and how long, and what an error or a reset leaves (S4)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from regrow.errors import DeviceFailed
from regrow.gpu.device_loop import (
    Broken,
    ChunkRead,
    DeviceLoop,
    Empty,
    Halt,
    Job,
    JobEnded,
    Reset,
    SnapshotAt,
    TokenDrawn,
)
from regrow.gpu.transfers import Fill, Save
from regrow.gpu.types import Snapshot
from regrow.policy.copy_share import BURST_S, SHARE
from regrow.policy.request import SamplingParams, StopRules
from tests.gpu.in_slots import content, held, hold, keys
from tests.world import fake_runner
from tests.world.fake_runner import PIECES, Costs, FakeCopy, FakeRunner, Operation, hash_of


class Clock:
    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Machine:
    """A device loop on a fake runner; `log` has its events and answers in the order they came, `calls` what
    the runner was called for, with the time."""

    def __init__(self, *, copy: float = 2**-14, slots: int = 4, hybrid: bool = True) -> None:
        self.clock = Clock()
        self.calls: list[tuple[float, tuple[object, ...]]] = []
        self.log: list[object] = []
        self.runner = FakeRunner(
            slots=slots,
            hybrid=hybrid,
            costs=Costs(copy=copy),
            sleep=self.clock.sleep,
            note=lambda what: self.calls.append((self.clock.now, what)),
        )
        self.loop = DeviceLoop(
            self.runner, decode_share=0.5, now=lambda: self.clock.now, deliver=self.log.extend
        )
        self.generation = 1
        self.loop.post(Reset(1))
        self.step()

    def step(self) -> bool:
        return self.loop.step()

    def rest(self) -> None:
        """Step until there is nothing left to do."""
        while self.step():
            pass

    def until(self, kind: type[object]) -> None:
        while not any(isinstance(entry, kind) for entry in self.log):
            assert self.step()

    def hold(self, slot: int, n: int = 256) -> dict[int, Snapshot]:
        return hold(self.runner, slot, keys(slot, n))

    def fill(
        self, slot: int, position: int, source: int | None, state: Snapshot | None, generation: int = 1
    ) -> None:
        self.loop.post(Fill(generation, slot, position, source, state, self.answer("fill")))

    def save(self, slot: int, *ranges: tuple[int, int], generation: int = 1) -> None:
        self.loop.post(Save(generation, slot, ranges, self.answer("save")))

    def answer(self, name: str) -> Callable[[object], None]:
        return lambda result: self.log.append((name, result))

    def answers(self, name: str) -> list[object]:
        return [entry[1] for entry in self.log if isinstance(entry, tuple) and entry[0] == name]

    def job(self, slot: int, n: int, *, start: int = 0, tokens: int = 4, snapshot_at: int = 0) -> None:
        """Read `keys(slot, n)` from `start` on, in chunks of 64, and draw so many tokens."""
        edges = [*range(start, n - 1, 64), n - 1]
        self.loop.post(
            Job(
                slot,
                epoch=7,
                generation=1,
                ids=keys(slot, n),
                start=start,
                chunks=tuple(pairwise(edges)) if start < n - 1 else (),
                snapshot_at=frozenset({snapshot_at}),
                sampling=SamplingParams(),
                stops=StopRules(tokens),
            )
        )

    def decoding(self, slot: int) -> None:
        """Let `slot` decode without an end."""
        self.job(slot, 65, tokens=10_000)
        self.until(TokenDrawn)

    def gaps(self, since: float) -> list[float]:
        """How long each step since then began after the end of the one before it."""
        begins = [at for at, call in self.calls if call[0] == "step"]
        return [b - a - self.runner.costs.step for a, b in pairwise(begins) if b >= since]


CELLS = 2048
COPY_S = 2**-14  # a cell
PIECE_S = CELLS / PIECES * COPY_S


def test_what_takes_no_longer_than_a_burst_is_mounted_in_one_gap() -> None:
    machine = Machine(copy=COPY_S)
    states = machine.hold(0, 512)
    machine.decoding(1)
    begin, steps = machine.clock.now, machine.runner.counts["step"]
    machine.fill(2, 512, 0, states[512])
    while not machine.answers("fill"):
        machine.step()
    assert machine.answers("fill") == [None]
    assert machine.runner.counts["step"] <= steps + 1
    assert max(machine.gaps(begin)) <= 512 * COPY_S < BURST_S


LONG_S = 1.0  # so long takes a copy of all `CELLS`
FINE = 1024  # pieces of it


@pytest.fixture
def fine_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_runner, "PIECES", FINE)


@dataclass
class Beside:
    """A machine on which slot 1 decodes; slot 0 holds `CELLS`, and host memory too."""

    copy: float = COPY_S
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        self.machine = machine = Machine(copy=self.copy)
        self.states = machine.hold(0, CELLS)
        self.park()
        machine.rest()
        (cells,) = machine.answers("save")
        assert isinstance(cells, tuple)
        self._cells = cells
        machine.log.clear()
        machine.decoding(1)
        self.begin = machine.clock.now

    def park(self) -> None:
        self.machine.save(0, (0, CELLS // 2), (CELLS // 2, CELLS))

    def mount(self) -> None:
        self.machine.fill(2, CELLS, 0, self.states[CELLS])

    def restore(self) -> None:
        fill = Fill(1, 3, CELLS, self._cells, self.states[CELLS], self.machine.answer("fill"))
        self.machine.loop.post(fill)

    def until_answered(self, count: int = 1) -> None:
        while len(self.machine.answers("fill") + self.machine.answers("save")) < count:
            self.machine.step()

    def gaps(self) -> list[float]:
        return self.machine.gaps(self.begin)


@pytest.mark.usefixtures("fine_pieces")
@pytest.mark.parametrize("kinds", [("park",), ("mount",), ("restore",), ("restore", "mount", "park")])
def test_copies_cost_a_running_stream_under_a_tenth_of_its_pace(kinds: tuple[str, ...]) -> None:
    beside = Beside(LONG_S / CELLS)
    machine = beside.machine
    for kind in kinds:
        getattr(beside, kind)()
    beside.until_answered(len(kinds))
    end = machine.clock.now
    assert end - beside.begin > len(kinds) * (LONG_S / SHARE) / 2
    steps = [at for at, call in machine.calls if call[0] == "step" and at >= beside.begin]
    for first in steps:
        if first + 2 <= end:
            assert sum(first <= at < first + 2 for at in steps) >= 0.9 * 2 / machine.runner.costs.step
    assert max(beside.gaps()) <= BURST_S + LONG_S / FINE


@pytest.mark.usefixtures("fine_pieces")
def test_what_nobody_waits_for_never_takes_more_than_its_share_of_a_step() -> None:
    beside = Beside(LONG_S / CELLS)
    beside.park()
    beside.until_answered()
    assert max(beside.gaps()) <= SHARE * 2 * beside.machine.runner.costs.step + LONG_S / FINE


def test_a_piece_that_took_too_long_is_paid_back_before_the_next_one() -> None:
    beside = Beside()
    beside.mount()
    beside.until_answered()
    assert max(beside.gaps()) <= BURST_S + PIECE_S
    assert sum(beside.gaps()) <= BURST_S + PIECE_S + SHARE * (beside.machine.clock.now - beside.begin)


def test_no_copy_comes_between_a_chunk_and_the_step_after_it() -> None:
    beside = Beside()
    machine = beside.machine
    machine.job(3, 640)
    beside.mount()
    beside.until_answered()
    calls = machine.calls
    chunks = [i for i, (at, call) in enumerate(calls) if call[:2] == ("read", 3)]
    assert len(chunks) >= 2
    for i in chunks:
        (begun, _), (ended, after) = calls[i : i + 2]
        assert after[0] == "step"
        assert ended - begun == machine.runner.costs.of_chunk(0, 64)


def pace_beside_a_read(snapshot_s: float) -> float:
    """Tokens a second that a stream draws while a prompt is read whose every cut is kept."""
    machine = Machine(copy=COPY_S)
    machine.runner.costs = replace(machine.runner.costs, snapshot=snapshot_s)
    machine.decoding(1)
    begin, steps = machine.clock.now, machine.runner.counts["step"]
    machine.job(2, 2048)
    for position in range(64, 2048, 64):
        machine.loop.post(SnapshotAt(2, 7, position))
    while machine.runner.counts["snapshot"] < 30:
        machine.step()
    return (machine.runner.counts["step"] - steps) / (machine.clock.now - begin)


def test_checkpoints_cost_a_running_stream_under_a_tenth_of_its_pace() -> None:
    assert pace_beside_a_read(0.02) >= 0.9 * pace_beside_a_read(0.0)


def test_a_slot_that_is_parked_and_filled_at_once_stops_no_running_stream() -> None:
    machine = Machine(copy=COPY_S)
    states = machine.hold(0, CELLS)
    machine.hold(2, CELLS)
    machine.decoding(1)
    begin = machine.clock.now
    machine.save(2, (0, CELLS))
    machine.fill(2, CELLS, 0, states[CELLS])
    while not machine.answers("fill"):
        machine.step()
    assert machine.answers("fill") == [None]
    (cells,) = machine.answers("save")
    assert isinstance(cells, tuple)
    assert content(cells) == hash_of(keys(2, CELLS))
    assert max(machine.gaps(begin)) <= BURST_S + 2 * PIECE_S


def test_with_nothing_else_to_do_copies_run_to_their_end() -> None:
    machine = Machine(copy=1.0)
    states = machine.hold(0)
    machine.save(0, (0, 256))
    machine.fill(2, 256, 0, states[256])
    assert machine.step()
    assert machine.answers("fill") == [None]
    assert len(machine.answers("save")) == 1
    assert not machine.step()


def test_a_request_that_rewrites_a_donor_begins_once_the_donor_is_copied() -> None:
    machine = Machine()
    states = machine.hold(0)
    machine.fill(2, 256, 0, states[256])
    machine.fill(0, 0, None, None)
    machine.job(0, 256)
    machine.rest()
    assert machine.answers("fill") == [None, None]
    assert held(machine.runner, 2) == hash_of(keys(0))


def test_a_request_that_goes_on_above_what_is_copied_from_its_slot_need_not_wait() -> None:
    machine = Machine(copy=COPY_S)
    states = machine.hold(0, CELLS)
    machine.fill(2, CELLS, 0, states[CELLS])
    machine.job(0, CELLS + 65, start=CELLS)
    machine.until(ChunkRead)
    assert not machine.answers("fill")
    machine.rest()
    assert machine.answers("fill") == [None]
    assert held(machine.runner, 2) == hash_of(keys(0, CELLS))


@pytest.mark.parametrize("operation", ["copy", "load", "save", "mount"])
def test_an_error_of_the_device_answers_every_copy_after_it_was_told(operation: Operation) -> None:
    machine = Machine()
    states = machine.hold(0)
    machine.hold(1)
    machine.save(1, (0, 128), (128, 256))
    machine.rest()
    (cells,) = machine.answers("save")
    assert isinstance(cells, tuple)
    machine.log.clear()
    machine.runner.faults[operation, machine.runner.counts[operation] + 1] = OSError("the bus fell off")
    machine.save(1, (0, 256))
    machine.fill(2, 256, 0, states[256])
    machine.loop.post(Fill(1, 3, 256, cells, None, machine.answer("fill")))
    machine.rest()
    assert isinstance(machine.log[0], Broken)
    assert len(machine.answers("fill")) == 2
    assert len(machine.answers("save")) == 1
    assert all(isinstance(answer, DeviceFailed) for answer in machine.answers("fill"))
    machine.loop.post(Reset(2))
    machine.rest()
    assert [machine.runner.length(slot) for slot in range(4)] == [0] * 4


class Breaking:
    """A copy that fails after so many pieces."""

    ended = False

    def __init__(self, copy: FakeCopy, pieces: int) -> None:
        self._copy, self._pieces = copy, pieces

    def advance(self, seconds: float) -> bool:
        self._pieces -= 1
        if self._pieces < 0:
            raise OSError("the bus fell off")
        return self._copy.advance(0.0)


class BreakingRunner(FakeRunner):
    """Copies between slots fail in their middle."""

    def copy_cells(self, source: int, slot: int, stop: int, *, lend: bool = False) -> FakeCopy:
        return Breaking(super().copy_cells(source, slot, stop), pieces=2)  # type: ignore[return-value]


def test_s4_an_error_in_the_middle_of_a_copy_breaks_the_device_and_nothing_of_it_is_used() -> None:
    runner = BreakingRunner(slots=4)
    log: list[object] = []
    loop = DeviceLoop(runner, decode_share=0.5, now=lambda: 0.0, deliver=log.extend)
    loop.post(Reset(1))
    states = hold(runner, 0, keys(0))
    hold(runner, 1, keys(1))
    loop.step()
    states = hold(runner, 0, keys(0))
    loop.post(Fill(1, 2, 256, 0, states[256], lambda answer: log.append(answer)))
    while loop.step():
        pass
    assert [type(entry) for entry in log] == [Broken, DeviceFailed]
    assert "the bus fell off" in str(log[1])


def test_a_reset_in_the_middle_of_copies_answers_them_and_they_write_nothing_more() -> None:
    machine = Machine(copy=COPY_S)
    states = machine.hold(0, CELLS)
    machine.hold(3, CELLS)
    machine.decoding(1)
    machine.save(3, (0, CELLS))
    machine.fill(2, CELLS, 0, states[CELLS])
    machine.fill(3, 64, 0, None)
    machine.step()
    machine.loop.post(Reset(2))
    machine.rest()
    answers = machine.answers("fill") + machine.answers("save")
    assert len(answers) == 3
    assert all("restarted" in str(answer) for answer in answers)
    assert [machine.runner.length(slot) for slot in range(4)] == [0] * 4


def test_copies_for_another_life_of_the_device_or_a_broken_one_are_refused() -> None:
    machine = Machine()
    states = machine.hold(0)
    machine.fill(2, 256, 0, states[256], generation=0)
    machine.save(0, (0, 256), generation=2)
    machine.rest()
    machine.runner.faults["digest", 1] = OSError("the bus fell off")
    machine.runner.faults["copy", 1] = OSError("the bus fell off")
    machine.fill(2, 256, 0, states[256])
    machine.rest()
    machine.fill(2, 256, 0, states[256])
    machine.save(0, (0, 256))
    machine.rest()
    assert len(machine.answers("fill")) == 3
    assert len(machine.answers("save")) == 2
    assert all(isinstance(a, DeviceFailed) for a in machine.answers("fill") + machine.answers("save"))


def test_a_slot_is_emptied_once_it_is_copied_but_not_for_another_life_or_in_a_request() -> None:
    machine = Machine()
    states = machine.hold(0)
    for post in (Empty(0, 0), Empty(2, 0)):
        machine.loop.post(post)
        machine.rest()
        assert machine.runner.length(0) == 256
    machine.fill(2, 256, 0, states[256])
    machine.loop.post(Empty(1, 0))
    machine.rest()
    assert machine.answers("fill") == [None]
    assert (machine.runner.length(0), machine.runner.length(2)) == (0, 256)
    machine.decoding(1)
    machine.loop.post(Empty(1, 1))
    machine.step()
    assert machine.runner.length(1) > 64


def test_a_slot_that_is_emptied_while_it_is_filled_is_empty() -> None:
    machine = Machine(copy=COPY_S)
    states = machine.hold(0, CELLS)
    machine.decoding(1)
    machine.fill(2, CELLS, 0, states[CELLS])
    machine.step()
    assert not machine.answers("fill")
    machine.loop.post(Empty(1, 2))
    machine.step()
    assert len(machine.answers("fill")) == 1
    assert machine.runner.length(2) == 0


def snapshots(machine: Machine) -> dict[int, Snapshot]:
    return {e.position: e.snapshot for e in machine.log if isinstance(e, ChunkRead) and e.snapshot}


def test_s6_a_state_that_is_asked_for_during_a_read_is_taken_if_the_read_has_not_come_there() -> None:
    machine = Machine()
    machine.job(0, 300, snapshot_at=256)
    machine.step()
    for command in (
        SnapshotAt(0, 7, 128),
        SnapshotAt(0, 6, 192),
        SnapshotAt(0, 7, 64),
        SnapshotAt(1, 7, 192),
    ):
        machine.loop.post(command)
    machine.rest()
    machine.loop.post(SnapshotAt(0, 7, 128))
    machine.rest()
    taken = snapshots(machine)
    assert list(taken) == [128, 256]
    assert [state.position for state in taken.values()] == [128, 256]


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
def test_case_28_a_read_that_is_halted_between_two_chunks_gives_the_state_it_has_come_to(
    hybrid: bool,
) -> None:
    machine = Machine(hybrid=hybrid)
    machine.job(0, 300)
    machine.until(ChunkRead)
    machine.loop.post(Halt(0, 7))
    machine.rest()
    ended = machine.log[-1]
    assert isinstance(ended, JobEnded)
    assert (ended.reason, ended.length) == ("halted", 64)
    assert (ended.snapshot is not None) == hybrid
    if ended.snapshot is not None:
        machine.fill(2, 64, 0, ended.snapshot)
        machine.rest()
        assert machine.answers("fill") == [None]


def test_a_request_that_is_halted_before_its_first_chunk_or_in_its_answer_gives_no_state() -> None:
    for read_on in (False, True):
        machine = Machine()
        machine.job(0, 100, tokens=100)
        if read_on:
            machine.until(TokenDrawn)
        machine.loop.post(Halt(0, 7))
        machine.rest()
        ended = machine.log[-1]
        assert isinstance(ended, JobEnded)
        assert ended.snapshot is None
