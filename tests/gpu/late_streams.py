"""Streams that do their work late and in any order that the events allow: what a GPU may do, on the CPU.

Whatever is given to a lane waits there until somebody waits for an event, or a test lets some of it happen.
So work that must not overtake other work does overtake it here, unless an event holds it back.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, get_args

import torch

from regrow.gpu.copies import finite
from regrow.gpu.kernels.spans import Pair, launch_of
from regrow.gpu.streams import Event, Lane
from tests.gpu.kernels.on_cpu import run_on_cpu

GARBAGE = 0xA5


class LateEvent:
    def __init__(self, streams: "LateStreams") -> None:
        self.reached = False
        self._streams = streams

    def wait(self) -> None:
        while not self.reached:
            assert self._streams.turn() or self.reached, "an event is waited for that can never come"


class LateStreams:
    """Implements `Streams`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._work: dict[Lane, deque[LateEvent | Callable[[], object]]] = {
            lane: deque() for lane in get_args(Lane)
        }

    def give(self, lane: Lane, work: LateEvent | Callable[[], object]) -> None:
        """Have it done after all that the lane has got; an event is waited for."""
        with self._lock:
            self._work[lane].append(work)

    def turn(self) -> bool:
        """Do one piece of work of any lane; False where there is none that can be done."""
        with self._lock:
            able = [lane for lane, work in self._work.items() if work and self._can(work[0])]
            return bool(able) and self.turn_of(self._random.choice(able))

    def turn_of(self, lane: Lane) -> bool:
        """Do the next piece of work of this lane; False where it waits for another, or has none."""
        with self._lock:
            if not self._work[lane] or not self._can(self._work[lane][0]):
                return False
            work = self._work[lane].popleft()
            if not isinstance(work, LateEvent):
                work()
            return True

    def finish(self) -> None:
        while self.turn():
            pass
        assert not any(self._work.values())

    def mark(self, lane: Lane) -> LateEvent:
        event = LateEvent(self)
        self.give(lane, lambda: setattr(event, "reached", True))
        return event

    def follow(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self.give(lane, event)

    def launch(self, lane: Lane, pairs: Sequence[Pair]) -> None:
        launch = launch_of(pairs)

        def run(_: Sequence[Pair] = pairs) -> None:  # keeps the memory that the table points to
            run_on_cpu(launch, block=4)

        self.give(lane, run)

    def move(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.dtype == source.dtype == torch.uint8
        assert target.is_contiguous() and source.is_contiguous()

        def copy() -> None:
            target.copy_(source)

        self.give(lane, copy)

    def finite(self, lane: Lane, states: Iterable[torch.Tensor]) -> bool:
        self.mark(lane).wait()
        return finite(states)

    def scratch(self, lane: Lane, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    @staticmethod
    def _can(work: "LateEvent | Callable[[], object]") -> bool:
        return not isinstance(work, LateEvent) or work.reached


class LateWorker(Executor):
    """A thread that gets round to its jobs when the test lets it."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def work(self) -> bool:
        """Do the next job; False where there is none."""
        if not self.jobs:
            return False
        future, job = self.jobs.popleft()
        try:
            future.set_result(job())
        except Exception as error:  # noqa: BLE001  as an executor does
            future.set_exception(error)
        return True
