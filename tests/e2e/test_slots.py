"""Requests share the server without disturbing each other, and wait their turn beyond its slots."""

import asyncio
from contextlib import AsyncExitStack

from tests.e2e.server import Server
from tests.e2e.streams import streaming
from tests.e2e.talk import talk

BLUE, RED = "The sky is blue today. " * 20, "A red house stands there. " * 15
QUESTIONS = ("Where?", "And when did that happen?", "Why?")


async def test_two_chats_in_two_slots_answer_as_each_alone(hybrid: Server) -> None:
    async with hybrid.client() as client:
        alone = [
            await talk(client, hybrid.model, system, QUESTIONS, regrow={"cache": "off"})
            for system in (BLUE, RED)
        ]
        together = await asyncio.gather(
            *(talk(client, hybrid.model, system, QUESTIONS) for system in (BLUE, RED))
        )
    for one, other in zip(alone, together, strict=True):
        assert [turn.text for turn in other] == [turn.text for turn in one]
        assert len({turn.text for turn in one}) == len(one)
    (blue,), (red,) = ({turn.regrow["slot"] for turn in turns} for turns in together)
    assert blue != red


async def test_a_request_beyond_the_slots_waits_and_is_told_so(hybrid: Server) -> None:
    async with hybrid.client() as client, AsyncExitStack() as stack:

        async def open_stream(text: str, max_tokens: int) -> tuple:
            messages = [{"role": "user", "content": text}]
            return await stack.enter_async_context(
                streaming(client, hybrid.model, messages, max_tokens=max_tokens)
            )

        first, second = [await open_stream(f"Number {n}.", 4000) for n in (1, 2)]
        await asyncio.gather(first.tokens(1), second.tokens(1))
        third, fourth = [await open_stream(f"Number {n}.", 8) for n in (3, 4)]
        assert [(await waiting.phase("queued"))["ahead"] for waiting in (third, fourth)] == [0, 1]
        status = await client.until(lambda status: status["engine"]["waiting"] == 2)
        assert [slot["phase"] for slot in status["slots"]] == ["decoding", "decoding"]
        await second.chunks.close()
        assert [(await waiting.phase("placed"))["slot"] for waiting in (third, fourth)] == [second.slot] * 2
        assert (await third.end())["queue_ms"] > 0
        await fourth.end()
        assert third.reason == fourth.reason == "length"
        assert (await client.status())["slots"][first.slot]["phase"] == "decoding"
