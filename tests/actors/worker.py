"""One actor in a system of its own, which does what its messages say: the stage of the runtime's tests."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from regrow.actors.runtime import ActorRef, Ask, MailboxStats, System
from tests.world.loop import VirtualLoop, run_world


@dataclass(frozen=True, slots=True)
class Work(Ask[int]):
    """Takes `seconds`; answered with how many of these this life has had."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Break(Ask[int]):
    """Takes `seconds`, then raises `error`."""

    error: BaseException = field(default_factory=lambda: RuntimeError("broken"))
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Later(Ask[str]):
    """Answered when `future` is done."""

    future: "asyncio.Future[str]"


@dataclass(frozen=True, slots=True)
class Forward:
    """To be told to somebody else."""

    to: ActorRef
    message: object


@dataclass(slots=True)
class Log:
    """What the actors of a test did, over all their lives."""

    handled: list[object] = field(default_factory=list)
    lives: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    start: Callable[[int], None] = lambda life: None


class Worker:
    """Does what its messages say and writes them to the log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._life = next(log.lives)
        self._work = 0

    async def started(self) -> None:
        self._log.start(self._life)

    async def handle(self, message: object) -> object:
        match message:
            case Work(seconds):
                await asyncio.sleep(seconds)
                self._work += 1
                return self._work
            case Break(error, seconds):
                await asyncio.sleep(seconds)
                raise error
            case Later(future):
                return future
            case Forward(to, forwarded):
                to.tell(forwarded)
                return None
        self._log.handled.append(message)
        return None


@dataclass(frozen=True, slots=True)
class Stage:
    """One worker in a system of its own."""

    world: VirtualLoop
    system: System
    worker: ActorRef
    log: Log


Scenario = Callable[[Stage], Coroutine[None, None, None]]


def with_worker(*, mailbox: int = 8, restarts: int = 3) -> Callable[[Scenario], Callable[[], None]]:
    """Make a test of a scenario."""

    def wrap(scenario: Scenario) -> Callable[[], None]:
        async def run(world: VirtualLoop) -> None:
            log = Log()
            async with System(restarts=restarts, period_s=60.0) as system:
                worker = system.spawn("worker", lambda: Worker(log), mailbox=mailbox)
                await scenario(Stage(world, system, worker, log))

        def test() -> None:
            run_world(0, run)

        test.__name__ = scenario.__name__
        return test

    return wrap


async def settled() -> None:
    """Let every actor handle what it has: until only timers are left."""
    await asyncio.sleep(1e-6)


def stats(system: System, name: str = "worker") -> MailboxStats:
    return next(found for found in system.statistics() if found.name == name)
