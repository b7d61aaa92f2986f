"""The virtual loop: time, order, ends, and the same thing twice for one seed."""

import asyncio
import contextlib
import functools
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable

import anyio
import pytest

from tests.world.baton import BatonThread
from tests.world.loop import Deadlock, LeftOver, LimitExceeded, Unhandled, VirtualLoop, run_world


def test_time_jumps_to_the_next_timer_exactly() -> None:
    async def scenario(world: VirtualLoop) -> list[float]:
        times = []
        for seconds in (0.1, 0.2, 86_400.0, 0.0):
            await asyncio.sleep(seconds)
            times.append(world.time())
        return times

    day = 0.1 + 0.2 + 86_400.0
    assert run_world(0, scenario, time_limit=100_000) == [0.1, 0.1 + 0.2, day, day]


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def scenario(world: VirtualLoop) -> object:
        for seconds in (3, 1, 2):
            world.call_later(seconds, world.note, seconds)
        world.call_later(1.5, world.note, "cancelled").cancel()
        await asyncio.sleep(4)
        return world.trace

    assert run_world(0, scenario) == [(1.0, 1), (2.0, 2), (3.0, 3)]


def test_call_soon_keeps_its_order_under_every_seed() -> None:
    async def scenario(world: VirtualLoop) -> object:
        def main() -> None:
            for _ in range(5):
                world.call_soon_threadsafe(world.note, "x")

        world.start_thread("other", main)
        for i in range(20):
            world.call_soon(world.note, i)
        await asyncio.sleep(1)
        return [what for _, what in world.trace if what != "x"]

    for seed in range(10):
        assert run_world(seed, scenario) == list(range(20))


def test_a_deadlock_names_the_waiting_tasks_and_where_they_wait() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def scenario(world: VirtualLoop) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(never(), name="the stuck one")

    with pytest.raises(Deadlock, match=r"task-1 waits in scenario.*; the stuck one waits in never > wait"):
        run_world(0, scenario)


def test_a_deadlock_names_a_thread_that_never_wakes() -> None:
    async def scenario(world: VirtualLoop) -> None:
        world.start_thread("device", lambda: world.sleep(math.inf))
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="thread device"):
        run_world(0, scenario)


def test_a_timer_beyond_the_limit_ends_the_world() -> None:
    async def scenario(world: VirtualLoop) -> None:
        await asyncio.sleep(11)

    with pytest.raises(LimitExceeded, match=r"11 s; task-1 waits in scenario > sleep"):
        run_world(0, scenario, time_limit=10)
    run_world(0, scenario, time_limit=11)


def test_a_loop_that_never_rests_ends_the_world() -> None:
    async def scenario(world: VirtualLoop) -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(LimitExceeded, match="step limit"):
        run_world(0, scenario, step_limit=1000)


def test_a_task_that_outlives_the_scenario_is_an_error_and_is_cancelled() -> None:
    ended = []

    async def straggler() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)
            ended.append(True)

    async def scenario(world: VirtualLoop) -> None:
        world.create_task(straggler(), name="straggler")

    with pytest.raises(LeftOver, match="straggler"):
        run_world(0, scenario)
    assert ended == [True]


def test_a_thread_that_outlives_the_scenario_is_an_error_and_is_ended() -> None:
    threads = []

    async def scenario(world: VirtualLoop) -> None:
        threads.append(world.start_thread("lane", lambda: world.sleep(5)))

    with pytest.raises(LeftOver, match="thread lane"):
        run_world(0, scenario)
    assert threads[0].ended


def test_an_exception_in_a_callback_is_an_error() -> None:
    async def scenario(world: VirtualLoop) -> None:
        world.call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(Unhandled, match="ZeroDivisionError"):
        run_world(0, scenario)


def test_an_exception_of_a_task_that_nobody_asks_for_is_an_error() -> None:
    async def broken() -> None:
        raise KeyError("lost")

    async def scenario(world: VirtualLoop) -> asyncio.Task[None]:
        task = world.create_task(broken())
        await asyncio.sleep(1)
        return task

    with pytest.raises(Unhandled, match=r"KeyError\('lost'\)"):
        run_world(0, scenario)


def test_what_the_scenario_raises_comes_through() -> None:
    async def scenario(world: VirtualLoop) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_world(0, scenario)


def test_what_a_thread_raises_ends_the_world_even_when_a_task_catches_everything() -> None:
    async def scenario(world: VirtualLoop) -> None:
        def broken() -> None:
            world.sleep(1)
            raise KeyError("thread")

        world.start_thread("broken", broken)
        with contextlib.suppress(Exception):
            await asyncio.sleep(10)

    with pytest.raises(KeyError, match="thread"):
        run_world(0, scenario)


def test_a_thread_sleeps_in_virtual_time_and_its_messages_arrive_when_they_were_sent() -> None:
    async def scenario(world: VirtualLoop) -> object:
        def main() -> None:
            for seconds in (0.5, 2.0):
                world.sleep(seconds)
                world.call_soon_threadsafe(world.note, "sent")

        world.start_thread("clock", main)
        await asyncio.sleep(3)
        return world.trace

    for seed in range(5):
        assert run_world(seed, scenario) == [(0.5, "sent"), (2.5, "sent")]


def test_a_thread_is_not_in_the_loop() -> None:
    def refused(call: Callable[..., object], *args: object) -> str:
        with pytest.raises(RuntimeError) as caught:
            call(*args)
        return str(caught.value)

    async def scenario(world: VirtualLoop) -> object:
        def main() -> None:
            world.note(threading.current_thread().name)
            world.note(refused(world.call_soon, print))
            world.note(refused(world.call_later, 1, print))
            world.note(refused(asyncio.get_running_loop))

        world.start_thread("stranger", main)
        await asyncio.sleep(1)
        return [what for _, what in world.trace]

    only = "called from another thread: only call_soon_threadsafe may be"
    assert run_world(0, scenario) == ["stranger", only, only, "no running event loop"]


def test_real_thread_pools_are_refused() -> None:
    async def scenario(world: VirtualLoop) -> None:
        await asyncio.to_thread(int)

    with pytest.raises(RuntimeError, match="no place"):
        run_world(0, scenario)


def test_only_threads_of_the_world_sleep_in_it() -> None:
    async def scenario(world: VirtualLoop) -> None:
        world.sleep(1)

    with pytest.raises(RuntimeError, match="outside the threads"):
        run_world(0, scenario)


def test_a_thread_that_really_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatonThread, "blocked_after_s", 0.05)
    lock = threading.Lock()

    def main() -> None:
        lock.acquire()

    async def scenario(world: VirtualLoop) -> None:
        world.start_thread("blocked", main)
        await asyncio.sleep(1)

    with lock, pytest.raises(RuntimeError, match="thread blocked blocks"):
        run_world(0, scenario)


Trace = list[tuple[float, tuple[str, int]]]


async def two_senders(world: VirtualLoop) -> Trace:
    """Two threads and two tasks that all act at the same times."""

    def main(name: str) -> None:
        for i in range(6):
            world.sleep(1)
            world.call_soon_threadsafe(note, (name, i))

    async def local(name: str) -> None:
        for i in range(6):
            await asyncio.sleep(1)
            note((name, i))
            await asyncio.sleep(0)

    trace: Trace = []

    def note(what: tuple[str, int]) -> None:
        trace.append((world.time(), what))

    async with asyncio.TaskGroup() as group:
        for name in ("a", "b"):
            world.start_thread(name, functools.partial(main, name))
            group.create_task(local(name.upper()))
    await asyncio.sleep(1)
    return trace


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(5):
        assert run_world(seed, two_senders) == run_world(seed, two_senders)


def test_seeds_give_different_interleavings_and_keep_each_thread_in_order() -> None:
    orders = set()
    for seed in range(20):
        trace = run_world(seed, two_senders)
        order = [what for _, what in trace]
        orders.add(tuple(order))
        for thread in "ab":
            assert [i for name, i in order if name == thread] == list(range(6))
        assert all(time == 1 + i for time, (_, i) in trace)
    assert len(orders) == 20


def test_without_shuffling_threads_act_when_the_loop_has_nothing_to_do() -> None:
    async def scenario(world: VirtualLoop) -> object:
        def main() -> None:
            world.call_soon_threadsafe(world.note, "thread")

        world.start_thread("t", main)
        for i in range(3):
            world.note(i)
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        return [what for _, what in world.trace]

    for seed in range(10):
        assert run_world(seed, scenario, shuffle=False) == [0, 1, 2, "thread"]


def test_sets_of_tasks_iterate_in_the_same_order_in_every_run() -> None:
    async def scenario(world: VirtualLoop) -> tuple[object, ...]:
        async def sleeper(i: int) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                world.note(i)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1), asyncio.TaskGroup() as group:
                for i in range(100):
                    group.create_task(sleeper(i))
        return tuple(world.trace)

    assert len({run_world(1, scenario) for _ in range(5)}) == 1


def test_anyio_streams_and_deadlines_work_in_virtual_time() -> None:
    async def scenario(world: VirtualLoop) -> tuple[list[int], float, float]:
        send, receive = anyio.create_memory_object_stream[int](2)
        received: list[int] = []

        async def reader() -> None:
            async for item in receive:
                received.append(item)
                await anyio.sleep(1)

        async with anyio.create_task_group() as group:
            group.start_soon(reader)
            async with send:
                for i in range(5):
                    await send.send(i)
        read_at = world.time()
        with anyio.move_on_after(5):
            await anyio.sleep_forever()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return received, read_at, world.time()

    assert run_world(3, scenario) == ([0, 1, 2, 3, 4], 5.0, 17.0)


def test_an_abandoned_generator_is_closed_in_the_world() -> None:
    closed = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async def scenario(world: VirtualLoop) -> None:
        await anext(numbers())

    run_world(0, scenario)
    assert closed == [True]
