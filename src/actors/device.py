"""DeviceActor: owns the device loop, which runs on a thread of its own (`gpu/device_loop.py`).

After an error of the runner the loop refuses work and tells this actor, which crashes; its supervisor starts
a fresh one, which resets the arenas as a new generation. Watchers hear `Down` and forget what the slots held.
A loop that hangs is the same, in another thread (`device_thread.py`).
"""

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from regrow.actors.device_thread import DeviceThread
from regrow.actors.messages import (
    AlsoSnapshot,
    DeviceBroke,
    DeviceReport,
    DeviceStats,
    DeviceTicks,
    EmptySlot,
    Mount,
    Mounted,
    Parked,
    SaveCells,
    SlotDigest,
    Start,
    Stop,
    Verify,
)
from regrow.actors.threads import Threads
from regrow.errors import DeviceFailed
from regrow.gpu.device_loop import Broken, Call, Command, DeviceEvent, Empty, Halt, Reset, SnapshotAt
from regrow.gpu.transfers import Fill, Save
from regrow.gpu.types import HostCells, Runner
from regrow.gpu.verify import differing_parts
from regrow.policy.directory import HolderId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LookAfter:
    """Told by a timer: see whether the loop hangs."""

    generation: int


class DeviceActor:
    """`generations` counts the lives of this actor; jobs and calls of an earlier one are refused."""

    def __init__(
        self,
        thread: DeviceThread,
        generations: "itertools.count[int]",
        threads: Threads,
        now: Callable[[], float],
        tell_cache: Callable[[object], None],
        tell_me: Callable[[object], None],
    ) -> None:
        self._thread = thread
        self._tell_cache = tell_cache
        self._generation = next(generations)
        self._threads = threads
        self._now = now
        self._tell_me = tell_me
        self._watched = False

    async def started(self) -> None:
        await self._thread.renew()
        self._loop = self._thread.loop
        self._post(Reset(self._generation))

    async def handle(self, message: object) -> object:
        match message:
            case Mount():
                return self._mount(message)
            case SaveCells(slot, name, ranges):
                self._save(slot, name, ranges)
            case EmptySlot(slot):
                self._post(Empty(self._generation, slot))
            case AlsoSnapshot(slot, epoch, position):
                self._post(SnapshotAt(slot, epoch, position))
            case Start(job):
                self._post(job)
            case Stop(slot, epoch):
                self._post(Halt(slot, epoch))
            case SlotDigest(slot):
                return self._call(lambda runner: runner.digest(slot))
            case Verify(slot, keys, chunks):
                spare = self._loop.runner.slots - 1
                return self._call(lambda runner: differing_parts(runner, spare, slot, keys, chunks))
            case DeviceStats():
                return DeviceReport(self._generation, self._loop.counters)
            case LookAfter(generation):
                if generation == self._generation:
                    self._look_after()
            case DeviceBroke(generation, error):
                if generation == self._generation:  # else this life has reset the arenas since
                    raise DeviceFailed(f"{type(error).__name__}: {error}") from error
            case _:
                raise TypeError(f"the device does not know {type(message).__name__}")
        return None

    def _post(self, command: Command) -> None:
        """Give the loop something to do, and see to it that it comes to an end."""
        self._loop.post(command)
        if not self._watched:
            self._watch()

    def _look_after(self) -> None:
        """Crash where the loop hangs; look again while it works."""
        if self._thread.hangs():
            limit = f"one piece of work took longer than {self._thread.hang_s:g} s (--hang-s)"
            raise DeviceFailed(f"the device hangs: {limit}")
        self._watched = False
        if self._loop.at_work:
            self._watch()

    def _watch(self) -> None:
        self._watched = True
        self._thread.look_again(functools.partial(self._tell_me, LookAfter(self._generation)))

    def _mount(self, mount: Mount) -> asyncio.Future[Mounted]:
        begin = self._now()
        reply: asyncio.Future[Mounted] = asyncio.get_running_loop().create_future()

        def settle(result: object) -> None:
            if isinstance(result, Exception):
                reply.set_exception(result)
            else:
                reply.set_result(Mounted(self._generation, (self._now() - begin) * 1e3))

        done = self._in_loop(settle)
        where = mount.slot, mount.position, mount.source, mount.state
        self._post(Fill(self._generation, *where, done, lend=mount.reads))
        return reply

    def _save(self, slot: int, name: HolderId, ranges: tuple[tuple[int, int], ...]) -> None:
        def settle(result: object) -> None:
            failed = isinstance(result, Exception)
            self._tell_cache(Parked(name, None if failed else cast(tuple[HostCells, ...], result)))

        self._post(Save(self._generation, slot, ranges, self._in_loop(settle)))

    def _call(self, function: Callable[[Runner], T]) -> asyncio.Future[T]:
        """Run `function` on the device thread between two steps; the answer comes when it has run."""
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(result: object) -> None:
            if isinstance(result, Exception):
                reply.set_exception(result)
            else:
                reply.set_result(cast(T, result))

        self._post(Call(self._generation, function, self._in_loop(settle)))
        return reply

    def _in_loop(self, settle: Callable[[object], None]) -> Callable[[object], None]:
        """Return what the device thread calls with a result, to have it settled in the event loop."""
        return lambda result: self._threads.deliver(functools.partial(settle, result))


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
