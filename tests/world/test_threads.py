"""The virtual threads keep the promises of `Threads`, in virtual time, under every seed."""

import asyncio
import functools
from collections import deque

import pytest

from regrow.actors.threads import Threads
from tests.world.loop import LeftOver, VirtualLoop, run_world
from tests.world.threads import VirtualThreads

SEEDS = range(10)


class Machine:
    """A driven object that works through a list of durations and reports each with its time."""

    def __init__(self, world: VirtualLoop, threads: Threads) -> None:
        self.world = world
        self.threads = threads
        self.todo: deque[float] = deque()
        self.closed = False
        self.reports: list[tuple[float, float]] = []
        self.done = asyncio.Event()

    def step(self) -> bool:
        if not self.todo:
            return False
        seconds = self.todo.popleft()
        begin = self.world.time()
        self.world.sleep(seconds)
        assert self.world.time() == begin + seconds
        self.threads.deliver(lambda: self.report(seconds))
        return True

    def report(self, seconds: float) -> None:
        self.reports.append((self.world.time(), seconds))
        if seconds == 0:
            self.done.set()

    @property
    def awake(self) -> bool:
        return bool(self.todo) or self.closed

    def wait(self) -> None:
        raise AssertionError("a virtual thread never blocks")

    def close(self) -> None:
        self.closed = True


def test_work_takes_its_time_and_is_reported_when_it_ends_in_order() -> None:
    async def scenario(world: VirtualLoop) -> list[tuple[float, float]]:
        machine = Machine(world, VirtualThreads(world))
        driver = machine.threads.drive("machine", machine)
        machine.todo.extend([1.0, 0.5])
        await asyncio.sleep(10)
        machine.todo.extend([2.0, 0.0])
        await machine.done.wait()
        await driver.stop()
        return machine.reports

    for seed in SEEDS:
        assert run_world(seed, scenario) == [(1.0, 1.0), (1.5, 0.5), (12.0, 2.0), (12.0, 0.0)]


def test_work_that_comes_during_a_step_waits_for_its_end() -> None:
    async def scenario(world: VirtualLoop) -> list[tuple[float, float]]:
        machine = Machine(world, VirtualThreads(world))
        driver = machine.threads.drive("machine", machine)
        machine.todo.append(1.0)
        await asyncio.sleep(0.5)
        machine.todo.append(0.0)
        await machine.done.wait()
        await driver.stop()
        return machine.reports

    for seed in SEEDS:
        assert run_world(seed, scenario) == [(1.0, 1.0), (1.0, 0.0)]


def test_two_machines_work_at_the_same_time() -> None:
    async def scenario(world: VirtualLoop) -> float:
        threads = VirtualThreads(world)
        machines = [Machine(world, threads) for _ in range(2)]
        drivers = [threads.drive(f"machine-{i}", machine) for i, machine in enumerate(machines)]
        for machine in machines:
            machine.todo.extend([3.0, 0.0])
        for machine, driver in zip(machines, drivers, strict=True):
            await machine.done.wait()
            await driver.stop()
        return world.time()

    for seed in SEEDS:
        assert run_world(seed, scenario) == 3.0


def test_a_stop_waits_for_the_end_of_the_step_and_leaves_the_rest_undone() -> None:
    async def scenario(world: VirtualLoop) -> tuple[float, int, list[tuple[float, float]]]:
        machine = Machine(world, VirtualThreads(world))
        driver = machine.threads.drive("machine", machine)
        machine.todo.extend([4.0, 1.0])
        await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await driver.stop()
        await driver.stop()
        await driver.stop()
        return world.time(), len(machine.todo), machine.reports

    for seed in SEEDS:
        assert run_world(seed, scenario) == (4.0, 1, [(4.0, 4.0)])


def test_a_machine_that_is_not_stopped_is_left_over() -> None:
    async def scenario(world: VirtualLoop) -> None:
        threads = VirtualThreads(world)
        threads.drive("machine", Machine(world, threads))

    with pytest.raises(LeftOver, match="thread machine"):
        run_world(0, scenario)


def test_functions_run_one_after_the_other_off_the_loop() -> None:
    def off_the_loop() -> str:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return "result"

    async def scenario(world: VirtualLoop) -> tuple[list[str], float]:
        threads = VirtualThreads(world, run_s=2.0)
        results = await asyncio.gather(*(threads.run(off_the_loop) for _ in range(3)))
        await threads.close()
        return results, world.time()

    for seed in SEEDS:
        assert run_world(seed, scenario) == (["result"] * 3, 6.0)


def test_the_error_of_a_function_comes_through() -> None:
    async def scenario(world: VirtualLoop) -> None:
        threads = VirtualThreads(world)
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 / 0)
        assert await threads.run(lambda: 1) == 1
        await threads.close()

    run_world(0, scenario)


def test_a_function_that_nobody_waits_for_still_runs_before_the_next() -> None:
    async def scenario(world: VirtualLoop) -> list[float]:
        ran: list[float] = []
        threads = VirtualThreads(world, run_s=5.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await threads.run(lambda: ran.append(world.time()))
        await threads.run(lambda: ran.append(world.time()))
        await threads.close()
        return ran

    assert run_world(0, scenario) == [5.0, 10.0]


def test_the_close_waits_for_what_was_given_and_takes_no_more() -> None:
    async def scenario(world: VirtualLoop) -> float:
        threads = VirtualThreads(world, run_s=1.0)
        running = asyncio.gather(threads.run(int), threads.run(int))
        await asyncio.sleep(0)
        await threads.close()
        assert list(await running) == [0, 0]
        with pytest.raises(RuntimeError, match="no more work"):
            await threads.run(int)
        return world.time()

    for seed in SEEDS:
        assert run_world(seed, scenario) == 2.0


def test_threads_that_were_never_used_are_closed_too() -> None:
    async def scenario(world: VirtualLoop) -> None:
        threads = VirtualThreads(world)
        await threads.close()
        with pytest.raises(RuntimeError, match="no more work"):
            await threads.run(int)

    run_world(0, scenario)


def test_deliver_from_the_loop_keeps_the_order() -> None:
    async def scenario(world: VirtualLoop) -> list[int]:
        threads = VirtualThreads(world)
        order: list[int] = []
        for i in range(5):
            threads.deliver(functools.partial(order.append, i))
        await asyncio.sleep(1)
        return order

    for seed in SEEDS:
        assert run_world(seed, scenario) == [0, 1, 2, 3, 4]
