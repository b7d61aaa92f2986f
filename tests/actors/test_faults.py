"""What a fault may cost: never a wrong answer, never another's request, and nothing waits for ever."""

import asyncio

import pytest

from tests.actors.world import Answer, House, chat, in_house

INSTANTS = [i / 8 for i in range(10)]  # over the life of a request of a second, its mount included


async def second_turn(house: House) -> tuple[Answer, "asyncio.Task[Answer]"]:
    """A chat's first turn, and its second on the way beside a stranger."""
    first = await house.ask(chat("hello"))
    running = asyncio.create_task(house.ask(chat("hello", first.text, "more")))
    return first, running


@pytest.mark.parametrize("after", INSTANTS)
def test_a_crash_of_the_cache_costs_what_it_kept_and_no_running_request(after: float) -> None:
    async def scenario(house: House) -> None:
        first, running = await second_turn(house)
        stranger = asyncio.create_task(house.ask(chat("who else?")))
        await asyncio.sleep(after)
        house.crash("cache")
        for request, answer in [
            (chat("hello", first.text, "more"), await running),
            (chat("who else?"), await stranger),
            (chat("hello"), await house.ask(chat("hello"))),
            (chat("hello"), await house.ask(chat("hello"))),
        ]:
            assert answer.reason == "length"
            assert answer.tokens == house.truth(request)
        assert answer.reused > 0

    in_house(scenario)
