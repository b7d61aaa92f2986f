"""A new chat starts where somebody else's reading of the same beginning ended, wherever that is kept, and a
beginning that is being read now is read once (S1 to S8, K2, T2)."""

import asyncio

import pytest

from regrow.actors.events import Placed, ReadProgress, Token
from regrow.actors.run import Run
from regrow.policy.plan import ChunkTable, build_plan
from regrow.policy.request import CacheUse, GenerateRequest
from tests.actors.world import A_MOMENT, Answer, House, chat, in_house, keys_of
from tests.world.engine import CHUNK
from tests.world.fake_runner import Costs
from tests.world.tokenizer import world_tokenizer

SYSTEM = {"role": "system", "content": "You are one of several. " * 40}
SLOW = Costs(copy=2**-8)


def other(number: int) -> GenerateRequest:
    """A chat under a system prompt of its own."""
    return chat("hello", system={"role": "system", "content": f"Number {number} speaks. " * 30})


def ends(request: GenerateRequest) -> list[int]:
    """Where the messages end that are not the assistant's: the system prompt, then the user's turns."""
    plan = build_plan(keys_of(request), ChunkTable.uniform(CHUNK), world_tokenizer().marks)
    return [end.position for end in plan.ends]


ROOT = ends(chat("hello", system=SYSTEM))[0]


async def starts_at_the_root(house: House, *sources: str) -> None:
    request = chat("a new chat", system=SYSTEM)
    answer = await house.ask(request)
    assert answer.tokens == house.truth(request)
    assert answer.reused == ROOT
    assert answer.end.reuse.source in sources


async def rest(run: Run) -> Answer:
    """Hear a run to its end."""
    return Answer(tuple([event async for event in run]))


def test_case_3_a_new_chat_mounts_the_system_prompt_from_an_idle_slot() -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hello", system=SYSTEM))
        await starts_at_the_root(house, "slot")

    in_house(scenario, slots=3)


def test_a_new_chat_mounts_the_system_prompt_from_a_slot_that_decodes() -> None:
    async def scenario(house: House) -> None:
        busy = chat("hello", system=SYSTEM, max_tokens=200)
        run = await house.submit(busy)
        await house.until(run, Token, 3)
        await starts_at_the_root(house, "slot")
        assert (await rest(run)).end.usage.completion == 200

    in_house(scenario, slots=3)


def test_a_parked_conversation_goes_on_and_gives_its_system_prompt_to_others() -> None:
    async def scenario(house: House) -> None:
        first = await house.ask(chat("hello", system=SYSTEM))
        for number in range(4):
            await house.ask(other(number))
        await starts_at_the_root(house, "root", "parked")
        again = chat("hello", first.text, "and?", system=SYSTEM)
        answer = await house.ask(again)
        assert answer.tokens == house.truth(again)
        assert (answer.end.reuse.source, answer.reused) == ("parked", ends(again)[1])

    in_house(scenario)


def test_s6_four_chats_that_come_at_once_read_their_system_prompt_once() -> None:
    async def scenario(house: House) -> None:
        requests = [chat(f"question {i}", system=SYSTEM) for i in range(4)]
        runs = [await house.submit(request) for request in requests]
        answers = await asyncio.gather(*(house.ended(run) for run in runs))
        for request, answer in zip(requests, answers, strict=True):
            assert answer.tokens == house.truth(request)
        assert sorted(answer.reused for answer in answers) == [0, ROOT, ROOT, ROOT]

    in_house(scenario, slots=4)


@pytest.mark.parametrize(("cache", "reused"), [("off", 0), ("read-only", ROOT), ("on", ROOT)])
def test_s6_nobody_waits_for_what_a_reader_does_not_leave(cache: CacheUse, reused: int) -> None:
    async def scenario(house: House) -> None:
        reader = await house.submit(chat("long " * 100, system=SYSTEM, cache=cache))
        await house.until(reader, ReadProgress)
        request = chat("long " * 100 if cache == "read-only" else "short", system=SYSTEM)
        answer = await house.ended(await house.submit(request))
        assert answer.tokens == house.truth(request)
        assert answer.reused == reused
        progress = (await rest(reader)).of(ReadProgress)
        placed = answer.of(Placed)[0].at
        assert placed <= next(e.at for e in progress if cache == "off" or e.position == ROOT) + A_MOMENT

    in_house(scenario)


def test_s8_a_conversation_that_was_parked_has_all_its_checkpoints_when_it_is_back() -> None:
    async def scenario(house: House) -> None:
        said = ["hello"]
        for turn in range(3):
            said += [(await house.ask(chat(*said, system=SYSTEM))).text, f"turn {turn}"]
        kept = house.slot(0).session.chain.positions
        await house.ask(other(0))
        back = await house.ask(chat(*said, system=SYSTEM))
        assert (back.end.reuse.source, back.reused) == ("parked", kept[-1])
        assert set(kept) < set(house.slot(0).session.chain.positions)
        edited = chat(*said[:-2], "something else", system=SYSTEM)
        assert (await house.ask(edited)).reused == kept[-1]

    in_house(scenario, slots=1)


@pytest.mark.parametrize("after", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("name", ["slot-1", "device", "cache", "engine"])
def test_s4_whoever_crashes_while_a_slot_is_filled_nothing_of_half_a_copy_is_used(
    name: str, after: float
) -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hello", system=SYSTEM))
        run = await house.submit(chat("in between", system=SYSTEM))
        await asyncio.sleep(after)
        house.crash(name)
        answer = await house.ended(run)
        assert answer.tokens == house.truth(chat("in between", system=SYSTEM))[: len(answer.tokens)]
        for number in range(3):
            request = chat(f"question {number}", system=SYSTEM)
            assert (await house.ask(request)).tokens == house.truth(request)

    in_house(scenario, seeds=range(2), slots=3, costs=SLOW)


@pytest.mark.parametrize("after", [0.25, 1.0, 3.0])
def test_a_cache_that_crashes_while_it_lends_costs_no_running_request(after: float) -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hello", system=SYSTEM))
        await house.ask(other(0))
        await asyncio.sleep(20)
        run = await house.submit(chat("hello", system=SYSTEM))
        await asyncio.sleep(after)
        house.crash("cache")
        assert (await house.ended(run)).tokens == house.truth(chat("hello", system=SYSTEM))
        assert (await house.ask(other(0))).tokens == house.truth(other(0))
        assert (await house.ask(chat("more", system=SYSTEM))).tokens == house.truth(
            chat("more", system=SYSTEM)
        )

    in_house(scenario, seeds=range(2), slots=1, costs=SLOW)
