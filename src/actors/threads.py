"""Threads as something that is handed in: the real ones here, virtual ones in the tests.

Nothing blocking runs in the event loop: the device loop has a thread of its own, and loading, tokenising and
rendering run on one worker thread.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Steppable(Protocol):
    """What a device thread drives."""

    def step(self) -> bool:
        """Do one unit of work; False when there was none."""

    def wait(self) -> None:
        """Block until there may be work again, or until `close`."""

    @property
    def awake(self) -> bool:
        """Whether `wait` would return at once."""

    def close(self) -> None:
        """Make `wait` return for good; no step follows."""

    @property
    def closed(self) -> bool: ...


class DriverHandle(Protocol):
    async def stop(self, within_s: float | None = None) -> None:
        """Close the driven object and return once its last step has ended, or after so many seconds."""

    def abandon(self) -> None:
        """Close the driven object; whether its step ever ends is left open."""


class Threads(Protocol):
    """Where work outside the event loop runs. linger_s: how long a thread may wait for what the event loop
    gives it at once; 0 where time is virtual."""

    linger_s: float

    def drive(self, name: str, work: Steppable) -> DriverHandle:
        """Call `step` (and `wait` when there is nothing to do) until it is closed."""

    def deliver(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the event loop soon; callable from any thread, order is kept."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run a blocking function and return its result; errors come through."""

    async def close(self) -> None: ...


class RealThreads:
    """One thread per driven object and one worker thread for blocking functions."""

    linger_s = 0.002

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")

    def drive(self, name: str, work: Steppable) -> "RealDriver":
        return RealDriver(name, work, self._loop)

    def deliver(self, callback: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    async def run(self, function: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._worker, function)

    async def close(self) -> None:
        await self._loop.run_in_executor(None, self._worker.shutdown)


class RealDriver:
    """A thread that drives one object until it is closed."""

    def __init__(self, name: str, work: Steppable, loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while not self._work.closed:
            if not self._work.step():
                self._work.wait()

    async def stop(self, within_s: float | None = None) -> None:
        self._work.close()
        await self._loop.run_in_executor(None, self._thread.join, within_s)

    def abandon(self) -> None:
        self._work.close()
