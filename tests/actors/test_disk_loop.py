"""The disk's thread alone: order, answers, rest between pieces, and what it says of itself."""

import errno
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from regrow.actors.disk_loop import RETRY_S, DiskLoop, Use, Write
from regrow.actors.on_disk import OnDisk
from regrow.store import records as records_module
from regrow.store.record import Broken
from regrow.store.records import NewRecord, NoRoom, Records
from tests.store.disk import SimulatedDisk
from tests.store.talks import IDENTITY, talk


@dataclass
class Bench:
    """A loop whose clock moves by what each operation of the disk costs, in seconds a byte."""

    now: float = 0.0
    cost: float = 0.0
    told: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.disk = SimulatedDisk(note=self._note)
        self.records = Records(self.disk, IDENTITY, 1 << 20, 0)
        self.loop = DiskLoop(self.records, {}, lambda: self.now, self._changed)

    def _note(self, operation: str, size: int) -> None:
        self.now += self.cost * size

    def _changed(self, live: Mapping[str, OnDisk]) -> None:
        self.told.append(len(live))

    def answer(self, name: str) -> Callable[[object], None]:
        return lambda result: self.told.append((name, result))

    def write(self, name: str, new: NewRecord) -> None:
        self.loop.post(Write(lambda: new, self.answer(name)))

    def run(self) -> list[object]:
        while self.loop.step():
            pass
        told, self.told = self.told, []
        return told


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_jobs_are_done_in_order_and_what_changed_is_told_before_their_answers(bench: Bench) -> None:
    bench.write("a", talk(7))
    bench.loop.post(Use(lambda records: len(records.live()), bench.answer("count")))
    bench.loop.post(Use(lambda records: records.remove(records.stored), bench.answer("remove")))
    assert bench.run() == [1, ("a", None), ("count", 1), 0, ("remove", 1)]


def test_what_is_urgent_is_done_between_the_pieces_of_a_write(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "PIECE", 1 << 10)
    bench.write("long", talk(7, range(30)))
    assert bench.loop.step()
    assert bench.loop.step()
    bench.loop.post(Use(lambda records: len(records.live()), bench.answer("later")))
    bench.loop.post(Use(lambda records: len(records.live()), bench.answer("urgent"), urgent=True))
    assert bench.run() == [("urgent", 0), 1, ("long", None), ("later", 1)]


def test_whatever_a_job_raises_is_its_answer_and_the_next_one_runs(bench: Bench) -> None:
    def fails(records: Records) -> object:
        raise RuntimeError("a bug")

    bench.loop.post(Use(fails, bench.answer("one")))
    bench.write("two", talk(7))
    [(_, error), *rest] = bench.run()  # type: ignore[misc]
    assert isinstance(error, RuntimeError)
    assert rest == [1, ("two", None)]


@pytest.mark.parametrize(("error", "state"), [(errno.ENOSPC, "full"), (errno.EIO, "read only")])
def test_after_an_error_of_the_disk_nothing_is_written_for_a_while(
    bench: Bench, error: int, state: str
) -> None:
    bench.disk.fails["write"] = error
    bench.write("fails", talk(7))
    [(_, raised)] = bench.run()  # type: ignore[misc]
    assert isinstance(raised, OSError)
    assert bench.loop.counters.state == state
    bench.disk.fails.clear()
    bench.now += RETRY_S / 2
    bench.write("too early", talk(7))
    [(_, raised)] = bench.run()  # type: ignore[misc]
    assert isinstance(raised, NoRoom)
    assert bench.records.live() == {}
    bench.now += RETRY_S
    bench.write("again", talk(7))
    assert bench.run() == [1, ("again", None)]
    assert (bench.loop.counters.state, bench.loop.counters.reason) == ("on", "")
    assert bench.loop.counters.failed == 1


def test_a_record_without_room_is_said_and_leaves_what_is_there(bench: Bench) -> None:
    bench.records.budget = 10_000
    bench.write("fits", talk(7))
    bench.write("does not", talk(8, range(50)))
    [_, _, (_, raised)] = bench.run()  # type: ignore[misc]
    assert isinstance(raised, NoRoom)
    assert bench.loop.counters.state == "full"
    assert len(bench.records.live()) == 1


def test_a_record_that_lost_what_it_was_to_go_on_from_changes_nothing_of_the_state(bench: Bench) -> None:
    bench.write("nothing", talk(7, given=()))
    [(_, raised)] = bench.run()  # type: ignore[misc]
    assert isinstance(raised, Broken)
    assert bench.loop.counters.state == "on"


def test_a_bug_in_a_write_is_its_answer(bench: Bench) -> None:
    def fails() -> NewRecord:
        raise RuntimeError("a bug")

    bench.write("a bug", replace(talk(7), keys="no keys"))  # type: ignore[arg-type]
    bench.loop.post(Write(fails, bench.answer("another")))
    [(_, raised), (_, other)] = bench.run()  # type: ignore[misc]
    assert isinstance(raised, TypeError | ValueError)
    assert isinstance(other, RuntimeError)
    assert bench.loop.counters.state == "on"


def test_a_slow_disk_shows_at_once_and_one_that_became_faster_is_found_out_by_writing(bench: Bench) -> None:
    bench.loop.measured(1_000_000, 0.001)
    fast = bench.loop.counters.rate
    assert fast == pytest.approx(1e9)
    bench.loop.measured(1_000_000, 10)
    slow = bench.loop.counters.rate
    assert slow is not None
    assert slow < 1e6
    bench.cost = 1e-8
    for number in range(20):
        bench.write("fast", talk(number))
    bench.run()
    better = bench.loop.counters.rate
    assert better is not None
    assert better > 10 * slow
    bench.loop.measured(0, 0)
    assert bench.loop.counters.rate == better


def test_a_piece_is_followed_by_a_rest_which_what_is_urgent_and_the_end_cut_short(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "PIECE", 1 << 10)
    monkeypatch.setattr("regrow.actors.disk_loop.LONGEST_REST_S", 3600.0)
    bench.cost = 1.0  # so a rest is as long as it may be
    bench.write("long", talk(7, range(30)))
    thread = threading.Thread(target=bench.run, daemon=True)
    thread.start()
    for _ in range(20):
        urgent = threading.Event()
        bench.loop.post(Use(lambda records: None, lambda result, done=urgent: done.set(), urgent=True))
        assert urgent.wait(60)
    assert thread.is_alive()
    bench.loop.close()
    thread.join(60)
    assert not thread.is_alive()


def test_waiting_ends_with_a_job_and_with_the_end(bench: Bench) -> None:
    thread = threading.Thread(target=bench.loop.wait, daemon=True)
    thread.start()
    bench.write("a", talk(7))
    thread.join(60)
    assert not thread.is_alive()
    bench.run()
    thread = threading.Thread(target=bench.loop.wait, daemon=True)
    thread.start()
    bench.loop.close()
    thread.join(60)
    assert not thread.is_alive()
