"""What a fault may cost: never a wrong answer, never another's request, and nothing waits for ever."""

import asyncio

import pytest

from tests.actors.world import Answer, House, chat, in_house
from tests.world.fake_runner import Operation

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


async def crowd(house: House, n: int = 4) -> list["asyncio.Task[Answer]"]:
    """More chats than slots, all submitted."""
    runs = [await house.submit(chat(f"chat {i}")) for i in range(n)]
    return [asyncio.create_task(house.ended(run)) for run in runs]


async def all_end(house: House, crowd: list["asyncio.Task[Answer]"], *errors: str) -> list[str]:
    """Every chat of the crowd ends, with its true answer or one of the errors, and the house serves on."""
    reasons = []
    for i, task in enumerate(crowd):
        answer = await task
        assert answer.reason in ("length", *errors)
        assert answer.tokens == house.truth(chat(f"chat {i}"))[: len(answer.tokens)]
        reasons.append(answer.reason)
    for i in range(len(crowd)):
        assert (await house.ask(chat(f"chat {i}"))).tokens == house.truth(chat(f"chat {i}"))
    return reasons


@pytest.mark.parametrize("after", INSTANTS)
def test_a_crash_of_the_engine_actor_ends_what_waits_and_nothing_that_runs(after: float) -> None:
    async def scenario(house: House) -> None:
        running = await crowd(house)
        await asyncio.sleep(after)
        house.crash("engine")
        reasons = await all_end(house, running, "ActorDown")
        assert reasons[:2] == ["length", "length"]
        if after == 0:
            assert reasons[2:] == ["ActorDown", "ActorDown"]

    in_house(scenario)


@pytest.mark.parametrize("after", INSTANTS)
@pytest.mark.parametrize("first", ["engine", "slot-0"])
def test_a_crash_of_engine_and_slot_together_leaves_nobody_waiting(after: float, first: str) -> None:
    async def scenario(house: House) -> None:
        running = await crowd(house)
        await asyncio.sleep(after)
        house.crash(first)
        for _ in range(house.world.rng.randrange(4)):
            await asyncio.sleep(0)
        house.crash({"engine": "slot-0", "slot-0": "engine"}[first])
        await all_end(house, running, "ActorDown")

    in_house(scenario)


def test_a_request_can_be_cancelled_after_the_engine_actor_has_crashed() -> None:
    async def scenario(house: House) -> None:
        run = await house.submit(chat("hello", max_tokens=2000))
        await asyncio.sleep(2)
        house.crash("engine")
        await asyncio.sleep(2)
        assert (await house.engine.status()).engine.running == 1
        await run.cancel()
        assert (await house.ended(run)).reason == "cancelled"

    in_house(scenario)


@pytest.mark.parametrize("after", INSTANTS)
def test_a_crash_of_the_device_actor_ends_what_runs_and_serves_what_waits(after: float) -> None:
    async def scenario(house: House) -> None:
        running = await crowd(house)
        await asyncio.sleep(after)
        house.crash("device")
        reasons = await all_end(house, running, "DeviceFailed")
        if after < 1:  # the first two run, the others wait
            assert reasons[2:] == ["length", "length"]
        assert (await house.engine.status()).device.generation == 1

    in_house(scenario)


@pytest.mark.parametrize("operation", ["read", "step", "snapshot", "mount", "join", "leave"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_device_error_ends_what_runs_by_its_name_and_all_that_waits_is_served(
    operation: Operation, nth: int
) -> None:
    async def scenario(house: House) -> None:
        house.runner.faults[operation, nth] = OSError("the bus fell off")
        reasons = await all_end(house, await crowd(house), "DeviceFailed")
        assert 1 <= reasons.count("DeviceFailed") <= 2
        assert (await house.engine.status()).device.generation == 1

    in_house(scenario)
