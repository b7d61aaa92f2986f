"""The actor runtime's promises about lives: crashes, restarts and their limit, watchers, the stop."""

import asyncio
import gc
import warnings
from collections.abc import Iterator, MutableMapping

import pytest
from structlog.testing import capture_logs

from regrow.actors.runtime import Down, System
from regrow.errors import ActorDown, BadRequest, DeadlineExceeded, Overloaded
from tests.actors.worker import Break, Forward, Later, Log, Stage, Work, Worker, settled, stats, with_worker
from tests.world.loop import VirtualLoop, run_world


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, object]]]:
    """What was logged; keeps the traces of wanted crashes out of the output."""
    with capture_logs() as entries:
        yield entries


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


def test_a_crash_after_the_deadline_is_nobodys_answer(logged: list[MutableMapping[str, object]]) -> None:
    async def scenario(world: VirtualLoop) -> None:
        async with System() as system:
            ref = system.spawn("worker", lambda: Worker(Log()), mailbox=8)
            with pytest.raises(DeadlineExceeded):
                await ref.ask(Break(seconds=4.0), 1.0)
            await asyncio.sleep(4)
            assert stats(system).restarts == 1

    run_world(0, scenario)
    assert [entry["error"] for entry in logged] == ["RuntimeError('broken')"]


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


@with_worker()
async def test_a_cancelled_future_that_an_actor_waits_for_is_a_crash(on: Stage) -> None:
    with pytest.raises(ActorDown, match="worker crashed: CancelledError"):
        await on.worker.ask(Break(asyncio.CancelledError()), 1.0)
    assert await on.worker.ask(Work(), 1.0) == 1
    assert stats(on.system).restarts == 1


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


@with_worker()
async def test_a_stop_fails_the_asks_that_a_future_was_to_answer(on: Stage) -> None:
    asking = asyncio.create_task(on.worker.ask(Later(on.world.create_future()), 10.0))
    await settled()
    await on.system.stop()
    with pytest.raises(ActorDown, match="worker has stopped"):
        await asking


@with_worker()
async def test_after_a_stop_tells_go_nowhere_asks_are_refused_and_another_stop_is_harmless(on: Stage) -> None:
    await on.system.stop()
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


def test_a_stop_closes_every_mailbox() -> None:
    async def scenario(world: VirtualLoop) -> None:
        async with System(restarts=0) as system:
            for name in ("one", "two"):
                system.spawn(name, lambda: Worker(Log()), mailbox=1)
            system.ref("one").tell(Break())
            await settled()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(0, scenario)
        gc.collect()
    assert [warning for warning in caught if warning.category is ResourceWarning] == []


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
async def test_a_post_and_an_urgent_ask_find_room_in_a_full_mailbox_and_nothing_else_does(on: Stage) -> None:
    on.worker.tell(Work(seconds=1.0))
    await settled()
    for _ in range(8):
        on.worker.tell("fills it")
    with pytest.raises(Overloaded, match="holds 8 messages and is full"):
        on.worker.tell("one more")
    on.worker.post("from a timer")
    assert await on.worker.ask(Work(), 10.0, urgent=True) == 2
    assert on.log.handled == ["fills it"] * 8 + ["from a timer"]
