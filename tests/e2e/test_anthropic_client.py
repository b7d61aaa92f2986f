"""The official Anthropic client against the real server."""

import json
from collections.abc import AsyncIterator

import anthropic
import jsonschema
import pytest
import pytest_asyncio

from tests.e2e.server import Client, Server
from tests.models.schemas import closed

STAMP = "x-anthropic-billing-header: cc_version=2.1.100.{0}; cc_entrypoint=cli; cch={0};"
SCHEMA = closed({"n": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}})
TOOLS = [{"name": name, "description": "Looks it up.", "input_schema": SCHEMA} for name in ("look", "count")]
MESSAGES = [{"role": "user", "content": "Well?"}]


@pytest_asyncio.fixture
async def claude(hybrid: Server) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=hybrid.url, api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def client(hybrid: Server) -> AsyncIterator[Client]:
    async with hybrid.client() as client:
        yield client


def request(hybrid: Server, messages=MESSAGES, **fields):
    return {
        "model": hybrid.model,
        "max_tokens": 40,
        "system": "The other official client speaks here. " * 12,
        "messages": messages,
        "extra_body": {"temperature": 0},
        **fields,
    }


async def test_a_stream_adds_up_to_the_whole_message_and_the_usage_to_the_prompt(
    claude: anthropic.AsyncAnthropic, hybrid: Server
) -> None:
    asked = request(hybrid)
    whole = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    counted = await claude.messages.count_tokens(
        **{key: value for key, value in asked.items() if key not in ("max_tokens", "extra_body")}
    )
    for message in (whole, final):
        usage = message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
        assert (message.stop_reason, usage.output_tokens) == ("max_tokens", 40)
    assert final.usage.cache_read_input_tokens > whole.usage.cache_read_input_tokens


async def test_a_stop_sequence_is_named(claude: anthropic.AsyncAnthropic, hybrid: Server) -> None:
    text = (await claude.messages.create(**request(hybrid))).content[0].text
    stop = text[6:11]
    message = await claude.messages.create(**request(hybrid, stop_sequences=["never said", stop]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


async def test_a_tool_round_trip(claude: anthropic.AsyncAnthropic, hybrid: Server) -> None:
    sampled = {"tools": TOOLS, "max_tokens": 400, "extra_body": {"temperature": 1.0, "seed": 3}}
    any_tool = {"type": "any", "disable_parallel_tool_use": True}
    async with claude.messages.stream(**request(hybrid, **sampled, tool_choice=any_tool)) as stream:
        final = await stream.get_final_message()
    (call,) = final.content
    assert final.stop_reason == "tool_use"
    jsonschema.validate(call.input, SCHEMA)
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "It is 42."}],
    }
    history = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump() for block in final.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    later = await claude.messages.create(**request(hybrid, history, tools=TOOLS))
    assert later.content[0].text
    assert later.usage.cache_read_input_tokens > 0
    named = {"type": "tool", "name": "count"}
    again = await claude.messages.create(**request(hybrid, history, **sampled, tool_choice=named))
    assert [block.name for block in again.content] == ["count"]


async def test_structured_output(claude: anthropic.AsyncAnthropic, hybrid: Server) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = await claude.messages.create(
        **request(hybrid, max_tokens=400, extra_body={"output_config": form, "temperature": 1.0, "seed": 1})
    )
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)


async def test_requests_with_stamps_of_their_own_share_their_root(
    claude: anthropic.AsyncAnthropic, hybrid: Server
) -> None:
    def stamped(stamp: str, question: str):
        system = [
            {"type": "text", "text": STAMP.format(stamp)},
            {
                "type": "text",
                "text": "You are a stamped agent. " * 20,
                "cache_control": {"type": "ephemeral"},
            },
        ]
        return request(hybrid, [{"role": "user", "content": question}], system=system, max_tokens=4)

    first = await claude.messages.create(**stamped("eb6c6", "What is the first thing?"))
    second = await claude.messages.create(**stamped("0aaa9", "And another one, please?"))
    assert first.usage.cache_read_input_tokens == 0
    assert second.usage.cache_read_input_tokens >= 20 * len("You are a stamped agent. ")
    assert second.usage.input_tokens < 60


async def test_errors_are_the_clients_own(claude: anthropic.AsyncAnthropic, hybrid: Server) -> None:
    image = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]
    with pytest.raises(anthropic.BadRequestError, match="no vision"):
        await claude.messages.create(**request(hybrid, [{"role": "user", "content": image}]))
    with pytest.raises(anthropic.BadRequestError, match="exceed context limit"):
        await claude.messages.create(**request(hybrid, max_tokens=10**6, timeout=60))
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**request(hybrid, model="claude"))


async def test_a_client_that_leaves_a_stream_ends_its_request(
    claude: anthropic.AsyncAnthropic, client: Client, hybrid: Server
) -> None:
    async with claude.messages.stream(
        **request(hybrid, max_tokens=8000, extra_body={"temperature": 1.0, "logit_bias": {}})
    ) as stream:
        async for _ in stream.text_stream:
            break
    await client.until(lambda status: all(slot["phase"] == "idle" for slot in status["slots"]))
