"""The official OpenAI client against the real server: what it sends is understood, what it gets adds up."""

import json
from collections.abc import AsyncIterator

import jsonschema
import openai
import pytest
import pytest_asyncio

from regrow.models.byte_tokenizer import IM_END
from tests.e2e.server import Client, Server
from tests.models.schemas import SCHEMAS, closed

SYSTEM = {"role": "system", "content": "The official client speaks here. " * 12}
MESSAGES = [SYSTEM, {"role": "user", "content": "Well?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks something up.",
            "parameters": closed(
                {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}}
            ),
        },
    }
    for name in ("look", "count")
]
PARAMETERS = TOOLS[0]["function"]["parameters"]


@pytest_asyncio.fixture
async def client(hybrid: Server) -> AsyncIterator[Client]:
    async with hybrid.client() as client:
        yield client


async def chat(client: Client, hybrid: Server, messages=MESSAGES, **fields):
    fields = {"temperature": 0, "max_tokens": 40, **fields}
    return await client.openai.chat.completions.create(model=hybrid.model, messages=messages, **fields)


async def test_a_stream_adds_up_to_the_whole_answer(client: Client, hybrid: Server) -> None:
    whole = await chat(client, hybrid)
    stream = await chat(client, hybrid, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_a_stop_string_ends_an_answer_wherever_tokens_end(client: Client, hybrid: Server) -> None:
    text = (await chat(client, hybrid)).choices[0].message.content
    for start in (4, 9, 17):
        stop = text[start : start + 5]
        answer = await chat(client, hybrid, stop=[stop, "never said"])
        assert answer.choices[0].message.content == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


async def test_an_answer_that_says_one_token_for_ever_is_ended(client: Client, hybrid: Server) -> None:
    answer = await chat(client, hybrid, logit_bias={str(ord("a")): 100}, max_tokens=1000)
    assert answer.choices[0].message.content == "a" * 256
    assert answer.choices[0].finish_reason == "length"


async def test_several_answers_read_their_prompt_once_and_have_logprobs_of_their_own(
    client: Client, hybrid: Server
) -> None:
    messages = [{"role": "system", "content": "Several answers. " * 20}, *MESSAGES[1:]]
    before = (await client.status())["device"]["counters"]["read_tokens"]
    answer = await chat(client, hybrid, messages, n=4, temperature=1.0, seed=5, logprobs=True, top_logprobs=2)
    read = (await client.status())["device"]["counters"]["read_tokens"] - before
    assert read == answer.usage.prompt_tokens - 1 - answer.usage.prompt_tokens_details.cached_tokens
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        tokens = choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)
        said = b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace")
        assert said.startswith(choice.message.content[:10])
    assert answer.usage.completion_tokens == sum(len(c.logprobs.content) for c in answer.choices)


@pytest.mark.parametrize("name", ["event", "choice of records", "recursion"])
async def test_structured_output_parses_streamed_and_not(client: Client, hybrid: Server, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMAS[name]}}
    fields = {"response_format": form, "temperature": 1.0, "seed": 1, "max_tokens": 2000}
    whole = (await chat(client, hybrid, **fields)).choices[0]
    jsonschema.validate(json.loads(whole.message.content), SCHEMAS[name])
    assert whole.finish_reason == "stop"
    stream = await chat(client, hybrid, **fields, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.message.content


async def test_any_object_can_be_asked_for(client: Client, hybrid: Server) -> None:
    bias = {str(ord("}")): 30}  # else it would be a long one
    answer = await chat(
        client, hybrid, response_format={"type": "json_object"}, logit_bias=bias, max_tokens=900
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


async def test_a_tool_round_trip(client: Client, hybrid: Server) -> None:
    fields = {"tools": TOOLS, "temperature": 1.0, "seed": 3, "max_tokens": 400}
    answer = await chat(client, hybrid, **fields, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is 42."}
    history = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True), result]
    later = await chat(client, hybrid, history, tools=TOOLS)
    assert later.choices[0].message.content
    assert later.model_extra["regrow"]["reused"] > 0
    named = {"type": "function", "function": {"name": "count"}}
    async with client.openai.chat.completions.stream(
        model=hybrid.model, messages=history, tool_choice=named, **fields
    ) as stream:
        final = await stream.get_final_completion()
    (again,) = final.choices[0].message.tool_calls
    assert again.function.name == "count"
    jsonschema.validate(json.loads(again.function.arguments), PARAMETERS)


async def test_parallel_calls_are_told_apart_and_one_that_is_cut_off_is_none(
    client: Client, hybrid: Server
) -> None:
    endless = {str(IM_END): -100}
    answer = await chat(
        client,
        hybrid,
        tools=TOOLS,
        tool_choice="required",
        temperature=1.0,
        seed=1,
        logit_bias=endless,
        max_tokens=500,
    )
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "length"
    assert len({call.id for call in calls}) == len(calls) > 1
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


async def test_what_cannot_be_served_is_an_error_that_names_the_field(client: Client, hybrid: Server) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
    for fields, param in (
        ({"response_format": bad}, "response_format.json_schema.schema"),
        ({"tools": [strict], "tool_choice": "required"}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"max_tokens": 10**6}, "messages"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(client, hybrid, **fields)
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError):
        await client.openai.chat.completions.create(model="gpt", messages=MESSAGES)


async def test_a_client_that_runs_out_of_time_leaves_nothing_behind(client: Client, hybrid: Server) -> None:
    endless = {"ignore_eos": True}
    with pytest.raises(openai.APITimeoutError):
        await chat(client, hybrid, max_tokens=8000, timeout=0.5, extra_body=endless)
    await client.until(lambda status: all(slot["phase"] == "idle" for slot in status["slots"]))
    assert (await chat(client, hybrid)).choices[0].message.content


async def test_a_client_that_leaves_a_structured_answer_leaves_nothing_behind(
    client: Client, hybrid: Server
) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "string", "minLength": 9000}},
    }
    stream = await chat(client, hybrid, response_format=form, stream=True, max_tokens=9000)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await client.until(lambda status: all(slot["phase"] == "idle" for slot in status["slots"]))
    assert (await chat(client, hybrid)).choices[0].message.content


@pytest.mark.demo
async def test_the_demo_fills_in_a_form(demo: Server) -> None:
    schema = closed({"city": {"type": "string", "maxLength": 30}, "capital": {"type": "boolean"}})
    async with demo.client() as client:
        answer = await client.openai.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What is the capital of France? Answer as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            temperature=0,
            max_tokens=100,
        )
    told = json.loads(answer.choices[0].message.content)
    jsonschema.validate(told, schema)
