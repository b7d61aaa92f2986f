"""The actor runtime's promises: mailboxes, tell and ask, deadlines, supervision, stop, statistics."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from regrow.actors.runtime import ActorRef, Ask, Down, MailboxStats, System
from regrow.errors import ActorDown, BadRequest, DeadlineExceeded, Overloaded
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


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, object]]]:
    """What was logged; keeps the traces of wanted crashes out of the output."""
    with capture_logs() as entries:
        yield entries


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


@with_worker(mailbox=64)
async def test_messages_of_one_sender_are_handled_in_order(on: Stage) -> None:
    async def sender(name: str) -> None:
        for i in range(20):
            on.worker.tell((name, i))
            await asyncio.sleep(0)

    await asyncio.gather(sender("a"), sender("b"))
    await settled()
    for name in "ab":
        assert [m for m in on.log.handled if m[0] == name] == [(name, i) for i in range(20)]  # type: ignore[index]


@with_worker()
async def test_an_ask_is_answered(on: Stage) -> None:
    assert await on.worker.ask(Work(2.0), 5.0) == 1
    assert await on.worker.ask(Work(), 5.0) == 2
    assert on.world.time() == 2.0


@with_worker()
async def test_an_actor_handles_one_message_at_a_time(on: Stage) -> None:
    assert await asyncio.gather(*(on.worker.ask(Work(1.0), 10.0) for _ in range(3))) == [1, 2, 3]
    assert on.world.time() == 3.0


@with_worker(mailbox=2)
async def test_a_full_mailbox_refuses_by_name_and_loses_nothing(on: Stage) -> None:
    on.worker.tell("first")
    on.worker.tell("second")
    with pytest.raises(Overloaded, match="mailbox of worker holds 2 messages and is full"):
        on.worker.tell("third")
    with pytest.raises(Overloaded, match="worker"):
        await on.worker.ask(Work(), 1.0)
    await settled()
    on.worker.tell("fourth")
    await settled()
    assert on.log.handled == ["first", "second", "fourth"]


@with_worker()
async def test_an_ask_ends_at_its_deadline_by_name(on: Stage) -> None:
    with pytest.raises(DeadlineExceeded, match=r"worker did not answer Work within 1\.5 s"):
        await on.worker.ask(Work(4.0), 1.5)
    assert on.world.time() == 1.5


@with_worker()
async def test_an_answer_after_the_deadline_is_dropped_and_the_actor_goes_on(on: Stage) -> None:
    for late in (Work(4.0), Break(BadRequest("late"), 4.0)):
        with pytest.raises(DeadlineExceeded):
            await on.worker.ask(late, 1.0)
    assert await on.worker.ask(Work(), 10.0) == 2
    assert stats(on.system).restarts == 0


@with_worker()
async def test_a_crash_after_the_deadline_is_nobodys_answer(on: Stage) -> None:
    with pytest.raises(DeadlineExceeded):
        await on.worker.ask(Break(seconds=4.0), 1.0)
    with pytest.raises(DeadlineExceeded):
        await on.worker.ask(Work(), 1.0)
    await asyncio.sleep(4)
    assert stats(on.system).restarts == 1


@with_worker()
async def test_an_ask_that_is_cancelled_drops_its_answer(on: Stage) -> None:
    asking = asyncio.create_task(on.worker.ask(Work(2.0), 10.0))
    await asyncio.sleep(1)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    assert await on.worker.ask(Work(), 10.0) == 2


@with_worker()
async def test_a_future_answers_later_while_the_actor_goes_on(on: Stage) -> None:
    future: asyncio.Future[str] = on.world.create_future()
    asking = asyncio.create_task(on.worker.ask(Later(future), 10.0))
    await settled()
    assert await on.worker.ask(Work(), 1.0) == 1
    future.set_result("done")
    assert await asking == "done"


@with_worker()
async def test_the_error_of_a_future_is_the_answer(on: Stage) -> None:
    failing: asyncio.Future[str] = on.world.create_future()
    given_up: asyncio.Future[str] = on.world.create_future()
    on.world.call_later(1, failing.set_exception, BadRequest("no"))
    on.world.call_later(1, given_up.cancel)
    with pytest.raises(BadRequest, match="no"):
        await on.worker.ask(Later(failing), 10.0)
    with pytest.raises(ActorDown, match="gave up"):
        await on.worker.ask(Later(given_up), 10.0)
    assert stats(on.system).restarts == 0


@with_worker()
async def test_a_future_that_is_done_after_the_deadline_is_dropped(on: Stage) -> None:
    future: asyncio.Future[str] = on.world.create_future()
    with pytest.raises(DeadlineExceeded):
        await on.worker.ask(Later(future), 1.0)
    future.set_result("late")
    await settled()


@with_worker()
async def test_an_error_raised_on_purpose_answers_an_ask_and_keeps_the_state(on: Stage) -> None:
    assert await on.worker.ask(Work(), 1.0) == 1
    with pytest.raises(BadRequest, match="not that"):
        await on.worker.ask(Break(BadRequest("not that")), 1.0)
    assert await on.worker.ask(Work(), 1.0) == 2
    assert stats(on.system).restarts == 0


@with_worker()
async def test_a_crash_fails_its_ask_and_the_same_reference_has_fresh_state(
    on: Stage,
) -> None:
    assert await on.worker.ask(Work(), 1.0) == 1
    with pytest.raises(ActorDown, match=r"worker crashed: RuntimeError\('broken'\)"):
        await on.worker.ask(Break(), 1.0)
    assert await on.worker.ask(Work(), 1.0) == 1
    assert next(on.log.lives) == 3


def test_a_crash_is_logged_by_name_and_life(logged: list[MutableMapping[str, object]]) -> None:
    async def scenario(world: VirtualLoop) -> None:
        async with System() as system:
            system.spawn("worker", lambda: Worker(Log()), mailbox=8).tell(Break())
            await settled()

    run_world(0, scenario)
    assert [(e["event"], e["actor"], e["epoch"], e["error"]) for e in logged] == [
        ("actor crashed", "worker", 0, "RuntimeError('broken')")
    ]


@with_worker()
async def test_an_error_raised_on_purpose_for_a_tell_is_a_crash(on: Stage) -> None:
    on.worker.tell(Break(BadRequest("nobody asked")))
    await settled()
    assert stats(on.system).restarts == 1


@with_worker()
async def test_a_crash_loses_the_mailbox_and_fails_the_asks_in_it(on: Stage) -> None:
    on.worker.tell(Break(seconds=1.0))
    on.worker.tell("lost")
    asking = [asyncio.create_task(on.worker.ask(Work(), 10.0)) for _ in range(2)]
    await asyncio.wait(asking)
    for ask in asking:
        with pytest.raises(ActorDown, match="worker crashed: RuntimeError: broken"):
            await ask
    assert on.world.time() == 1.0
    assert on.log.handled == []


@with_worker()
async def test_an_ask_in_the_mailbox_that_nobody_waits_for_is_forgotten_in_a_crash(on: Stage) -> None:
    on.worker.tell(Break(seconds=2.0))
    with pytest.raises(DeadlineExceeded):
        await on.worker.ask(Work(), 1.0)
    await asyncio.sleep(2)
    assert await on.worker.ask(Work(), 1.0) == 1


def test_watchers_are_told_of_each_crash_and_its_life() -> None:
    async def scenario(world: VirtualLoop) -> list[object]:
        log, watching = Log(), Log()
        async with System() as system:
            system.spawn("watcher", lambda: Worker(watching), mailbox=8)
            ref = system.spawn("worker", lambda: Worker(log), mailbox=8, watchers=("watcher",))
            for reason in ("one", "two"):
                ref.tell(Break(ValueError(reason)))
                await settled()
        return watching.handled

    assert run_world(0, scenario) == [
        Down("worker", 0, "ValueError: one"),
        Down("worker", 1, "ValueError: two"),
    ]


def test_a_watcher_that_has_stopped_does_not_keep_an_actor_from_its_restart() -> None:
    async def scenario(world: VirtualLoop) -> None:
        log = Log()
        async with System(restarts=0) as system:
            watcher = system.spawn("watcher", lambda: Worker(Log()), mailbox=8)
            watcher.tell(Break())
            await settled()
            system.restarts = 3
            ref = system.spawn("worker", lambda: Worker(log), mailbox=8, watchers=("watcher",))
            ref.tell(Break())
            await settled()
            assert await ref.ask(Work(), 1.0) == 1

    run_world(0, scenario)


@pytest.mark.xfail(strict=True, reason="Overloaded ends the supervisor of the actor that crashed")
def test_a_watcher_with_a_full_mailbox_is_told_all_the_same() -> None:
    async def scenario(world: VirtualLoop) -> list[object]:
        watching = Log()
        async with System() as system:
            watcher = system.spawn("watcher", lambda: Worker(watching), mailbox=1)
            ref = system.spawn("worker", lambda: Worker(Log()), mailbox=8, watchers=("watcher",))
            watcher.tell(Work(5.0))
            await settled()
            watcher.tell("fills it")
            ref.tell(Break())
            await settled()
            assert await ref.ask(Work(), 1.0) == 1
        return watching.handled

    assert run_world(0, scenario) == ["fills it", Down("worker", 0, "RuntimeError: broken")]


@pytest.mark.xfail(strict=True, reason="the supervisor takes it for its own cancellation and ends")
@with_worker()
async def test_a_cancelled_future_that_an_actor_waits_for_is_a_crash(on: Stage) -> None:
    with pytest.raises(ActorDown, match="worker crashed: CancelledError"):
        await on.worker.ask(Break(asyncio.CancelledError()), 1.0)
    assert await on.worker.ask(Work(), 1.0) == 1
    assert stats(on.system).restarts == 1


@pytest.mark.xfail(strict=True, reason="nobody keeps the asks whose answer is a future")
@with_worker()
async def test_a_crash_fails_the_asks_that_a_future_was_to_answer(on: Stage) -> None:
    asking = asyncio.create_task(on.worker.ask(Later(on.world.create_future()), 10.0))
    await settled()
    on.worker.tell(Break())
    with pytest.raises(ActorDown, match="worker crashed: RuntimeError: broken"):
        await asking


@with_worker()
async def test_a_crash_at_the_start_is_a_crash_like_any_other(on: Stage) -> None:
    def start(life: int) -> None:
        if life in (2, 3):
            raise OSError("cannot start")

    on.log.start = start
    on.worker.tell(Break())
    await settled()
    assert stats(on.system).restarts == 3
    assert await on.worker.ask(Work(), 1.0) == 1


def test_a_factory_that_raises_is_a_crash_like_any_other() -> None:
    async def scenario(world: VirtualLoop) -> str:
        def factory() -> Worker:
            raise OSError("cannot build")

        async with System(restarts=1) as system:
            system.spawn("worker", factory, mailbox=1)
            return await system.failed

    assert run_world(0, scenario) == "worker crashed 2 times within 60 s; last: OSError: cannot build"


@with_worker(restarts=2)
async def test_more_crashes_in_a_period_than_allowed_stop_the_system_with_the_reason(on: Stage) -> None:
    for _ in range(2):
        on.worker.tell(Break())
        await asyncio.sleep(10)
    assert not on.system.failed.done()
    on.worker.tell(Break(ValueError("once more")))
    on.worker.tell("lost")
    assert await on.system.failed == "worker crashed 3 times within 60 s; last: ValueError: once more"
    with pytest.raises(ActorDown, match="worker has stopped"):
        on.worker.tell("late")
    with pytest.raises(ActorDown, match="worker has stopped"):
        await on.worker.ask(Work(), 1.0)
    assert on.log.handled == []


@with_worker(restarts=2)
async def test_crashes_that_are_further_apart_never_reach_the_limit(on: Stage) -> None:
    for _ in range(12):
        on.worker.tell(Break())
        await asyncio.sleep(30.5)
    assert not on.system.failed.done()
    assert await on.worker.ask(Work(), 1.0) == 1


def test_the_first_actor_beyond_the_limit_gives_the_reason() -> None:
    async def scenario(world: VirtualLoop) -> str:
        async with System(restarts=0) as system:
            refs = [system.spawn(name, lambda: Worker(Log()), mailbox=1) for name in ("one", "two")]
            for ref in refs:
                ref.tell(Break())
                await settled()
            return system.failed.result()

    assert run_world(0, scenario).startswith("one crashed 1 times")


def test_a_stop_handles_what_waits_and_later_actors_still_speak_to_earlier_ones() -> None:
    async def scenario(world: VirtualLoop) -> tuple[set[object], float]:
        log = Log()
        async with System() as system:
            first, second = (system.spawn(name, lambda: Worker(log), mailbox=8) for name in ("one", "two"))
            first.tell("before")
            second.tell(Work(2.0))
            second.tell(Forward(first, "forwarded"))
            second.tell("after")
            await asyncio.sleep(1)
        return set(log.handled), world.time()

    assert run_world(0, scenario) == ({"before", "after", "forwarded"}, 2.0)


@with_worker()
async def test_a_stop_ends_who_needs_longer_than_the_grace(on: Stage) -> None:
    handled = asyncio.create_task(on.worker.ask(Work(2.0), 100.0))
    cut_off = asyncio.create_task(on.worker.ask(Work(50.0), 100.0))
    waiting = asyncio.create_task(on.worker.ask(Work(), 100.0))
    await settled()
    await on.system.stop(grace_s=5.0)
    assert on.world.time() == pytest.approx(5.0, abs=1e-3)
    assert await handled == 1
    with pytest.raises(ActorDown, match="worker crashed: CancelledError"):
        await cut_off
    with pytest.raises(ActorDown, match="worker has stopped"):
        await waiting


@pytest.mark.xfail(strict=True, reason="nobody keeps the asks whose answer is a future")
@with_worker()
async def test_a_stop_fails_the_asks_that_a_future_was_to_answer(on: Stage) -> None:
    asking = asyncio.create_task(on.worker.ask(Later(on.world.create_future()), 10.0))
    await settled()
    await on.system.stop()
    with pytest.raises(ActorDown, match="worker has stopped"):
        await asking


@with_worker()
async def test_after_a_stop_messages_are_refused_and_another_stop_is_harmless(on: Stage) -> None:
    await on.system.stop()
    with pytest.raises(ActorDown, match="worker has stopped"):
        on.worker.tell("late")
    with pytest.raises(ActorDown, match="worker has stopped"):
        await on.worker.ask(Work(), 1.0)
    await on.system.stop()
    assert on.system.failed.cancelled()


@with_worker()
async def test_an_actor_that_crashes_in_a_stop_is_not_started_again(on: Stage) -> None:
    on.worker.tell(Break(seconds=1.0))
    waiting = asyncio.create_task(on.worker.ask(Work(), 100.0))
    await settled()
    await on.system.stop()
    with pytest.raises(ActorDown, match="crashed"):
        await waiting
    assert next(on.log.lives) == 2


def test_no_task_outlives_a_system_whose_block_raises() -> None:
    async def scenario(world: VirtualLoop) -> None:
        with pytest.raises(KeyError):
            async with System() as system:
                for name in ("a", "b", "c"):
                    system.spawn(name, lambda: Worker(Log()), mailbox=1)
                await settled()
                assert len(asyncio.all_tasks()) == 4
                raise KeyError("block")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_world(0, scenario)


@with_worker()
async def test_a_name_is_taken_once(on: Stage) -> None:
    with pytest.raises(ValueError, match="an actor worker already"):
        on.system.spawn("worker", lambda: Worker(on.log), mailbox=1)


def test_a_reference_may_be_made_before_its_actor() -> None:
    async def scenario(world: VirtualLoop) -> int:
        async with System() as system:
            early = system.ref("worker")
            system.spawn("worker", lambda: Worker(Log()), mailbox=1)
            return await early.ask(Work(), 1.0)

    assert run_world(0, scenario) == 1


@with_worker()
async def test_statistics_count_what_waits_is_handled_restarted_and_how_long_it_took(on: Stage) -> None:
    on.worker.tell(Work(1.5))
    on.worker.tell(Work(0.5))
    on.worker.tell("third")
    await asyncio.sleep(1)
    assert stats(on.system) == MailboxStats("worker", 2, 3, handled=0, restarts=0, busy_s=0.0)
    await asyncio.sleep(2)
    assert stats(on.system) == MailboxStats("worker", 0, 3, handled=3, restarts=0, busy_s=2.0)
    on.worker.tell(Break())
    await settled()
    assert stats(on.system) == MailboxStats("worker", 0, 3, handled=3, restarts=1, busy_s=2.0)
