"""DeviceActor: owns the device loop, which runs on a thread of its own (`gpu/device_loop.py`).

After an error of the runner the loop refuses work and tells this actor, which crashes; its supervisor starts
a fresh one, which resets the arenas as a new generation. Watchers hear `Down` and forget what the slots held.
"""

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from regrow.actors.messages import (
    DeviceBroke,
    DeviceReport,
    DeviceStats,
    DeviceTicks,
    Mount,
    Mounted,
    SlotDigest,
    Start,
    Stop,
)
from regrow.actors.threads import Threads
from regrow.errors import DeviceFailed
from regrow.gpu.device_loop import Broken, Call, DeviceEvent, DeviceLoop, Halt, Reset
from regrow.gpu.types import Runner, Snapshot

T = TypeVar("T")


class DeviceActor:
    """`generations` counts the lives of this actor; jobs and calls of an earlier one are refused."""

    def __init__(
        self,
        loop: DeviceLoop,
        generations: "itertools.count[int]",
        threads: Threads,
        now: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._generation = next(generations)
        self._threads = threads
        self._now = now

    async def started(self) -> None:
        self._loop.post(Reset(self._generation))

    async def handle(self, message: object) -> object:
        match message:
            case Mount(slot, position, state):
                return self._mount(slot, position, state)
            case Start(job):
                self._loop.post(job)
            case Stop(slot, epoch):
                self._loop.post(Halt(slot, epoch))
            case SlotDigest(slot):
                return self._call(lambda runner: runner.digest(slot))
            case DeviceStats():
                return DeviceReport(self._generation, self._loop.counters)
            case DeviceBroke(generation, error):
                if generation == self._generation:  # else this life has reset the arenas since
                    raise DeviceFailed(f"{type(error).__name__}: {error}") from error
            case _:
                raise TypeError(f"the device does not know {type(message).__name__}")
        return None

    def _mount(self, slot: int, position: int, state: Snapshot | None) -> asyncio.Future[Mounted]:
        generation, begin = self._generation, self._now()

        def mount(runner: Runner) -> Mounted:
            runner.mount(slot, position, state)
            return Mounted(generation, (self._now() - begin) * 1e3)

        return self._call(mount)

    def _call(self, function: Callable[[Runner], T]) -> asyncio.Future[T]:
        """Run `function` on the device thread between two steps; the answer comes when it has run."""
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(result: object) -> None:
            if isinstance(result, Exception):
                reply.set_exception(result)
            else:
                reply.set_result(cast(T, result))

        def done(result: object) -> None:
            self._threads.deliver(functools.partial(settle, result))

        self._loop.post(Call(self._generation, function, done))
        return reply


class Outbox:
    """Takes events from the device thread to the actors, each slot's in one message however many there are.

    While a message to the event loop is on its way, further events join it; so however slow the loop is, the
    mailboxes stay bounded.
    """

    def __init__(
        self,
        threads: Threads,
        tell_slot: Callable[[int, object], None],
        tell_device: Callable[[object], None],
    ) -> None:
        self._threads = threads
        self._tell_slot = tell_slot
        self._tell_device = tell_device
        self._waiting: list[DeviceEvent] = []
        self._lock = threading.Lock()

    def deliver(self, events: Sequence[DeviceEvent]) -> None:
        """Called on the device thread."""
        with self._lock:
            on_its_way = bool(self._waiting)
            self._waiting.extend(events)
        if not on_its_way:
            self._threads.deliver(self._forward)

    def _forward(self) -> None:
        with self._lock:
            events, self._waiting = self._waiting, []
        slots: dict[int, list[DeviceEvent]] = {}
        for event in events:
            if isinstance(event, Broken):
                self._tell_device(DeviceBroke(event.generation, event.error))
            else:
                slots.setdefault(event.slot, []).append(event)
        for slot, ticks in slots.items():
            self._tell_slot(slot, DeviceTicks(tuple(ticks)))
