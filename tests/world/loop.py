"""An event loop with virtual time and a seed, in which a whole engine runs in no time and the same way twice.

When nothing is ready, time jumps to the next timer; when there is no timer either, that is a deadlock and is
raised with the names of the waiting tasks. Other threads (`start_thread`) run only when the loop says so and
`sleep` in virtual time. `call_soon` keeps asyncio's order; when a thread wakes up and where its messages
arrive among the ready callbacks is drawn from the seed, so a scenario is run under many interleavings and a
failing one is replayed from its number. Tasks hash by their number, so that sets of tasks iterate in the same
order in every run. (anyio keeps nested cancel scopes in sets of its own: the order in which one cancellation
reaches the tasks of an anyio group is not the world's.)
"""

import asyncio
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from types import CoroutineType
from typing import Any, TypeVar

from tests.world.baton import BatonThread

T = TypeVar("T")
Scenario = Callable[["VirtualLoop"], Coroutine[Any, Any, T]]
WAKE_LATE = 0.5  # how often a thread is passed over while the loop itself has something to do


class WorldError(Exception):
    """The world stopped a scenario; the message names what was still there."""


class Deadlock(WorldError):
    """Nothing is ready, no timer is set and no thread has work."""


class LimitExceeded(WorldError):
    """The scenario took more virtual time or more loop iterations than it was given."""


class LeftOver(WorldError):
    """The scenario ended, but tasks or threads that it started did not."""


class Unhandled(WorldError):
    """An exception reached nobody but the event loop."""


class NumberedTask(asyncio.Task[Any]):
    """A task that hashes by its number in the world."""

    _log_traceback: bool  # of the base class: it has raised, and nobody has asked for it

    def __init__(
        self, number: int, coro: Coroutine[Any, Any, Any], loop: "VirtualLoop", **named: Any
    ) -> None:
        self._number = number
        super().__init__(coro, loop=loop, **({"name": f"task-{number}"} | named))

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. `rng` is for the scenario's own choices; `trace` collects what was noted."""

    # of the base class:
    _stopping: bool
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, seed: int, *, time_limit: float, step_limit: int, shuffle: bool) -> None:
        super().__init__()
        self._selector = self  # the base class asks `_selector.select` once an iteration
        self._now = 0.0
        self._home = threading.get_ident()
        self._threads: list[BatonThread] = []
        self._running: BatonThread | None = None
        self._arrived: dict[str, deque[asyncio.Handle]] = {}
        self._order = random.Random(f"order {seed}") if shuffle else None
        self._tasks: list[NumberedTask] = []
        self._time_limit = time_limit
        self._steps_left = step_limit
        self._unhandled: list[str] = []
        self.rng = random.Random(seed)
        self.trace: list[tuple[float, object]] = []
        self.set_task_factory(self._new_task)
        self.set_exception_handler(lambda _, context: self._unhandled.append(repr(context)))

    def time(self) -> float:
        return self._now

    def note(self, what: object) -> None:
        """Add (time, `what`) to the trace."""
        self.trace.append((self._now, what))

    def start_thread(
        self, name: str, main: Callable[[], None], awake: Callable[[], bool] = lambda: True
    ) -> BatonThread:
        """Run `main` in a thread of this world. What it raises ends the scenario. awake: says whether the
        thread may have work again once it was idle; to ask costs less than to switch."""
        thread = BatonThread(name, main, awake)
        self._threads.append(thread)
        return thread

    def sleep(self, seconds: float) -> None:
        """Called in a thread of this world: let virtual time pass; `math.inf` never returns."""
        thread = self._this_thread()
        thread.asleep = True
        if seconds < math.inf:
            super().call_at(self._now + seconds, setattr, thread, "asleep", False)
        thread.pause()

    def pause(self, *, idle: bool) -> None:
        """Called in a thread of this world: let the loop and the others act. `idle`: there was no work."""
        thread = self._this_thread()
        thread.idle = idle
        thread.pause()

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() == self._home:
            return self.call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        self._arrived.setdefault(self._this_thread().name, deque()).append(handle)
        return handle

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self._only_at_home()
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._only_at_home()
        return super().call_at(when, callback, *args, context=context)

    def run_in_executor(self, *args: object) -> Any:
        raise RuntimeError("a pool of real threads has no place in the virtual world")

    def select(self, timeout: float | None) -> Sequence[object]:
        """Let the threads act, then move the clock if still nothing is ready."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise LimitExceeded(f"the step limit is reached at {self._now:g} s; {self._pending()}")
        worked = self._run_threads()
        self._merge_arrived()
        if worked or self._ready or self._stopping:
            return ()
        if not self._scheduled:
            raise Deadlock(self._pending())
        due = self._scheduled[0].when()
        if due > self._time_limit:
            raise LimitExceeded(f"the next timer is at {due:g} s; {self._pending()}")
        self._now = max(self._now, due)
        return ()

    def check_end(self) -> None:
        """Raise where the scenario has ended and something of it has not."""
        tasks = asyncio.all_tasks(self)
        closing = {task for task in tasks if not isinstance(task.get_coro(), CoroutineType)}
        if tasks != closing or not all(thread.ended or thread.abandoned for thread in self._threads):
            raise LeftOver(self._pending())
        if closing:  # generators that were given up
            self.run_until_complete(asyncio.wait(closing))
        lost = [repr(task) for task in self._tasks if task.done() and task._log_traceback]
        if lost or self._unhandled:
            raise Unhandled("; ".join(lost + self._unhandled))

    def wind_up(self) -> None:
        """End what is left, threads first, and close."""
        for thread in self._threads:
            thread.end()
        self._threads.clear()
        self._time_limit, self._steps_left = math.inf, 10_000
        left = sorted(asyncio.all_tasks(self), key=hash)
        for task in left:
            task.cancel()
        with suppress(WorldError):
            if left:
                self.run_until_complete(asyncio.wait(left))
            self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    def _run_threads(self) -> bool:
        """Switch to the threads that may run; True where one had work."""
        worked = False
        threads = list(self._threads)
        if self._order is not None:
            self._order.shuffle(threads)
        for thread in threads:
            if thread.asleep or thread.ended:
                continue
            if self._ready and (self._order is None or self._order.random() < WAKE_LATE):
                continue
            if thread.idle and not thread.awake():
                continue
            thread.idle = False
            self._running = thread
            thread.switch()
            worked |= not (thread.idle or thread.asleep or thread.ended)
        return worked

    def _merge_arrived(self) -> None:
        """Move arrived messages among the ready callbacks: FIFO per thread, places and delays by the seed."""
        queues = [queue for queue in self._arrived.values() if queue]
        if not queues:
            return
        taken = [
            len(queue) if self._order is None else self._order.randint(0, len(queue)) for queue in queues
        ]
        if not self._ready and not any(taken):
            taken[0] = 1
        sources = [deque(queue.popleft() for _ in range(n)) for queue, n in zip(queues, taken, strict=True)]
        sources.insert(0, deque(self._ready))
        turns = [source for source in sources for _ in source]
        if self._order is not None:
            self._order.shuffle(turns)
        self._ready.clear()
        self._ready.extend([source.popleft() for source in turns])

    def _pending(self) -> str:
        """Name the tasks and threads that are not done; tasks with the functions they wait in."""
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        waiting = [f"{task.get_name()} waits in {' > '.join(_waits_in(task))}" for task in tasks]
        return "; ".join(waiting + [f"thread {thread.name}" for thread in self._threads if not thread.ended])

    def _this_thread(self) -> BatonThread:
        if threading.get_ident() == self._home or self._running is None:
            raise RuntimeError("called outside the threads of this world")
        return self._running

    def _only_at_home(self) -> None:
        if threading.get_ident() != self._home:
            raise RuntimeError("called from another thread: only call_soon_threadsafe may be")

    def _new_task(self, _: object, coro: Any, **named: Any) -> NumberedTask:
        self._tasks.append(NumberedTask(len(self._tasks) + 1, coro, self, **named))
        return self._tasks[-1]

    def _process_events(self, event_list: Sequence[object]) -> None:
        """There is no input or output."""


def _waits_in(task: asyncio.Task[Any]) -> Iterator[str]:
    waiting: object = task.get_coro()
    while isinstance(waiting, CoroutineType):
        yield waiting.__name__
        waiting = waiting.cr_await


def run_world(
    seed: int,
    scenario: Scenario[T],
    *,
    time_limit: float = 3600.0,
    step_limit: int = 200_000,
    shuffle: bool = True,
) -> T:
    """Run `scenario(loop)` to its end in a loop of its own, from virtual time 0, and return its result.

    time_limit: virtual seconds. step_limit: iterations of the loop. shuffle: let the seed choose when other
    threads act; without it they act whenever the loop has nothing to do. Raises what the scenario raised, or
    a WorldError.
    """
    loop = VirtualLoop(seed, time_limit=time_limit, step_limit=step_limit, shuffle=shuffle)
    try:
        result = loop.run_until_complete(scenario(loop))
        loop.check_end()
        return result
    finally:
        loop.wind_up()
