"""A device that waits a moment for a request which is being prepared, in real time."""

import threading
import time
from collections.abc import Iterator

import pytest

from regrow.gpu.device_loop import DeviceEvent, DeviceLoop, Job, TokenDrawn
from regrow.gpu.transfers import Fill
from regrow.policy.keys import as_keys
from regrow.policy.request import SamplingParams, StopRules
from tests.world.fake_runner import FakeRunner

LINGER_S = 5.0  # so that only what comes ends it


class Desk:
    """A loop with a stream in slot 0, in a thread of its own once it is `begun`."""

    def __init__(self, linger_s: float = LINGER_S) -> None:
        self.runner = FakeRunner(slots=3, hybrid=False)
        self.told: list[DeviceEvent] = []
        self.loop = DeviceLoop(
            self.runner, decode_share=0.5, now=time.monotonic, deliver=self.told.extend, linger_s=linger_s
        )
        self.loop.post(self.job(0))
        while self.steps == 0:
            self.loop.step()
        self.thread = threading.Thread(target=self._drive, daemon=True)

    def job(self, slot: int) -> Job:
        ids = as_keys(range(16, 40))
        rules = StopRules(max_tokens=10**9)
        return Job(slot, 1, 0, ids, 0, ((0, 24),), frozenset(), SamplingParams(), rules)

    @property
    def steps(self) -> int:
        return self.runner.counts["step"]

    def _drive(self) -> None:
        while not self.loop.closed:
            self.loop.step()

    def rests(self) -> bool:
        """Say whether no step begins for a moment."""
        time.sleep(0.05)
        before = self.steps
        time.sleep(0.1)
        return self.steps == before


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    desk.loop.expect()
    desk.thread.start()
    yield desk
    desk.loop.close()
    desk.thread.join(5)
    assert not desk.thread.is_alive()


def test_no_step_begins_while_a_request_is_expected_and_the_stream_goes_on_once_it_is_there(
    desk: Desk,
) -> None:
    assert desk.rests()
    desk.loop.post(desk.job(1))
    deadline = time.monotonic() + 5
    while not any(isinstance(event, TokenDrawn) and event.slot == 1 for event in desk.told):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not desk.rests()


def test_the_copy_that_a_request_needs_ends_the_wait_too(desk: Desk) -> None:
    assert desk.rests()
    filled = threading.Event()
    desk.loop.post(Fill(0, 2, 8, 0, None, lambda _: filled.set()))
    assert filled.wait(5)


def test_closing_ends_the_wait(desk: Desk) -> None:
    assert desk.rests()
    begun = time.monotonic()
    desk.loop.close()
    desk.thread.join(5)
    assert time.monotonic() - begun < LINGER_S / 2


def test_a_request_that_never_comes_is_waited_for_no_longer_than_that() -> None:
    desk = Desk(linger_s=0.02)
    desk.loop.expect()
    before, begun = desk.steps, time.monotonic()
    while desk.steps == before:
        desk.loop.step()
    assert 0.03 < time.monotonic() - begun < 2
    begun = time.monotonic()
    for _ in range(5):
        desk.loop.step()
    assert time.monotonic() - begun < 0.03


def test_nothing_is_waited_for_where_no_stream_runs() -> None:
    desk = Desk()
    desk.loop.expect()
    desk.loop._active.clear()
    begun = time.monotonic()
    desk.loop.step()
    assert time.monotonic() - begun < LINGER_S / 2
