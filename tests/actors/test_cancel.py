"""A cancel in any phase: the slot is free within a chunk or step, what was read stays and a retry goes on."""

import asyncio

import pytest

from regrow.actors.events import Event, Mounted, Placed, Queued, ReadDone, ReadProgress, Token, Usage
from regrow.actors.messages import SlotStats
from regrow.errors import Overloaded
from tests.actors.world import House, chat, in_house, raw, text
from tests.world.engine import CHUNK
from tests.world.fake_runner import Hang

LONG = raw(text(1, 40 * CHUNK + 3))


@pytest.mark.parametrize("phase", [Placed, Mounted, ReadProgress, ReadDone, Token])
def test_a_cancel_frees_the_slot_within_one_chunk_or_step(phase: type[Event]) -> None:
    async def scenario(house: House) -> None:
        run = await house.submit(chat("hello", max_tokens=500))
        seen = await house.until(run, phase)
        asked = house.world.time()
        await run.cancel()
        answer = await house.ended(run, seen)
        costs = house.runner.costs
        assert answer.reason == "cancelled"
        assert answer.end.at - asked <= max(costs.of_chunk(0, CHUNK), costs.step)
        assert (await house.engine.status()).slots[0].request is None
        assert (await house.ask(chat("hello"))).tokens == house.truth(chat("hello"))

    in_house(scenario, slots=1)


def test_a_cancelled_read_goes_on_where_it_stopped_and_grows_strictly() -> None:
    async def scenario(house: House) -> None:
        reused = []
        for _ in range(4):
            run = await house.submit(LONG)
            seen = await house.until(run, ReadProgress, 3)
            await run.cancel()
            answer = await house.ended(run, seen)
            assert answer.reason == "cancelled"
            reused.append(answer.reused)
            assert answer.read in (3 * CHUNK, 4 * CHUNK)  # what was really read
            assert answer.end.usage == Usage(answer.reused + answer.read, 0, answer.reused)
        assert reused == sorted(set(reused))
        answer = await house.ask(LONG)
        assert answer.tokens == house.truth(LONG)
        assert answer.reused > reused[-1]

    in_house(scenario)


def test_a_cancelled_queued_request_is_never_run() -> None:
    async def scenario(house: House) -> None:
        first = await house.submit(chat("first", max_tokens=50))
        second = await house.submit(chat("second"))
        seen = await house.until(second, Queued)
        await second.cancel()
        answer = await house.ended(second, seen)
        assert [type(event).__name__ for event in answer.events] == ["Queued", "Finished"]
        assert answer.reason == "cancelled"
        assert answer.end.usage == Usage(0, 0, 0)
        await house.ended(first)
        assert (await house.engine.status()).engine.totals.finished == 1

    in_house(scenario, slots=1)


def test_a_cancel_and_the_stop_reach_a_slot_whose_mailbox_is_full() -> None:
    async def scenario(house: House) -> None:
        house.runner.faults["mount", 1] = Hang(5.0)
        run = await house.submit(chat("hello"))
        await asyncio.sleep(1)  # the slot waits for its mount
        with pytest.raises(Overloaded):
            while True:
                house.engine.slot(0).tell(SlotStats())
        await run.cancel()
        assert (await house.ended(run)).reason == "cancelled"
        await house.engine.drain()
        assert not house.requests

    in_house(scenario, slots=1, rests=False)
