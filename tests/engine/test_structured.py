"""Structured output of random models, through the whole engine: every answer is what was asked for."""

import asyncio
import json

import jsonschema
import pytest

from regrow.actors.engine import Engine
from regrow.actors.events import Finished, Token
from regrow.config import EngineSettings
from regrow.models.answer_reader import AnswerReader, parts_of
from regrow.models.tool_formats import call_reader
from regrow.policy.request import CallAnswer, GenerateRequest, JsonAnswer, SamplingParams
from tests.models.schemas import SCHEMAS, closed

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": closed(
                {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}}
            ),
        },
    }
    for name in ("count", "set")
]


async def said(engine: Engine, request: GenerateRequest) -> str:
    text = ""
    async for event in await engine.submit(request):
        if isinstance(event, Token | Finished):
            text += event.text
    assert isinstance(event, Finished)
    assert event.reason == "stop", text
    return text


@pytest.mark.parametrize("model", ["random:qwen3_5", "random:lfm2", "random:llama"])
async def test_every_answer_of_a_random_model_is_what_its_schema_allows(model: str) -> None:
    async with Engine.open(
        EngineSettings(model=model, parallel=4, context=2048, threads=1, queue=100)
    ) as engine:
        requests = [
            GenerateRequest(
                messages=[{"role": "user", "content": f"Give me: {name}"}],
                answer=JsonAnswer(schema),
                sampling=SamplingParams(temperature=1.5, seed=i),
                max_tokens=1500,
            )
            for i, (name, schema) in enumerate(SCHEMAS.items())
        ]
        texts = await asyncio.gather(*(said(engine, request) for request in requests))
        for text, schema, request in zip(texts, SCHEMAS.values(), requests, strict=True):
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
            assert await engine.conforms(request.answer, text)


async def test_forced_calls_beside_free_text_leave_it_alone() -> None:
    async with Engine.open(
        EngineSettings(model="random:qwen3_5", parallel=3, context=2048, threads=1, exact="full")
    ) as engine:
        free = GenerateRequest(messages=[{"role": "user", "content": "Say something."}], max_tokens=80)
        alone = await said_until(engine, free)
        forced = [
            GenerateRequest(
                messages=[{"role": "user", "content": f"Call {i}."}],
                tools=TOOLS,
                answer=CallAnswer(names, parallel=False),
                sampling=SamplingParams(temperature=1.0, seed=i),
            )
            for i, names in enumerate([("count", "set"), ("set",)])
        ]
        beside, *calls = await asyncio.gather(
            said_until(engine, free), *(said(engine, request) for request in forced)
        )
        assert beside == alone
        for text, names in zip(calls, [("count", "set"), ("set",)], strict=True):
            reader = AnswerReader(None, False, call_reader(engine.info.tool_format, TOOLS))
            (call,) = parts_of([*reader.feed(text), *reader.finish()]).calls
            assert call.name in names
            jsonschema.validate(json.loads(call.arguments), TOOLS[0]["function"]["parameters"])


async def said_until(engine: Engine, request: GenerateRequest) -> list[int]:
    return [event.id async for event in await engine.submit(request) if isinstance(event, Token)]
