"""The device's thread, and what becomes of one that hangs.

A thread that is in a call of the model cannot be killed. It is abandoned, with its loop and its arenas: a new
loop over the same weights, with arenas of its own, goes on in a new thread. Where the old one comes back
after all, it ends; what it tells belongs to jobs and generations that nobody knows any more.
"""

import asyncio
from collections.abc import Callable

import structlog

from regrow.actors.threads import DriverHandle, Threads
from regrow.gpu.device_loop import DeviceLoop
from regrow.gpu.types import Runner

LOOKS = 4  # so often in `hang_s` is looked whether the loop hangs
log = structlog.get_logger(__name__)


class DeviceThread:
    """Drives one `loop` at a time. hang_s: seconds that one piece of its work may take; 0: any."""

    def __init__(
        self, runner: Runner, make: Callable[[Runner], DeviceLoop], threads: Threads, hang_s: float
    ) -> None:
        self._make = make
        self._threads = threads
        self.hang_s = hang_s
        self.loop = make(runner)
        self._driver: DriverHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        self._driver = self._threads.drive("device", self.loop)

    def look_again(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when it is time to see whether the loop hangs."""
        if self.hang_s:
            self._timer = asyncio.get_running_loop().call_later(self.hang_s / LOOKS, tell)

    def hangs(self) -> bool:
        return 0 < self.hang_s < self.loop.busy_s

    async def renew(self) -> None:
        """Abandon a thread that hangs, and go on in another one. Raises what the new arenas do."""
        if not self.hangs() or self._driver is None:
            return
        log.error("device hangs: its thread and its slots are abandoned", seconds=round(self.loop.busy_s))
        runner = await self._threads.run(self.loop.runner.fresh)
        if self._stopped:  # meanwhile; nobody would end another thread
            return
        self._driver.abandon()
        self.loop = self._make(runner)
        self.start()

    async def stop(self) -> None:
        """Return once the last step has ended; one that hangs is not waited for."""
        assert self._driver is not None
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await self._driver.stop(self.hang_s or None)
