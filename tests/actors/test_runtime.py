"""The actor runtime's promises about messages: mailboxes, tell and ask, deadlines, statistics."""

import asyncio
from collections.abc import Iterator, MutableMapping

import pytest
from structlog.testing import capture_logs

from regrow.actors.runtime import MailboxStats, System
from regrow.errors import ActorDown, BadRequest, DeadlineExceeded, Overloaded
from tests.actors.worker import Break, Later, Log, Stage, Work, Worker, settled, stats, with_worker
from tests.world.loop import VirtualLoop, run_world


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, object]]]:
    """What was logged; keeps the traces of wanted crashes out of the output."""
    with capture_logs() as entries:
        yield entries


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
