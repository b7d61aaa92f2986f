"""A client that goes away frees its slot within one chunk or step; what was read is kept.

How far the server got is what it says of its slots, so nothing here depends on time: a news that travels for
less than one chunk, or one step, of the demo is enough.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.e2e.streams import streaming
from tests.e2e.talk import Message, ask

CHUNK = 256  # of the demo here
WORDS = "one two three four five six seven eight nine ten eleven twelve "


def all_idle(status: Mapping[str, Any]) -> bool:
    return status["engine"]["running"] == 0 and all(slot["phase"] == "idle" for slot in status["slots"])


def reading(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((slot for slot in status["slots"] if slot["phase"] == "reading" and slot["length"]), None)


def prompt(opening: str, words: str) -> list[Message]:
    return [{"role": "system", "content": f"{opening} {words}"}, {"role": "user", "content": "Go on."}]


@pytest.mark.demo
async def test_leaving_while_the_prompt_is_read_ends_with_its_chunk_and_a_retry_goes_on_there(
    demo: Server,
) -> None:
    messages = prompt("First.", WORDS * 65)
    async with demo.client() as client:
        async with streaming(client, demo.model, messages) as stream:
            seen = await stream.phase("reading")
        status = await client.until(all_idle)
        held = status["slots"][stream.slot]["length"]
        assert seen["position"] <= held <= seen["position"] + CHUNK < seen["total"]
        again = await ask(client, demo.model, messages, max_tokens=1)
    assert again.regrow["reused"] == held


@pytest.mark.demo
async def test_leaving_without_streaming_is_noticed_as_well(demo: Server) -> None:
    messages = prompt("Second.", WORDS * 150)
    async with demo.client() as client:
        asking = asyncio.create_task(ask(client, demo.model, messages))
        seen = reading(await client.until(lambda status: reading(status) is not None))
        asking.cancel()
        status = await client.until(all_idle)
    assert seen is not None
    assert status["slots"][seen["slot"]]["length"] <= seen["length"] + 2 * CHUNK


@pytest.mark.demo
async def test_leaving_while_the_answer_is_decoded_ends_with_its_step(demo: Server) -> None:
    messages = prompt("Third.", "Tell a long story.")
    async with demo.client() as client:
        async with streaming(client, demo.model, messages) as stream:
            placed = await stream.phase("placed")
            await stream.tokens(5)
        status = await client.until(all_idle)
        answered = status["slots"][stream.slot]["length"] - placed["total"]
        assert answered <= len(stream.texts) + 1
        again = await ask(client, demo.model, messages, max_tokens=1)
    assert again.regrow["reused"] > placed["reused"]


async def test_a_running_state_survives_a_reader_who_leaves(hybrid: Server) -> None:
    messages = prompt("Fourth.", WORDS * 30)
    async with hybrid.client() as client:
        async with streaming(client, hybrid.model, messages) as stream:
            seen = await stream.phase("reading")
        status = await client.until(all_idle)
        held = status["slots"][stream.slot]["length"]
        assert seen["position"] <= held < seen["total"] - 1
        again = await ask(client, hybrid.model, messages)
        afresh = await ask(client, hybrid.model, messages, regrow={"cache": "off"})
    assert (again.regrow["source"], again.regrow["reused"]) == ("live", held)
    assert again.text == afresh.text
