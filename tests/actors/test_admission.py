"""Who is served when: queue and priorities, readers that fall behind, deadlines, drain and the end."""

import asyncio

import pytest

from regrow.actors.events import Placed, Queued, Token, Usage
from regrow.actors.run import Run
from regrow.errors import ActorDown, Draining, Overloaded
from tests.actors.world import A_MOMENT, Answer, House, chat, house, in_house, keys_of, raw, stranger, text
from tests.world.engine import CHUNK
from tests.world.loop import VirtualLoop, run_world


async def all_of(house: House, *runs: Run) -> list[Answer]:
    return list(await asyncio.gather(*(house.ended(run) for run in runs)))


def test_requests_are_served_by_priority_and_then_in_order() -> None:
    async def scenario(house: House) -> None:
        priorities = [0, 0, 1, 0, 5, 1]
        runs = [await house.submit(stranger(i, priority=p)) for i, p in enumerate(priorities)]
        answers = await all_of(house, *runs)
        placed = [answer.of(Placed)[0].at for answer in answers]
        assert sorted(range(6), key=lambda i: placed[i]) == [0, 4, 2, 5, 1, 3]
        assert [answer.of(Queued)[0].ahead for answer in answers] == [0, 0, 0, 2, 0, 2]

    in_house(scenario, slots=1)


def test_who_does_not_wait_has_nobody_ahead_though_others_wait_for_a_reader() -> None:
    async def scenario(house: House) -> None:
        shared = [raw([*text(1, 8 * CHUNK), n]) for n in range(2)]
        runs = [await house.submit(request) for request in (*shared, raw(text(2, CHUNK)))]
        answers = await all_of(house, *runs)
        assert answers[1].of(Placed)[0].at > answers[2].of(Placed)[0].at == 0.0
        assert [answer.of(Queued)[0].ahead for answer in answers] == [0, 0, 0]

    in_house(scenario)


def test_without_a_queue_what_finds_a_slot_is_served_and_all_else_refused() -> None:
    async def scenario(house: House) -> None:
        runs = [await house.submit(stranger(i)) for i in range(2)]
        with pytest.raises(Overloaded):
            await house.submit(stranger(2))
        assert [answer.reason for answer in await all_of(house, *runs)] == ["length"] * 2

    in_house(scenario, queue=0)


@pytest.mark.parametrize("slots", [1, 4])
def test_the_time_worth_waiting_is_that_until_a_slot_is_free_as_measured(slots: int) -> None:
    async def scenario(house: House) -> None:
        taken = await house.ask(stranger(0, max_tokens=400))
        seconds = taken.end.at - taken.of(Placed)[0].at
        assert seconds > 12
        runs = [await house.submit(stranger(i)) for i in range(1, slots + 1)]
        with pytest.raises(Overloaded) as refused:
            await house.submit(stranger(9))
        assert refused.value.retry_after == pytest.approx(seconds / slots, abs=1)
        await all_of(house, *runs)

    in_house(scenario, slots=slots, queue=0)


def test_a_full_queue_refuses_with_a_time_worth_waiting_and_serves_on() -> None:
    async def scenario(house: House) -> None:
        runs = [await house.submit(stranger(i)) for i in range(4)]
        with pytest.raises(Overloaded, match="queue is full") as refused:
            await house.submit(stranger(4))
        assert refused.value.retry_after > 0
        assert [answer.reason for answer in await all_of(house, *runs)] == ["length"] * 4
        assert (await house.ask(stranger(4))).tokens == house.truth(stranger(4))

    in_house(scenario, queue=2)


@pytest.mark.parametrize("buffer", [3, 4, 6, 12])
def test_a_reader_that_falls_behind_is_cut_off_alone(buffer: int) -> None:
    async def scenario(house: House) -> None:
        slow = await house.submit(stranger(1, max_tokens=100))
        brisk = await house.submit(stranger(2))
        assert (await house.ended(brisk)).tokens == house.truth(stranger(2))
        await asyncio.sleep(20)
        assert slow.ended
        answer = Answer(tuple([event async for event in slow]))
        assert answer.reason == "SlowConsumer"
        assert len(answer.events) == buffer + 1
        assert (await house.ask(stranger(1))).tokens == house.truth(stranger(1))

    in_house(scenario, event_buffer=buffer)


@pytest.mark.parametrize("deadline", [0.0, 0.1, 0.5, 1.0, 2.0])
def test_a_deadline_ends_a_request_in_any_phase_and_a_retry_resumes_further(deadline: float) -> None:
    async def scenario(house: House) -> None:
        request = raw(text(1, 20 * CHUNK), max_tokens=1000)
        first = await house.ask(raw(text(1, 20 * CHUNK), max_tokens=1000, deadline_s=deadline))
        assert first.reason == "DeadlineExceeded"
        costs = house.runner.costs
        assert deadline <= first.end.at <= deadline + max(costs.of_chunk(0, CHUNK), costs.step)
        retry = await house.ask(raw(text(1, 20 * CHUNK)))
        assert retry.tokens == house.truth(request)[:6]
        assert retry.reused >= min(first.read, 19 * CHUNK) // CHUNK * CHUNK

    in_house(scenario)


def test_a_deadline_ends_a_request_that_waits() -> None:
    async def scenario(house: House) -> None:
        running = await house.submit(stranger(1, max_tokens=100))
        waiting = await house.submit(stranger(2, deadline_s=1.5))
        answer = await house.ended(waiting)
        assert (answer.reason, answer.end.at) == ("DeadlineExceeded", 1.5)
        assert answer.end.reuse.queue_ms == 1500
        assert answer.end.usage == Usage(0, 0, 0)
        assert (await house.ended(running)).reason == "length"

    in_house(scenario, slots=1)


@pytest.mark.parametrize(("own", "end"), [(None, 2.0), (5.0, 2.0), (0.5, 0.5)])
def test_the_servers_deadline_bounds_every_request(own: float | None, end: float) -> None:
    async def scenario(house: House) -> None:
        answer = await house.ask(stranger(1, max_tokens=1000, deadline_s=own))
        assert answer.reason == "DeadlineExceeded"
        assert end <= answer.end.at <= end + house.runner.costs.of_chunk(0, CHUNK)

    in_house(scenario, deadline=2.0)


def test_a_request_that_is_done_in_time_has_nothing_to_fear_from_its_deadline() -> None:
    async def scenario(house: House) -> None:
        assert (await house.ask(stranger(1, deadline_s=3))).reason == "length"
        assert (await house.ask(stranger(1, "so", "long", max_tokens=200))).reason == "length"

    in_house(scenario)


def test_a_client_that_goes_while_it_submits_leaves_no_request_behind() -> None:
    async def scenario(house: House) -> None:
        for steps in range(12):
            submitting = asyncio.ensure_future(house.submit(stranger(steps, max_tokens=1000)))
            for _ in range(steps):
                await asyncio.sleep(0)
            submitting.cancel()
            await asyncio.sleep(1)
            if not submitting.cancelled():
                await (await submitting).cancel()
                await asyncio.sleep(1)
            assert not house.requests

    in_house(scenario)


def test_a_drain_lets_what_is_there_end_and_takes_no_more() -> None:
    async def scenario(house: House) -> None:
        runs = [await house.submit(stranger(i)) for i in range(4)]
        draining = asyncio.ensure_future(house.engine.drain())
        await asyncio.sleep(A_MOMENT)
        assert not house.engine.ready
        with pytest.raises(Draining):
            await house.submit(stranger(5))
        await draining
        assert all(run.ended for run in runs)
        assert [answer.reason for answer in await all_of(house, *runs)] == ["length"] * 4

    in_house(scenario)


def test_a_drain_ends_what_does_not_end_in_time() -> None:
    async def scenario(house: House) -> None:
        runs = [await house.submit(stranger(i, max_tokens=1000)) for i in range(4)]
        await house.engine.drain()
        assert [answer.reason for answer in await all_of(house, *runs)] == ["Draining"] * 4
        assert house.world.time() < 3.5

    in_house(scenario, drain_s=3.0)


@pytest.mark.parametrize("after", [0.0, 0.4, 1.5])
def test_closing_the_engine_ends_every_request_once(after: float) -> None:
    async def main(world: VirtualLoop) -> None:
        async with house(world, slots=2, rests=False) as opened:
            runs = [await opened.submit(stranger(i, max_tokens=1000)) for i in range(4)]
            await asyncio.sleep(after)
        for run in runs:
            assert run.ended
            events = [event async for event in run]
            assert Answer(tuple(events)).reason == "Draining"
            await run.cancel()  # no effect any more

    for seed in range(4):
        run_world(seed, main)


@pytest.mark.parametrize("name", ["engine", "slot-0", "cache", "roots", "device"])
def test_an_actor_that_keeps_crashing_ends_the_engine_and_every_request(name: str) -> None:
    async def main(world: VirtualLoop) -> None:
        async with house(world, slots=2, rests=False) as opened:
            runs = [await opened.submit(stranger(i, max_tokens=2000)) for i in range(4)]
            for _ in range(4):
                assert opened.engine.failed is None
                opened.crash(name)
                await asyncio.sleep(0.3)
            assert opened.engine.failed is not None
            assert name in opened.engine.failed
            assert not opened.engine.ready
            for run in runs:
                assert run.ended
                answer = Answer(tuple([event async for event in run]))
                assert answer.reason in ("ActorDown", "DeviceFailed")
            with pytest.raises(ActorDown):
                await opened.submit(stranger(5))

    for seed in range(4):
        run_world(seed, main)


def test_a_slot_reports_what_it_does() -> None:
    async def scenario(house: House) -> None:
        run = await house.submit(chat("hello", max_tokens=50))
        phases = []
        before = 0
        for _ in range(100):
            report = (await house.engine.status()).slots[0]
            phases.append(report.phase)
            if report.phase == "idle":
                assert (report.prompt, report.reused, report.position, report.drawn) == (0, 0, 0, 0)
                break
            assert report.prompt == len(keys_of(chat("hello")))
            assert before <= report.position + report.drawn <= report.prompt + 50
            before = report.position + report.drawn
            assert report.request == run.id
            await asyncio.sleep(0.05)
        assert list(dict.fromkeys(phases)) == ["reading", "decoding", "idle"]
        assert before > len(keys_of(chat("hello")))
        answer = await house.ended(run)
        assert len(answer.of(Token)) == 50
        totals = (await house.engine.status()).engine.totals
        assert (totals.finished, totals.failed, totals.drawn) == (1, 0, 50)
        assert totals.read == answer.read

    in_house(scenario, seeds=[0])
