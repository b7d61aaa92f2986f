"""Threads of the virtual world: the same calls, in threads that the loop's seed schedules."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from regrow.actors.threads import Steppable
from tests.world.loop import VirtualLoop

T = TypeVar("T")


class VirtualThreads:
    """Implements `Threads`. run_s: virtual seconds that each function given to `run` takes."""

    linger_s = 0.0

    def __init__(self, loop: VirtualLoop, *, run_s: float = 0.0) -> None:
        self._loop = loop
        self._worker = Worker(loop, run_s)
        self._worker_driver: VirtualDriver | None = None

    def drive(self, name: str, work: Steppable) -> "VirtualDriver":
        return VirtualDriver(name, work, self._loop)

    def deliver(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(callback)

    async def run(self, function: Callable[[], T]) -> T:
        result: asyncio.Future[T] = self._loop.create_future()
        self._worker.put(functools.partial(self._settle, function, result))
        self._worker_driver = self._worker_driver or self.drive("worker", self._worker)
        return await result

    async def close(self) -> None:
        if self._worker_driver is None:
            self._worker.close()
        else:
            await self._worker_driver.stop()

    def _settle(self, function: Callable[[], T], result: asyncio.Future[T]) -> None:
        settle: Callable[[], None]
        try:
            settle = functools.partial(result.set_result, function())
        except Exception as error:  # noqa: BLE001  it belongs to whoever called `run`
            settle = functools.partial(result.set_exception, error)
        self.deliver(lambda: None if result.done() else settle())


class Worker:
    """Runs the functions it is given one after the other; closed once the last one has run."""

    def __init__(self, loop: VirtualLoop, run_s: float) -> None:
        self._loop = loop
        self._run_s = run_s
        self._closing = False
        self._functions: deque[Callable[[], None]] = deque()

    def put(self, function: Callable[[], None]) -> None:
        if self._closing:
            raise RuntimeError("the worker thread takes no more work")
        self._functions.append(function)

    def step(self) -> bool:
        if not self._functions:
            return False
        self._loop.sleep(self._run_s)
        self._functions.popleft()()
        return True

    @property
    def awake(self) -> bool:
        return bool(self._functions) or self._closing

    def wait(self) -> None:
        """Never called: a driver in this world looks whether the worker is awake instead."""

    def close(self) -> None:
        self._closing = True

    @property
    def closed(self) -> bool:
        return self._closing and not self._functions


class VirtualDriver:
    """A thread of the virtual world that steps one object until it is closed."""

    def __init__(self, name: str, work: Steppable, loop: VirtualLoop) -> None:
        self._work = work
        self._loop = loop
        self._ended = asyncio.Event()
        self._thread = loop.start_thread(name, self._main, lambda: work.awake)

    async def stop(self, within_s: float | None = None) -> None:
        self._work.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()
                return
        self.abandon()

    def abandon(self) -> None:
        self._work.close()
        self._thread.abandoned = True

    def _main(self) -> None:
        while not self._work.closed:
            self._loop.pause(idle=not self._work.step())
        self._loop.call_soon_threadsafe(self._ended.set)
