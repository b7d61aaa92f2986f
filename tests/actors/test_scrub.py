"""Scrubbing: a copy that changes by itself in memory is found while nothing is served, and dropped with all
that shares it; the next request reads afresh."""

import asyncio

import pytest

from regrow.actors.messages import CacheReport, CacheStats
from regrow.actors.on_disk import bytes_of
from tests.actors.world import House, chat, in_house, stranger

EVERY_S = 10.0
ROUNDS = 3 * EVERY_S  # one that notes the checksums, one that compares, and the time they take
FIRST = chat("hello " * 60)
NEXT = chat("hello " * 60, "well", "and then?")


async def parked(house: House) -> None:
    """Have the first conversation in memory alone, and its checksums noted."""
    for request in (FIRST, stranger(0), stranger(1)):
        await house.ask(request)
    await asyncio.sleep(ROUNDS)


async def report(house: House) -> CacheReport:
    return await house.engine.cache.ask(CacheStats(), 1)


def flip(house: House, what: str) -> None:
    """Change one bit of each running state or of each span."""
    shelf = house.cache._shelf
    states = [state.snapshot.states[0] for state in shelf.states.values()]
    spans = [span.cells.tensors[0] for span in shelf.spans.values() if span.cells is not None]
    for tensor in states if what == "states" else spans:
        bytes_of(tensor)[0] ^= 1


@pytest.mark.parametrize("what", ["states", "spans"])
def test_what_changes_in_memory_is_dropped_counted_and_read_afresh(what: str) -> None:
    async def scenario(house: House) -> None:
        await parked(house)
        assert (await report(house)).parked
        assert (await report(house)).changed == 0
        flip(house, what)
        await asyncio.sleep(ROUNDS)
        assert (await report(house)).changed > 0
        assert (await report(house)).parked == ()
        answer = await house.ask(NEXT)
        assert (answer.reused, answer.tokens) == (0, house.truth(NEXT))

    in_house(scenario, scrub_s=EVERY_S, slots=1, rests=False)


def test_what_stays_as_it_was_is_kept() -> None:
    async def scenario(house: House) -> None:
        await parked(house)
        await asyncio.sleep(10 * ROUNDS)
        assert (await report(house)).changed == 0
        assert (await report(house)).pinned == 0
        answer = await house.ask(NEXT)
        assert answer.reused > 0
        assert answer.tokens == house.truth(NEXT)

    in_house(scenario, scrub_s=EVERY_S, slots=1, rests=False)


@pytest.mark.parametrize("serves", [True, False])
def test_nothing_is_read_while_a_request_is_served_or_where_it_is_not_wanted(serves: bool) -> None:
    async def scenario(house: House) -> None:
        await parked(house)
        if serves:
            await house.submit(chat("a long answer", max_tokens=3000))
        flip(house, "spans")
        await asyncio.sleep(ROUNDS)
        assert (await report(house)).changed == 0

    in_house(scenario, scrub_s=EVERY_S if serves else 0.0, slots=1, rests=False)


def test_a_cache_that_crashes_in_a_round_begins_another_one() -> None:
    async def scenario(house: House) -> None:
        await parked(house)
        house.crash("cache")
        await parked(house)
        flip(house, "spans")
        await asyncio.sleep(ROUNDS)
        assert (await report(house)).changed > 0

    in_house(scenario, scrub_s=EVERY_S, slots=1, rests=False)
