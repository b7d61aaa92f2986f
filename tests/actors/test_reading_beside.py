"""What running streams see while prompts are read beside them, through the whole engine in virtual time."""

import asyncio
from itertools import pairwise

import pytest

from regrow.actors.events import Event, ReadProgress, Token
from regrow.policy.schedule import DEFERRED_S
from tests.actors.world import House, in_house, raw, text
from tests.world.engine import CHUNK
from tests.world.fake_runner import Costs

LONG = 12 * CHUNK + 1
SLOW = Costs(read=0.0, token=1 / CHUNK)  # a chunk takes a second


def gaps(stream: tuple[Event, ...], reader: tuple[Event, ...]) -> list[float]:
    """The times between two tokens of a stream, while the other prompt was read."""
    chunks = [event.at for event in reader if isinstance(event, ReadProgress)]
    times = [event.at for event in stream if isinstance(event, Token)]
    return [b - a for a, b in pairwise(times) if chunks[0] <= b <= chunks[-1]]


async def beside(house: House) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Read a long prompt beside a running stream; return the events of both."""
    running = asyncio.create_task(house.ask(raw(text(1, 3), max_tokens=600, ignore_eos=True)))
    await asyncio.sleep(1)
    reader = await house.ask(raw(text(2, LONG), max_tokens=1))
    return (await running).events, reader.events


@pytest.mark.parametrize("share", [0.0, 0.5, 0.75])
def test_between_two_tokens_of_a_running_stream_is_one_chunk_at_most_and_it_keeps_its_share(
    share: float,
) -> None:
    async def scenario(house: House) -> None:
        costs = house.runner.costs
        stream, reader = await beside(house)
        seen = gaps(stream, reader)
        assert len(seen) >= LONG // CHUNK - 1
        assert max(seen) <= costs.of_chunk(0, CHUNK) + costs.step + 1e-9
        read = sum(costs.of_chunk(0, CHUNK) for _ in range(LONG // CHUNK - 1))
        deferred = costs.step + DEFERRED_S  # the end of the prompt is short
        assert len(seen) * costs.step >= read * share / (1 - share) - deferred
        counters = (await house.engine.status()).device.counters
        assert (counters.long_chunks, counters.pauses, counters.stalls) == (0, 0, 0)

    in_house(scenario, decode_share=share)


def test_where_a_chunk_takes_longer_a_stream_waits_no_longer_than_it_may() -> None:
    async def scenario(house: House) -> None:
        stream, reader = await beside(house)
        assert max(gaps(stream, reader)) <= 0.6 + house.runner.costs.step
        counters = (await house.engine.status()).device.counters
        assert counters.long_chunks == LONG // CHUNK
        assert counters.pauses >= counters.long_chunks
        assert counters.stalls == 0
        assert counters.longest_wait_s <= 0.6

    in_house(scenario, costs=SLOW, max_stall_ms=600.0)


def test_a_long_read_lets_a_short_one_pass_at_the_end_of_a_chunk_at_most_twice() -> None:
    async def scenario(house: House) -> None:
        long = asyncio.create_task(house.ask(raw(text(1, 30 * CHUNK), max_tokens=1)))
        await asyncio.sleep(0.2)
        short = [house.ask(raw(text(seed, 2 * CHUNK), max_tokens=1)) for seed in (2, 3, 4)]
        shorts = await asyncio.gather(*short)
        begun = [answer.of(ReadProgress)[0].at for answer in shorts]
        end = (await long).of(ReadProgress)[-1].at
        assert sum(at < end for at in begun) == 2
        assert sum(at > end for at in begun) == 1

    in_house(scenario, slots=4)
