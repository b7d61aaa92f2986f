"""A loop of 20 tool calls in three ways: chat (the whole history every time), the Responses API over HTTP
(`previous_response_id` and what is new), and the same over one WebSocket.

Calls are forced, so that a model of random weights makes them too. Each way opens with words of its own, so
that it finds nothing of the others.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

import harness
from regrow import Engine, EngineSettings
from regrow.api.app import make_app, make_runner
from regrow.config import ServerSettings
from turns import prose

CALLS = 20
QUICK_CALLS = 6
OPENING, RESULT = 900, 120  # words
SCHEMA = {
    "type": "object",
    "properties": {"what": {"type": "string", "enum": ["lines", "tests"]}},
    "required": ["what"],
    "additionalProperties": False,
}
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of the prompt and those read; bytes that the client sent; seconds to the first piece."""

    prompt: int
    read: int
    sent: int
    first: float


@dataclass(slots=True)
class Loop:
    """One conversation over one connection."""

    http: aiohttp.ClientSession
    model: str
    rng: random.Random

    @property
    def limits(self) -> Body:
        return {"model": self.model, "temperature": 0, "stream": True}

    async def events(self, path: str, body: Body) -> AsyncIterator[Body]:
        async with self.http.post(path, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def result(self) -> str:
        return prose(self.rng, RESULT)


async def chat(loop: Loop, calls: int) -> list[Turn]:
    messages: list[Body] = [{"role": "user", "content": f"Chat. {prose(loop.rng, OPENING)}"}]
    function = {"name": "look", "parameters": SCHEMA}
    tools = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "max_completion_tokens": 200,
        "stream_options": {"include_usage": True},
    }
    turns = []
    for _ in range(calls):
        body = {**loop.limits, **tools, "messages": messages}
        begun, first, call, last = time.perf_counter(), 0.0, {"arguments": ""}, {}
        async for last in loop.events("/v1/chat/completions", body):
            for choice in last["choices"]:
                for delta in choice["delta"].get("tool_calls", ()):
                    first = first or time.perf_counter() - begun
                    call = {**call, **({"id": delta["id"], "name": "look"} if "id" in delta else {})}
                    call["arguments"] += delta["function"]["arguments"]
        facts = last["regrow"]
        turns.append(Turn(last["usage"]["prompt_tokens"], facts["read"], size(body), first))
        made = {"name": call["name"], "arguments": call["arguments"]}
        called = {"id": call["id"], "type": "function", "function": made}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call["id"], "content": loop.result()},
        ]
    return turns


async def over_http(loop: Loop, calls: int) -> list[Turn]:
    return await responses(loop, calls, "HTTP", lambda body: loop.events("/v1/responses", body))


async def over_socket(loop: Loop, calls: int) -> list[Turn]:
    async with loop.http.ws_connect("/v1/responses") as ws:

        async def events(body: Body) -> AsyncIterator[Body]:
            await ws.send_json({"type": "response.create", **body})
            while True:
                event = await ws.receive_json()
                yield event
                if event["type"] in ("response.completed", "response.incomplete", "error"):
                    return

        return await responses(loop, calls, "Socket", events)


async def responses(loop: Loop, calls: int, name: str, events: Any) -> list[Turn]:
    tools = {
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "look"},
        "max_output_tokens": 200,
    }
    news: Body = {"input": f"{name}. {prose(loop.rng, OPENING)}"}
    turns = []
    for _ in range(calls):
        body = {**loop.limits, **tools, **news}
        begun, first, last = time.perf_counter(), 0.0, {}
        async for last in events(body):
            if last["type"] == "response.output_item.added":
                first = first or time.perf_counter() - begun
        response = last["response"]
        turns.append(Turn(response["usage"]["input_tokens"], response["regrow"]["read"], size(body), first))
        call = next(item["call_id"] for item in response["output"] if item["type"] == "function_call")
        output = {"type": "function_call_output", "call_id": call, "output": loop.result()}
        news = {"input": [output], "previous_response_id": response["id"]}
    return turns


WAYS = {
    "chat, the whole history": chat,
    "responses over HTTP": over_http,
    "responses over a WebSocket": over_socket,
}


def size(body: Body) -> int:
    return len(json.dumps(body))


@asynccontextmanager
async def served(opts: harness.Options) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    settings = EngineSettings(model=opts.model, exact=opts.exact, parallel=2)  # type: ignore[arg-type]
    async with Engine.open(settings) as engine:
        runner = make_runner(make_app(engine, ServerSettings()))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
                yield http, engine.info.name
        finally:
            await runner.cleanup()


def row(way: str, turns: list[Turn]) -> Mapping[str, harness.Cell]:
    """Sum up all turns but the first, which has nothing to reuse."""
    new = [after.prompt - before.prompt for before, after in itertools.pairwise(turns)]
    later = turns[1:]
    return {
        "way": way,
        "calls": len(turns),
        "last prompt": turns[-1].prompt,
        "new": sum(new),
        "read": sum(turn.read for turn in later),
        "worst, read - new": max(turn.read - n for turn, n in zip(later, new, strict=True)),
        "KB sent": sum(turn.sent for turn in later) / 1000,
        "first piece ms": harness.median([turn.first for turn in later]) * 1e3,
    }


async def measured(opts: harness.Options) -> list[Mapping[str, harness.Cell]]:
    rows = []
    async with served(opts) as (http, model):
        for way, loop in WAYS.items():
            calls = QUICK_CALLS if opts.quick else CALLS
            rows.append(row(way, await loop(Loop(http, model, random.Random(opts.seed)), calls)))
    return rows


def main() -> None:
    opts = harness.options("live", __doc__ or "", model="random:qwen3_5")
    rows = asyncio.run(measured(opts))
    harness.report("live", opts, "A loop of tool calls, all turns but the first", rows)


if __name__ == "__main__":
    main()
