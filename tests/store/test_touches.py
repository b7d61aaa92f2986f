"""The file of touches (C8): what is kept, when it is written, and what two relays know of each other."""

import multiprocessing
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import structlog

from regrow.policy.cold_prefix import Book, settle, turn_of
from regrow.store import touches
from regrow.store.clock import system_clock
from regrow.store.touches import FILE, STALE_S, Touches
from tests.policy.prompts import chat
from tests.store.relays import LIMIT, TURNS, Machine, OneRelay

ONE, OTHER, _ = TURNS
PAUSE = LIMIT + STALE_S + 1


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@contextmanager
def warnings() -> Iterator[list[dict]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def stored(machine: Machine) -> dict:
    return msgspec.json.decode((machine.directory / FILE).read_bytes())["conversations"]


def test_a_conversation_is_cold_after_a_restart_and_stays_repacked_after_the_next(machine: Machine) -> None:
    assert machine.relay().turn(ONE) == (False, False)
    machine.relay().touches.save()
    machine.relays.clear()
    machine.wait(PAUSE)
    assert machine.relay().turn(ONE) == (True, True)
    machine.relays.clear()  # killed right after
    machine.wait(5)
    assert machine.relay().turn(ONE) == (False, True)
    assert machine.relay().turn(OTHER) == (False, False)


def test_without_a_restart_the_limit_is_exact(machine: Machine) -> None:
    machine.relay().turn(ONE)
    machine.wait(LIMIT)
    assert machine.relay().turn(ONE) == (False, False)
    machine.wait(LIMIT + 0.5)
    assert machine.relay().turn(ONE) == (True, True)


def test_a_latch_of_one_relay_holds_in_the_other_at_once(machine: Machine) -> None:
    for number in (0, 1):
        machine.relay(number).turn(ONE)
    machine.wait(PAUSE)
    assert machine.relay(0).turn(ONE) == (True, True)
    machine.relay(1).touches.save()
    assert machine.relay(1).turn(ONE) == (False, True)


def test_a_turn_in_one_relay_is_a_touch_in_the_other(machine: Machine) -> None:
    machine.relay(0).turn(ONE)
    machine.relay(1).turn(OTHER)
    machine.wait(PAUSE)
    machine.relay(0).turn(OTHER)
    machine.wait(5)
    assert machine.relay(1).turn(OTHER)[0] is False


def test_an_open_response_keeps_its_conversation_warm_in_every_relay(machine: Machine) -> None:
    machine.relay(1).turn(ONE)
    machine.relay(0).request(ONE)
    machine.wait(3 * LIMIT)
    assert machine.relay(0).turn(ONE)[0] is False
    assert machine.relay(1).turn(ONE)[0] is False
    machine.relay(0).touches.ended(ONE.key)
    machine.wait(LIMIT)
    assert machine.relay(0).turn(ONE)[0] is False
    machine.wait(PAUSE)
    assert machine.relay(0).turn(ONE)[0] is True


def test_what_concerns_no_decision_is_written_every_thirty_seconds_at_most(machine: Machine) -> None:
    relay, file = machine.relay(), machine.directory / FILE
    written = []
    for _ in range(300):
        relay.turn(ONE)
        written.append(file.stat().st_ino)
        machine.true += 1
    changes = sum(a != b for a, b in pairwise(written))
    assert changes == 300 // 30 - 1


def test_a_baseline_and_a_latch_are_written_at_once(machine: Machine) -> None:
    machine.relay().turn(ONE)
    machine.relay().turn(OTHER)
    assert stored(machine).keys() == {ONE.key, OTHER.key}
    machine.wait(PAUSE)
    machine.relay().turn(ONE)
    machine.true += 1
    assert not stored(machine)[OTHER.key]["latches"]
    assert stored(machine)[ONE.key]["latches"]


def test_the_end_of_a_response_is_saved(machine: Machine) -> None:
    machine.relay().turn(ONE)
    machine.true += 20
    machine.relay().touches.ended(ONE.key)
    machine.true += 5
    machine.relay().touches.save()
    assert stored(machine)[ONE.key]["touched"] == pytest.approx(machine.true - 5)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b"[" * 9000], ids=range(5))
def test_a_corrupt_file_is_empty_told_once_and_replaced(machine: Machine, text: bytes) -> None:
    (machine.directory / FILE).write_bytes(text)
    with warnings() as lines:
        assert machine.relay().turn(ONE) == (False, False)
    assert [line["what"] for line in lines] == ["is corrupt and counts as empty"]
    assert stored(machine).keys() == {ONE.key}


def test_a_missing_file_is_empty_and_nothing_to_tell(machine: Machine) -> None:
    with warnings() as lines:
        assert machine.relay().turn(ONE) == (False, False)
    assert lines == []


def test_a_lost_file_is_written_again_with_all_that_is_known(machine: Machine) -> None:
    machine.relay().turn(ONE)
    machine.wait(PAUSE)
    machine.relay().turn(ONE)
    (machine.directory / FILE).unlink()
    machine.relay().turn(OTHER)
    assert stored(machine)[ONE.key]["latches"]


def test_a_file_that_cannot_be_written_means_warm_and_is_told_once(machine: Machine) -> None:
    machine.relay().turn(ONE)
    (machine.directory / FILE).unlink()
    (machine.directory / FILE).mkdir()  # in its place
    with warnings() as lines:
        for _ in range(2):
            machine.wait(PAUSE)
            assert machine.relay().turn(ONE) == (False, False)
    assert [line["what"] for line in lines] == ["cannot be written"]


def test_a_lock_that_another_process_holds_means_warm(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touches, "LOCK_TRIES", 2)
    machine.relay().turn(ONE)
    machine.wait(PAUSE)
    with machine.relay(1).touches._exclusively():
        assert machine.relay(0).turn(ONE) == (False, False)
    machine.wait(PAUSE)
    assert machine.relay(0).turn(ONE) == (True, True)


def test_a_dry_run_records_touches_and_keeps_its_latches_to_itself(machine: Machine) -> None:
    dry = OneRelay(Touches(machine.directory, machine.clock(), keep_latches=False))
    dry.turn(ONE)
    machine.wait(PAUSE)
    assert dry.turn(ONE) == (True, True)
    assert dry.turn(ONE) == (False, True)
    machine.true += 40
    dry.turn(ONE)
    assert stored(machine)[ONE.key]["touched"] == pytest.approx(machine.true)
    assert machine.relay().turn(ONE) == (False, False)


def test_the_file_is_its_owners_alone_and_holds_hashes_only(machine: Machine) -> None:
    machine.relay().turn(ONE)
    machine.wait(PAUSE)
    machine.relay().turn(ONE)
    file = machine.directory / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert b"Task" not in file.read_bytes()
    assert b"agent" not in file.read_bytes()


def test_without_a_directory_all_is_kept_in_memory(machine: Machine) -> None:
    relay = OneRelay(Touches(None, machine.clock()))
    relay.turn(ONE)
    machine.true += LIMIT + 1
    assert relay.turn(ONE) == (True, True)
    relay.touches.save()
    assert list(machine.directory.iterdir()) == []


def latch_many(directory: Path, first: int) -> None:
    """Latch ten conversations in one relay, in a process of its own."""
    relay = Touches(directory, system_clock())
    for seed in range(first, first + 10):
        turn = turn_of(chat(13, seed=seed, lines=2))

        def step(book: Book, now: float, turn=turn) -> tuple[bool, Book]:
            return settle(book, turn, True, now)

        assert relay.decide(turn.key, step)
        relay.ended(turn.key)


def test_two_processes_on_one_file_lose_no_latch(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=latch_many, args=(tmp_path, first)) for first in (0, 10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    resumed = Touches(tmp_path, system_clock()).book
    assert len(resumed) == 20
    assert all(record.latches for record in resumed.values())
