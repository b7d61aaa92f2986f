"""Chats whose answers are more than text: reasoning, calls of tools, a form, several at once."""

import asyncio
import json

import pytest

from regrow.actors.events import Token
from regrow.models.answer_reader import ThinkingTags
from tests.api.conftest import Start, chat_body
from tests.api.stub import QUEUED, READ, Hold, StubEngine, StubModel, finished

THINK = ThinkingTags("<think>", "</think>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "look")
]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)
MESSAGES = [{"role": "user", "content": "Hello there"}]


def saying(text: str, reason: str = "stop", info: StubModel | None = None, size: int = 3) -> StubEngine:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    tokens = [Token(1.0 + i, i, piece) for i, piece in enumerate(pieces)]
    return StubEngine([QUEUED, READ, *tokens, finished(reason, "")], info)


async def test_calls_are_told_apart_from_what_is_said(start: Start) -> None:
    served = await start(saying(CALLS))
    answer = await served.openai.chat.completions.create(model="stub", messages=MESSAGES, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("function", "weather", {"city": "Paris"}),
        ("function", "look", {}),
    ]
    assert len({call.id for call in message.tool_calls}) == 2


async def test_a_streamed_call_is_named_then_argued_as_the_official_client_adds_it_up(start: Start) -> None:
    served = await start(saying(CALLS))
    async with served.openai.chat.completions.stream(model="stub", messages=MESSAGES, tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        ("weather", '{"city": "Paris"}'),
        ("look", "{}"),
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert kinds.count("tool_calls.function.arguments.done") == 2


async def test_the_first_chunk_of_a_call_has_its_id_and_name_and_later_ones_only_arguments(
    start: Start,
) -> None:
    served = await start(saying(CALLS))
    stream = await served.openai.chat.completions.create(
        model="stub", messages=MESSAGES, tools=TOOLS, stream=True
    )
    deltas = [c.choices[0].delta.tool_calls[0] async for c in stream if c.choices[0].delta.tool_calls]
    named = [delta for delta in deltas if delta.function.name]
    assert [(d.index, d.function.name, d.function.arguments) for d in named] == [
        (0, "weather", ""),
        (1, "look", ""),
    ]
    assert all(delta.id and delta.type == "function" for delta in named)
    assert all(delta.id is None for delta in deltas if delta not in named)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_output_ended_inside_is_not_reported_as_one(start: Start, stream: bool) -> None:
    served = await start(saying(CALLS[:-30], "length"))
    if stream:
        chunks = await served.openai.chat.completions.create(
            model="stub", messages=MESSAGES, tools=TOOLS, stream=True
        )
        reasons = [c.choices[0].finish_reason async for c in chunks]
        assert reasons[-1] == "length"
    else:
        answer = await served.openai.chat.completions.create(model="stub", messages=MESSAGES, tools=TOOLS)
        assert answer.choices[0].finish_reason == "length"
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]


async def test_without_tools_or_with_none_allowed_calls_are_text(start: Start) -> None:
    served = await start(saying(CALLS))
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        _, answer = await served.post(chat_body(**fields))
        assert answer["choices"][0]["message"]["content"] == CALLS
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_where_one_call_is_allowed_the_answer_ends_after_it(start: Start) -> None:
    engine = saying(CALLS)
    served = await start(engine)
    _, answer = await served.post(chat_body(tools=TOOLS, parallel_tool_calls=False))
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert engine.runs[0].cancelled.is_set()


@pytest.mark.parametrize(
    ("text", "thinks"), [("<think>\nHm, so.\n</think>\n\nYes.", False), ("Hm, so.\n</think>\n\nYes.", True)]
)
async def test_reasoning_is_told_apart(start: Start, text: str, thinks: bool) -> None:
    engine = saying(text, info=StubModel(thinking=THINK))
    engine.thinks = thinks
    served = await start(engine)
    _, answer = await served.post(chat_body())
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, so.", "Yes.")
    stream = await served.openai.chat.completions.create(model="stub", messages=MESSAGES, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm, so."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_another_form_than_was_asked_for_is_an_error(start: Start, stream: bool) -> None:
    engine = saying('{"a": 1}')
    served = await start(engine)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    body = chat_body(response_format=form, stream=stream)
    async with served.http.post("/v1/chat/completions", json=body) as response:
        assert (response.status, "error" in await response.text()) == (200, False)
    engine.conforming = False
    async with served.http.post("/v1/chat/completions", json=body) as response:
        assert "has not the form" in await response.text()
        assert response.status == (200 if stream else 500)
    async with served.http.post("/v1/chat/completions", json={**body, "stop": "}"}) as response:
        assert "has not the form" not in await response.text()


async def test_several_answers_are_each_told_and_their_prompt_is_counted_once(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    answer = await served.openai.chat.completions.create(model="stub", messages=MESSAGES, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (100, 9)
    assert answer.usage.prompt_tokens_details.cached_tokens == 64
    assert all(choice.model_extra["regrow"]["read"] == 36 for choice in answer.choices)
    _, text = await served.post({"model": "stub", "prompt": ["a", "b"], "n": 2}, "/v1/completions")
    assert [choice["index"] for choice in text["choices"]] == [0, 1, 2, 3]
    assert text["usage"] == {
        "prompt_tokens": 200,
        "completion_tokens": 12,
        "total_tokens": 212,
        "prompt_tokens_details": {"cached_tokens": 128},
    }


async def test_several_streamed_answers_are_told_by_their_index(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    stream = await served.openai.chat.completions.create(
        model="stub", messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons = ["", ""], ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or ""
    assert texts == ["Grüße dir!"] * 2
    assert reasons == ["stop", "stop"]
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (100, 6)


async def test_a_client_that_leaves_ends_all_of_several_answers(start: Start) -> None:
    engine = StubEngine([QUEUED, Hold()])
    served = await start(engine)
    asking = asyncio.create_task(served.post(chat_body(n=3)))
    runs = [await asyncio.wait_for(engine.started.get(), 10) for _ in range(3)]
    asking.cancel()
    for run in runs:
        await asyncio.wait_for(run.cancelled.wait(), 10)
