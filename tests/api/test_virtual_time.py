"""The server above a fake device, in virtual time: what happens when chunks take a minute, many clients come
at once, some of them leave, and the server is told to stop.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from regrow.api.sse import STUCK_S
from regrow.policy.request import GenerateRequest
from tests.actors.world import SEEDS, House, house
from tests.world.engine import CHUNK
from tests.world.fake_runner import Costs
from tests.world.loop import VirtualLoop, run_world
from tests.world.tokenizer import world_tokenizer
from tests.world.wire import DONE, KEEP_ALIVE, ROUTES, Call, Site, site

MINUTE = 60.0
SLOW = Costs(read=MINUTE, token=0.0, step=2**-5)
Scenario = Callable[[House, Site], Awaitable[None]]


class Noted:
    """The engine of a house that takes note of what is submitted, so that its cache can be checked."""

    def __init__(self, opened: House) -> None:
        self._house = opened
        self.submit = opened.submit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._house.engine, name)


def in_world(scenario: Scenario, seeds: Sequence[int] = SEEDS, **settings: Any) -> None:
    """Run a scenario with a house and a site in front of it, under each seed."""

    async def lived(world: VirtualLoop) -> None:
        async with house(world, **settings) as opened, site(Noted(opened)) as served:
            await scenario(opened, served)

    for seed in seeds:
        run_world(seed, lived)


def asked(text: str, tokens: int = 6) -> GenerateRequest:
    return GenerateRequest(messages=[{"role": "user", "content": text}], max_tokens=tokens)


def truth(house: House, text: str, tokens: int = 6) -> str:
    """What is answered to a text when nothing is remembered of any other request."""
    return world_tokenizer().decode(house.truth(asked(text, tokens)))


def read_tokens(house: House) -> int:
    return sum(note[3] for _, note in house.world.trace if note[0] == "read")


def longest_silence(call: Call) -> float:
    times = [0.0, *call.times]
    return max(b - a for a, b in itertools.pairwise(times))


def usage_of(call: Call) -> tuple[int, int, int]:
    """Prompt tokens, answer tokens and reused ones, as the last chunk that tells of them says."""
    usage = next(chunk["usage"] for chunk in reversed(call.chunks) if chunk.get("usage"))
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], cached


def test_no_stream_is_silent_for_longer_than_the_interval_while_chunks_take_a_minute() -> None:
    async def scenario(house: House, server: Site) -> None:
        texts = ("x" * 3 * CHUNK, "y" * CHUNK)
        reading, queued = [server.chat(text) for text in texts]
        await server.ends([reading, queued])
        for call, text in zip((reading, queued), texts, strict=True):
            assert longest_silence(call) <= 5.0
            assert call.text == truth(house, text)
        assert len(reading.times_of(KEEP_ALIVE)) >= 3 * MINUTE / 5 - 3
        assert len(queued.times_of(KEEP_ALIVE)) > len(reading.times_of(KEEP_ALIVE))

    in_world(scenario, slots=1, costs=SLOW)


@pytest.mark.parametrize("route", ROUTES)
def test_the_streams_of_every_route_are_kept_alive_and_end_properly(route: str) -> None:
    async def scenario(_: House, server: Site) -> None:
        calls = [server.stream(route, text * CHUNK) for text in "xy"]
        for call in await server.ends(calls):
            assert call.status == 200
            assert longest_silence(call) <= 5.0
            assert len(call.times_of(KEEP_ALIVE)) >= MINUTE / 5 - 2
            assert ROUTES[route] in call.blocks[-1][1]

    in_world(scenario, seeds=SEEDS[:2], slots=1, costs=SLOW)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_who_leaves_is_noticed_on_every_route(route: str, stream: bool) -> None:
    async def scenario(house: House, server: Site) -> None:
        left = [server.stream(route, text * 3 * CHUNK, 2000, stream) for text in "xy"]
        await asyncio.sleep(MINUTE / 2)
        for call in left:
            call.leave()
        await asyncio.sleep(MINUTE)
        assert not house.requests
        assert read_tokens(house) <= CHUNK

    in_world(scenario, seeds=SEEDS[:2], slots=1, costs=SLOW)


@pytest.mark.parametrize("route", ROUTES)
def test_a_drain_ends_what_runs_on_every_route_with_an_error(route: str) -> None:
    async def scenario(house: House, server: Site) -> None:
        streamed, whole = [server.stream(route, "hello", 3000, stream) for stream in (True, False)]
        await asyncio.sleep(0.1)
        await house.engine.drain()
        await server.ends([streamed, whole])
        assert any('"error"' in block or '"failed"' in block for _, block in streamed.blocks)
        assert whole.status == 503
        assert int(whole.headers["retry-after"]) > 0

    in_world(scenario, seeds=SEEDS[:2], drain_s=1.0)


def test_a_stream_whose_text_is_held_back_is_kept_alive_too() -> None:
    async def scenario(house: House, server: Site) -> None:
        whole = truth(house, "hello", 40)
        call = server.chat("hello", max_tokens=40, stop=[whole + "and then this never comes"])
        await call.end()
        assert call.text == whole
        assert longest_silence(call) <= 5.0
        assert len(call.times_of(KEEP_ALIVE)) > 40

    in_world(scenario, costs=Costs(step=8.0))


def test_progress_is_told_after_each_chunk_and_who_waits_hears_how_many_are_ahead() -> None:
    async def scenario(house: House, server: Site) -> None:
        first = server.chat("x" * 3 * CHUNK, regrow={"progress": True})
        await asyncio.sleep(1)
        others = [server.chat(text, regrow={"progress": True}) for text in ("one", "two")]
        await server.ends([first, *others])
        told = [[chunk["regrow"] for chunk in call.chunks if "regrow" in chunk] for call in (first, *others)]
        assert [facts[0] for facts in told] == [{"phase": "queued", "ahead": n} for n in (0, 0, 1)]
        reads = [facts for facts in told[0] if facts.get("phase") == "reading"]
        positions = [facts["position"] for facts in reads]
        assert positions == sorted(set(positions))
        assert len(positions) >= 3
        assert positions[-1] <= reads[0]["total"]
        assert all(facts["tok_s"] > 0 for facts in reads)
        assert reads[0]["eta_ms"] > reads[-1]["eta_ms"]

    in_world(scenario, slots=1, costs=SLOW)


@pytest.mark.parametrize("stream", [True, False])
def test_sixty_clients_at_once_are_all_answered_each_with_its_own_answer(stream: bool) -> None:
    async def scenario(house: House, server: Site) -> None:
        texts = [f"client {number} " + "and more " * (number % 7) for number in range(60)]
        calls = await server.ends([server.chat(text, stream=stream) for text in texts])
        for call, text in zip(calls, texts, strict=True):
            assert call.status == 200
            said = call.text if stream else call.json["choices"][0]["message"]["content"]
            assert said == truth(house, text)
        assert not house.requests

    in_world(scenario, seeds=SEEDS[:2], slots=3)


def test_what_does_not_fit_the_queue_is_told_when_to_come_again_and_then_served() -> None:
    async def scenario(house: House, server: Site) -> None:
        await server.chat("first", max_tokens=200).end()
        calls = await server.ends([server.chat(f"client {n}", max_tokens=200) for n in range(5)])
        assert sorted(call.status for call in calls) == [200, 200, 200, 429, 429]
        refused = next(call for call in calls if call.status == 429)
        assert refused.json["error"]["code"] == "overloaded"
        again = server.chat("client 5")
        if again.status != 200:
            await asyncio.sleep(int(refused.headers["retry-after"]))
            again = server.chat("client 5")
        assert (await again.end()).text == truth(house, "client 5")

    in_world(scenario, slots=1, queue=2)


@pytest.mark.parametrize("slots", [2, 3])
def test_a_short_prompt_behind_two_long_ones_waits_for_one_of_them_at_most(slots: int) -> None:
    async def scenario(house: House, server: Site) -> None:
        texts = ("x" * 40 * CHUNK, "y" * 40 * CHUNK, "short")
        longs = [server.chat(text) for text in texts[:2]]
        await asyncio.sleep(0.01)
        short = server.chat("short")
        await server.ends([*longs, short])
        ends = sorted(call.times[-1] for call in longs)
        assert short.times[-1] < ends[slots < 3]
        for call, text in zip((*longs, short), texts, strict=True):
            assert call.text == truth(house, text)

    in_world(scenario, slots=slots, context=8192)


@pytest.mark.parametrize("stream", [True, False])
def test_of_clients_that_leave_the_queue_nothing_is_ever_read(stream: bool) -> None:
    async def scenario(house: House, server: Site) -> None:
        running = server.chat("first", max_tokens=50)
        waiting = [server.chat(f"client {n}", stream=stream) for n in range(6)]
        await asyncio.sleep(0.5)
        for call in waiting[::2]:
            call.leave()
        await asyncio.sleep(0.01)
        status = await house.engine.status()
        assert (status.engine.waiting, status.engine.running) == (3, 1)
        await server.ends([running, *waiting[1::2]])
        finished = (await house.engine.status()).engine.totals
        assert (finished.finished, finished.failed) == (4, 0)
        one = (
            await house.engine.plan_of(GenerateRequest(messages=[{"role": "user", "content": "client 0"}]))
        )[0]
        assert read_tokens(house) <= 4 * len(one)

    in_world(scenario, slots=1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0.0, 0.01, 10.0, 70.0, 125.0, 181.0])
def test_who_leaves_is_noticed_within_a_chunk_and_what_was_read_is_kept(stream: bool, after: float) -> None:
    async def scenario(house: House, server: Site) -> None:
        text = "x" * 3 * CHUNK
        left = server.chat(text, stream=stream, max_tokens=2000)
        await asyncio.sleep(after)
        left.leave()
        await asyncio.sleep(MINUTE + 1)
        assert not house.requests
        had = read_tokens(house)
        assert had <= (int(after // MINUTE) + 1) * CHUNK
        again = await server.chat(text).end()
        assert again.text == truth(house, text)
        _, _, reused = usage_of(await server.chat(text, stream_options={"include_usage": True}).end())
        assert reused >= had // CHUNK * CHUNK

    in_world(scenario, seeds=SEEDS[:2], costs=SLOW)


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_takes_nothing_is_cut_off_after_a_minute_and_others_notice_nothing(route: str) -> None:
    async def scenario(house: House, server: Site) -> None:
        stuck = server.stream(route, "hello", 3000)
        await stuck.until(lambda _: True)
        stuck.take_nothing()
        other = await server.chat("other", max_tokens=20).end()
        assert other.text == truth(house, "other", 20)
        assert not stuck.ended.is_set()
        await stuck.end()
        assert STUCK_S <= house.world.time() <= 1.5 * STUCK_S  # from the first write that has to wait
        await asyncio.sleep(1)
        assert not house.requests

    in_world(scenario, seeds=SEEDS[:2])


def test_nothing_of_an_answer_that_was_left_or_stopped_reaches_the_next_one() -> None:
    async def scenario(house: House, server: Site) -> None:
        for number in range(12):
            text = f"client {number}"
            whole = truth(house, text, 30)
            call = server.chat(text, max_tokens=30, stop=[whole[20:24]] if number % 3 == 0 else None)
            if number % 3 == 1:
                await asyncio.sleep(house.world.rng.random())
                call.leave()
            else:
                await call.end()
                assert call.text == (whole.partition(whole[20:24])[0] if number % 3 == 0 else whole)

    in_world(scenario, slots=1)


@pytest.mark.parametrize(
    ("deadline_s", "usage"),
    [(30, (CHUNK, 0, 0)), (90, (2 * CHUNK, 0, 0)), (150, (3 * CHUNK, 0, 0))],
)
def test_a_deadline_is_a_named_error_with_what_was_really_read(
    deadline_s: int, usage: tuple[int, int, int]
) -> None:
    async def scenario(house: House, server: Site) -> None:
        fields = {"max_tokens": 3000, "regrow": {"deadline_ms": deadline_s * 1000}}
        streamed = await server.chat("x" * 3 * CHUNK, **fields).end()
        assert streamed.chunks[-1]["error"]["code"] == "deadline_exceeded"
        assert streamed.blocks[-1][1] == DONE
        assert usage_of(streamed) == usage
        whole = await server.chat("y" * 3 * CHUNK, **fields, stream=False).end()
        assert (whole.status, whole.json["error"]["code"]) == (504, "deadline_exceeded")

    in_world(scenario, costs=SLOW, slots=1)


def test_a_deadline_ends_who_waits_and_the_answer_says_so() -> None:
    async def scenario(house: House, server: Site) -> None:
        running = server.chat("x" * 3 * CHUNK)
        waiting = server.chat("late", regrow={"deadline_ms": 500})
        await waiting.end()
        assert waiting.chunks[-1]["error"]["code"] == "deadline_exceeded"
        assert usage_of(waiting) == (0, 0, 0)
        assert waiting.times[-1] == 0.5
        assert (await running.end()).text == truth(house, "x" * 3 * CHUNK)

    in_world(scenario, costs=SLOW, slots=1)


def test_at_a_drain_what_is_there_is_served_and_what_comes_is_told_to_come_again() -> None:
    async def scenario(house: House, server: Site) -> None:
        calls = [server.chat(f"client {n}", max_tokens=20) for n in range(5)]
        await asyncio.sleep(0.1)
        draining = asyncio.ensure_future(house.engine.drain())
        await asyncio.sleep(0.1)
        late = await server.chat("late").end()
        assert (late.status, late.json["error"]["code"]) == (503, "draining")
        assert int(late.headers["retry-after"]) > 0
        assert (await server.call("GET", "/ready").end()).status == 503
        assert (await server.call("GET", "/health").end()).status == 200
        await draining
        for number, call in enumerate(await server.ends(calls)):
            assert call.text == truth(house, f"client {number}", 20)

    in_world(scenario, slots=2)


def test_a_drain_that_takes_too_long_ends_every_stream_properly() -> None:
    async def scenario(house: House, server: Site) -> None:
        calls = [server.chat(f"client {n}", max_tokens=3000) for n in range(4)]
        await asyncio.sleep(0.1)
        await house.engine.drain()
        for call in await server.ends(calls):
            assert call.chunks[-1]["error"]["code"] == "draining"
            assert call.blocks[-1][1] == DONE
            assert call.times[-1] < 3.2

    in_world(scenario, slots=2, drain_s=3.0)


def test_higher_priority_is_served_first_in_both_fields() -> None:
    async def scenario(house: House, server: Site) -> None:
        first = server.chat("first", max_tokens=30)
        await first.until(lambda block: "content" in block)
        later: list[dict[str, object]] = [{}, {"priority": 1}, {"regrow": {"priority": 2}}]
        calls = await server.ends([server.chat(f"client {n}", **fields) for n, fields in enumerate(later)])
        ends = [call.times[-1] for call in calls]
        assert ends == sorted(ends, reverse=True)

    in_world(scenario, slots=1)
