"""The official clients, unchanged, through the relay: chat, stream, tools, and every way to fail."""

import asyncio

import anthropic
import openai
import pytest

from tests.api.relay.conftest import Start, World
from tests.api.relay.server import CALL, TEXT
from tests.policy.prompts import chat

ASKED = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "weather", "description": "tells it", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
EACH = pytest.mark.parametrize("client", ["anthropic", "openai"])


async def ask(world: World, client: str, fault: str = "", **more: object) -> object:
    """Send one message by an official client."""
    headers = {"x-fault": fault}
    if client == "anthropic":
        return await world.anthropic.messages.create(
            model="claude-x", max_tokens=10, messages=ASKED, extra_headers=headers, **more
        )
    return await world.openai.chat.completions.create(
        model="gpt-x", messages=ASKED, extra_headers=headers, **more
    )


def text_of(answer: object) -> str:
    return answer.content[0].text if hasattr(answer, "content") else answer.choices[0].message.content


def delta_of(event: object) -> str:
    if getattr(event, "type", "") == "content_block_delta":
        return event.delta.text
    choices = getattr(event, "choices", None)
    return (choices[0].delta.content or "") if choices else ""


@EACH
async def test_a_chat(start: Start, client: str) -> None:
    world = await start(repack_cold=True)
    assert text_of(await ask(world, client)) == TEXT


@EACH
@pytest.mark.parametrize("fault", ["", "gzip"])
async def test_a_stream(start: Start, client: str, fault: str) -> None:
    world = await start(repack_cold=True)
    stream = await ask(world, client, fault, stream=True)
    assert "".join([delta_of(event) async for event in stream]) == TEXT
    assert (await world.get("/relay/status"))["tokens"]["output"] == 5


async def test_a_tool_call_and_its_result(start: Start) -> None:
    world = await start(repack_cold=True)
    answer = await ask(world, "anthropic", tools=[TOOL])
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.input == CALL
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [
        *ASKED,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    again = await world.anthropic.messages.create(model="claude-x", max_tokens=10, messages=messages)
    assert text_of(again) == TEXT
    spoken = await ask(world, "openai", tools=[FUNCTION])
    assert spoken.choices[0].message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize("client, library", [("anthropic", anthropic), ("openai", openai)])
@pytest.mark.parametrize("fault, status", [("429", 429), ("529", 529), ("500", 500)])
async def test_the_providers_errors_pass_with_their_headers(
    start: Start, client: str, library, fault: str, status: int
) -> None:
    world = await start(repack_cold=True)
    with pytest.raises(library.APIStatusError, match="busy") as caught:
        await ask(world, client, fault)
    assert caught.value.status_code == status
    assert caught.value.response.headers["retry-after"] == "7"
    assert (await world.get("/relay/status"))["requests"] == {str(status): 1}


async def test_a_wrong_key_is_the_providers_401(start: Start) -> None:
    world = await start()
    for client, library in (
        (world.anthropic.with_options(api_key="wrong").messages, anthropic),
        (world.openai.with_options(api_key="wrong").chat.completions, openai),
    ):
        with pytest.raises(library.AuthenticationError, match="invalid key"):
            await client.create(model="m", max_tokens=1, messages=ASKED)


@EACH
async def test_a_stream_that_breaks_is_an_error_and_no_end(start: Start, client: str) -> None:
    world = await start(repack_cold=True)
    stream = await ask(world, client, "break", stream=True)
    with pytest.raises(Exception, match=r"(?i)incomplete|peer|connection"):
        async for _ in stream:
            pass
    assert (await world.get("/relay/status"))["broken"] == {"answer": 1}


@EACH
async def test_a_slow_stream_brings_each_event_as_it_comes(start: Start, client: str) -> None:
    world = await start(repack_cold=True)
    events = aiter(await ask(world, client, "slow", stream=True))
    await anext(events)
    assert not world.provider.gate.is_set()
    world.provider.gate.set()
    assert "".join([delta_of(event) async for event in events]).endswith("provider")


@EACH
async def test_a_client_that_leaves_a_stream_ends_it_at_the_provider(start: Start, client: str) -> None:
    world = await start(repack_cold=True)
    stream = await ask(world, client, "slow", stream=True)
    await anext(aiter(stream))
    await stream.close()
    await asyncio.wait_for(world.provider.left.wait(), 20)


@EACH
async def test_a_client_that_leaves_before_the_answer_ends_its_request(start: Start, client: str) -> None:
    world = await start(repack_cold=True)
    asking = asyncio.create_task(ask(world, client, "late"))
    await world.provider.waiting.wait()
    asking.cancel()
    await asyncio.wait_for(world.provider.left.wait(), 20)


@EACH
async def test_a_provider_that_hangs_up_is_a_502_that_says_so(start: Start, client: str) -> None:
    world = await start(repack_cold=True)
    with pytest.raises((anthropic.APIStatusError, openai.APIStatusError), match="gave no answer") as caught:
        await ask(world, client, "hang up")
    assert caught.value.status_code == 502


@EACH
async def test_a_provider_that_is_not_there_is_a_502_that_says_where(start: Start, client: str) -> None:
    world = await start(upstream="http://127.0.0.1:9", repack_cold=True)
    with pytest.raises((anthropic.APIStatusError, openai.APIStatusError), match=r"127\.0\.0\.1:9") as caught:
        await ask(world, client)
    assert caught.value.status_code == 502


async def test_fifty_chats_at_once(start: Start) -> None:
    world = await start(repack_cold=True)
    clients = ["anthropic", "openai"] * 25
    streams = await asyncio.gather(*(ask(world, client, stream=True) for client in clients))

    async def heard(stream: object) -> str:
        return "".join([delta_of(event) async for event in stream])

    assert await asyncio.gather(*map(heard, streams)) == [TEXT] * 50


async def test_a_long_chat_is_repacked_after_a_pause_and_the_client_notices_nothing(start: Start) -> None:
    world = await start(repack_cold=True)

    async def turn(turns: int) -> anthropic.types.Usage:
        answer = await world.anthropic.messages.create(
            model="claude-x", max_tokens=10, messages=chat(turns), system="Be brief. " * 400
        )
        assert text_of(answer) == TEXT
        return answer.usage

    first = await turn(20)
    world.machine.true += 20
    warm = await turn(21)
    assert warm.cache_read_input_tokens == first.cache_creation_input_tokens
    world.machine.true += 601
    cold = await turn(22)
    assert cold.cache_read_input_tokens == 0
    assert cold.cache_creation_input_tokens < 0.85 * warm.cache_read_input_tokens
    world.machine.true += 20
    after = await turn(23)
    assert after.cache_read_input_tokens == cold.cache_creation_input_tokens
    status = await world.get("/relay/status")
    assert status["decisions"] == {"pass": 2, "cold": 1, "sticky": 1}
    assert status["turns"] == {"cold start": 1, "warm reuse": 2, "ttl lapse": 1}
    assert status["latched"] == 1
