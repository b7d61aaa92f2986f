"""The real threads keep the promises that the virtual ones are tested for."""

import asyncio
import threading
from collections import deque

import pytest

from regrow.actors.threads import RealThreads


class Machine:
    """Does what it is given, in its thread, and says in which one."""

    def __init__(self) -> None:
        self.todo: deque[int] = deque()
        self.done: list[tuple[int, str]] = []
        self.closed = False
        self.idle = threading.Event()
        self._wake = threading.Condition()

    def give(self, work: int) -> None:
        with self._wake:
            self.todo.append(work)
            self._wake.notify()

    def step(self) -> bool:
        if not self.todo:
            return False
        self.done.append((self.todo.popleft(), threading.current_thread().name))
        if len(self.done) == 3:
            self.idle.set()
        return True

    @property
    def awake(self) -> bool:
        return bool(self.todo) or self.closed

    def wait(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self.awake)

    def close(self) -> None:
        with self._wake:
            self.closed = True
            self._wake.notify()


async def test_a_driven_object_works_in_its_own_thread_until_it_is_stopped() -> None:
    threads, machine = RealThreads(), Machine()
    driver = threads.drive("device", machine)
    for work in range(3):
        machine.give(work)
    await threads.run(machine.idle.wait)
    await driver.stop()
    assert machine.done == [(work, "device") for work in range(3)]
    machine.give(3)
    await threads.close()
    assert len(machine.done) == 3


async def test_what_is_delivered_runs_in_the_event_loop_in_order() -> None:
    threads, here = RealThreads(), threading.get_ident()
    delivered: list[tuple[int, int]] = []
    last = asyncio.Event()

    def deliver() -> None:
        for i in range(5):
            threads.deliver(lambda i=i: delivered.append((i, threading.get_ident())))  # type: ignore[misc]
        threads.deliver(last.set)

    await threads.run(deliver)
    await last.wait()
    assert delivered == [(i, here) for i in range(5)]
    await threads.close()


def test_what_is_delivered_to_a_loop_that_is_closed_goes_nowhere() -> None:
    async def main() -> RealThreads:
        threads = RealThreads()
        await threads.close()
        return threads

    threads = asyncio.run(main())
    threads.deliver(lambda: pytest.fail("it ran"))


async def test_a_function_runs_off_the_loop_and_its_error_comes_through() -> None:
    threads = RealThreads()
    assert await threads.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)
    await threads.close()


async def test_a_driver_that_hangs_is_not_waited_for_longer_than_said_and_ends_when_it_comes_back() -> None:
    threads, machine, hang = RealThreads(), Machine(), threading.Event()
    machine.give(0)
    machine.step = lambda: hang.wait()  # type: ignore[method-assign]
    driver = threads.drive("device", machine)
    await driver.stop(0.01)
    assert machine.closed
    hang.set()
    await driver.stop()
    await threads.close()
