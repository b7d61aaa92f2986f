"""Several answers to one prompt: it is read once, and each answer is what it would be alone."""

import asyncio

import pytest

from regrow.actors.events import ReadProgress
from regrow.api.intake import forks
from regrow.policy.request import Exactness, GenerateRequest, SamplingParams
from tests.actors.world import House, chat, in_house, keys_of, raw, text
from tests.world.engine import CHUNK

SAMPLED = SamplingParams(temperature=1.0, seed=3)
N = 3


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize(
    "request_", [chat("hi", sampling=SAMPLED), raw(text(5, 3 * CHUNK + 7))], ids=["a chat", "a raw prompt"]
)
def test_the_prompt_of_several_answers_is_read_once(
    request_: GenerateRequest, slots: int, hybrid: bool
) -> None:
    async def scenario(house: House) -> None:
        requests = forks(request_, N)
        runs = [await house.submit(request) for request in requests]
        answers = await asyncio.gather(*(house.ended(run) for run in runs))
        assert [answer.tokens for answer in answers] == [house.truth(request) for request in requests]
        whole = len(keys_of(request_)) - 1
        assert sorted(answer.read for answer in answers) == [0, 0, whole]
        assert sorted(answer.reused for answer in answers) == [0, whole, whole]
        assert (await house.engine.status()).device.counters.read_tokens == whole

    in_house(scenario, seeds=range(2), slots=slots, hybrid=hybrid)


def test_a_fork_that_reads_nothing_is_lent_no_cells_and_a_chat_that_reads_next_is() -> None:
    async def scenario(house: House) -> None:
        runs = [await house.submit(request) for request in forks(chat("hi"), N)]
        await asyncio.gather(*(house.ended(run) for run in runs))
        assert house.runner.lends == [False] * (N - 1)
        answer = await house.ask(chat("something else"))
        assert answer.reused
        assert house.runner.lends == [False] * (N - 1) + [True]

    in_house(scenario, seeds=range(2), slots=4)


def test_what_forks_leave_does_not_change_what_later_prompts_reuse() -> None:
    async def scenario(house: House) -> None:
        requests = forks(chat("hi"), N)
        runs = [await house.submit(request) for request in requests]
        answers = await asyncio.gather(*(house.ended(run) for run in runs))
        later = chat("hi", answers[0].text, "and then?")
        answer = await house.ask(later)
        assert answer.tokens == house.truth(later)
        assert 0 < answer.reused < len(keys_of(chat("hi"))) - 1  # no cut of its own plan is there

    in_house(scenario, seeds=range(2))


def test_without_the_cache_each_answer_reads_for_itself_and_is_the_same() -> None:
    async def scenario(house: House) -> None:
        requests = forks(chat("hi", cache="off"), 2)
        answers = [await house.ask(request) for request in requests]
        assert [answer.reused for answer in answers] == [0, 0]
        assert answers[0].tokens == answers[1].tokens == house.truth(requests[0])

    in_house(scenario, seeds=[0])


def test_a_prompt_of_one_or_two_tokens_can_be_answered_several_times() -> None:
    async def scenario(house: House) -> None:
        for length in (1, 2):
            requests = forks(raw(text(9, length)), N)
            runs = [await house.submit(request) for request in requests]
            answers = await asyncio.gather(*(house.ended(run) for run in runs))
            assert [a.tokens for a in answers] == [house.truth(request) for request in requests]

    in_house(scenario, seeds=[0])


@pytest.mark.parametrize("exact", ["full", "cache", "off"])
@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_forks_are_right_in_every_mode_and_without_room_for_a_state(exact: Exactness, budget: int) -> None:
    async def scenario(house: House) -> None:
        requests = forks(chat("hi", sampling=SAMPLED), N)
        runs = [await house.submit(request) for request in requests]
        answers = await asyncio.gather(*(house.ended(run) for run in runs))
        assert [answer.tokens for answer in answers] == [house.truth(request) for request in requests]

    in_house(scenario, seeds=range(2), exact=exact, budget=budget)


def test_where_the_reader_of_forks_is_cancelled_another_one_reads_on() -> None:
    async def scenario(house: House) -> None:
        requests = forks(raw(text(5, 6 * CHUNK)), N)
        runs = [await house.submit(request) for request in requests]
        seen = await house.until(runs[0], ReadProgress, nth=2)
        await runs[0].cancel()
        first, *others = await asyncio.gather(house.ended(runs[0], seen), *map(house.ended, runs[1:]))
        assert first.reason == "cancelled"
        assert [answer.tokens for answer in others] == [house.truth(request) for request in requests[1:]]
        read = (await house.engine.status()).device.counters.read_tokens
        assert read <= len(keys_of(requests[0])) - 1 + CHUNK

    in_house(scenario, seeds=range(3))
