"""/v1/stream with a scripted engine: the messages, many requests at once, and clients that behave badly."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from regrow.actors.events import Logprob, Token
from regrow.errors import DeviceFailed, Draining
from regrow.models.answer_reader import ThinkingTags
from tests.api.conftest import Served, Start, chat_body
from tests.api.stub import QUEUED, READ, TEXT, TOKENS, Hold, Script, StubEngine, StubModel, failed, finished

IN_TIME = 20.0


@dataclass
class Client:
    """One connection; `heard` are all messages so far."""

    ws: aiohttp.ClientWebSocketResponse
    heard: list[dict[str, Any]] = field(default_factory=list)

    async def say(self, **message: object) -> None:
        await self.ws.send_json(message)

    async def ask(self, name: str, **fields: object) -> None:
        await self.say(type="create", id=name, request=chat_body(**fields))

    async def next(self) -> dict[str, Any]:
        message = await self.ws.receive_json(timeout=IN_TIME)
        self.heard.append(message)
        return message

    async def until(self, kind: str, name: str | None = None) -> dict[str, Any]:
        """Hear messages up to one of this kind (of this request)."""
        while True:
            message = await self.next()
            if message["type"] == kind and (name is None or message.get("id") == name):
                return message

    async def closed(self) -> int | None:
        """Hear all there is; returns the code that the connection is closed with."""
        while True:
            message = await self.ws.receive(timeout=IN_TIME)
            if message.type is not aiohttp.WSMsgType.TEXT:
                return self.ws.close_code
            self.heard.append(json.loads(message.data))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [message for message in self.heard if message.get("id") == name]


@asynccontextmanager
async def connected(served: Served, **options: Any) -> AsyncIterator[Client]:
    async with served.http.ws_connect("/v1/stream", **options) as ws:
        yield Client(ws)


def said(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(message.get("content", "") for message in messages)


async def test_a_chat_is_told_from_the_queue_to_its_end_in_order(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    async with connected(served) as client:
        await client.ask("a")
        done = await client.until("done")
    kinds = [message["type"] for message in client.heard]
    assert kinds == ["queued", "placed", "mounted", "progress", "read", *["delta"] * 3, "done"]
    assert [message["seq"] for message in client.heard] == list(range(len(kinds)))
    assert {message["id"] for message in client.heard} == {"a"}
    assert said(client.heard) == TEXT
    placed, progress = client.heard[1], client.heard[3]
    assert (placed["source"], placed["reused"], placed["total"]) == ("checkpoint", 64, 100)
    assert (progress["position"], progress["total"]) == (80, 100)
    assert done["finish_reason"] == "stop"
    assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert done["regrow"]["why"].startswith("the system prompt changed")


async def test_reasoning_and_calls_of_tools_are_told_apart_from_what_is_said(start: Start) -> None:
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "run", "arguments": {"a": 1}}\n</tool_call>'
    engine = StubEngine([QUEUED, READ, Token(1.0, 1, text), finished(text="")])
    engine.info = StubModel(thinking=ThinkingTags("<think>", "</think>"))
    served = await start(engine)
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    async with connected(served) as client:
        await client.ask("a", tools=tools)
        done = await client.until("done")
    assert "".join(message.get("reasoning", "") for message in client.heard).strip() == "hm"
    calls = [message["tool_call"] for message in client.heard if "tool_call" in message]
    assert calls[0]["name"] == "run"
    assert calls[0]["id"].startswith("call_")
    assert json.loads("".join(call["arguments"] for call in calls)) == {"a": 1}
    assert done["finish_reason"] == "tool_calls"


async def test_log_probabilities_are_told_where_they_are_asked_for(start: Start) -> None:
    engine = StubEngine([QUEUED, READ, Token(1.0, 1, "Hi", Logprob(1, b"Hi", -0.5)), finished(text="")])
    served = await start(engine)
    async with connected(served) as client:
        await client.ask("a", logprobs=True)
        await client.until("done")
    told = [message["logprobs"]["content"] for message in client.heard if "logprobs" in message]
    assert [(entry["token"], entry["logprob"]) for (entry,) in told] == [("Hi", -0.5)]


async def test_fifty_requests_share_a_connection_and_each_gets_its_own_answer(start: Start) -> None:
    hold = Hold()
    names = [f"client {number}" for number in range(50)]
    scripts: dict[str, Script] = {
        name: [QUEUED, READ, hold, Token(1.0, 1, f"I am {name}"), finished(text="")] for name in names
    }
    served = await start(StubEngine(scripts))
    async with connected(served) as client:
        for name in names:
            await client.ask(name, messages=[{"role": "user", "content": name}])
        for _ in names:
            await client.until("read")
        hold.gate.set()
        for _ in names:
            await client.until("done")
    for name in names:
        assert said(client.of(name)) == f"I am {name}"
        assert [message["seq"] for message in client.of(name)] == list(range(4))


async def test_a_cancelled_request_ends_with_done_and_the_others_go_on(start: Start) -> None:
    hold = Hold()
    engine = StubEngine([QUEUED, READ, TOKENS[0], hold, *TOKENS[1:], finished()])
    served = await start(engine)
    async with connected(served) as client:
        await client.ask("a")
        await client.until("delta", "a")
        await client.ask("b")
        await client.until("delta", "b")
        await client.say(type="cancel", id="a")
        done = await client.until("done", "a")
        assert done["finish_reason"] == "cancelled"
        assert done["usage"]["prompt_tokens"] == 100
        await client.say(type="cancel", id="a")  # the messages have crossed
        hold.gate.set()
        await client.until("done", "b")
    assert said(client.of("b")) == TEXT


async def test_a_request_can_be_cancelled_before_the_engine_has_taken_it(start: Start) -> None:
    engine = StubEngine([QUEUED, Hold()])
    engine.submit_gate.clear()
    served = await start(engine)
    async with connected(served) as client:
        await client.ask("a")
        await engine.submitting.wait()
        await client.say(type="cancel", id="a")
        await client.say(type="ping")
        await client.until("pong")
        engine.submit_gate.set()
        assert (await client.until("done", "a"))["finish_reason"] == "cancelled"


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("{", None, "invalid_json"),
        ('{"type": "dance"}', "type", "invalid_value"),
        ('{"type": "create", "request": {}}', "id", "missing_required_parameter"),
        (json.dumps({"type": "create", "id": "x" * 257, "request": {}}), "id", "invalid_value"),
        ('{"type": "create", "id": 5, "request": {}}', "id", "invalid_value"),
        ("[1]", None, "invalid_value"),
    ],
)
async def test_what_cannot_be_understood_is_an_error_and_no_end(
    start: Start, engine: StubEngine, message: str, param: str | None, code: str
) -> None:
    served = await start(engine)
    async with connected(served) as client:
        await client.ws.send_str(message)
        error = await client.next()
        assert error["type"] == "error"
        assert (error["error"]["param"], error["error"]["code"]) == (param, code)
        await client.ask("a")
        await client.until("done")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"model": "another"}, "model"),
        ({"n": 2}, "n"),
    ],
)
async def test_a_bad_request_is_an_error_of_its_own(
    start: Start, engine: StubEngine, fields: dict[str, Any], param: str
) -> None:
    served = await start(engine)
    async with connected(served) as client:
        await client.ask("bad", **fields)
        error = await client.until("error")
        assert (error["id"], error["seq"], error["error"]["param"]) == ("bad", 0, param)
        await client.ask("bad")
        await client.until("done", "bad")


async def test_an_id_is_one_requests_at_a_time_and_so_are_not_too_many(start: Start) -> None:
    served = await start(StubEngine([QUEUED, Hold()]))
    async with connected(served) as client:
        await client.ask("a")
        await client.ask("a")
        assert (await client.until("error"))["error"]["code"] == "id_in_use"
        for number in range(128):
            await client.ask(str(number))
        error = await client.until("error")
        assert (error["id"], error["error"]["code"]) == ("127", "overloaded")


async def test_an_error_in_an_answer_is_told_with_what_was_read(start: Start) -> None:
    served = await start(StubEngine([QUEUED, READ, TOKENS[0], failed(DeviceFailed("the device broke"))]))
    async with connected(served) as client:
        await client.ask("a")
        error = await client.until("error")
    assert error["error"]["code"] == "device_failed"
    assert error["usage"]["prompt_tokens"] == 100


async def test_an_unexpected_error_tells_nothing_of_the_inside(start: Start) -> None:
    served = await start(StubEngine([QUEUED, ValueError("a secret")]))
    async with connected(served) as client:
        await client.ask("a")
        error = await client.until("error")
    assert error["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(error)


async def test_while_the_server_drains_nothing_new_is_taken_and_what_runs_ends(start: Start) -> None:
    hold = Hold()
    engine = StubEngine([QUEUED, READ, hold, *TOKENS, finished()])
    served = await start(engine)
    async with connected(served) as client:
        await client.ask("a")
        await client.until("read")
        engine.refuse_with = Draining("the server is shutting down")
        await client.ask("b")
        assert (await client.until("error", "b"))["error"]["code"] == "draining"
        hold.gate.set()
        await client.until("done", "a")


async def test_a_client_that_leaves_ends_its_requests(start: Start) -> None:
    engine = StubEngine([QUEUED, Hold()])
    served = await start(engine)
    async with connected(served) as client:
        for name in ("a", "b"):
            await client.ask(name)
        runs = [await engine.started.get() for _ in range(2)]
    for run in runs:
        async with asyncio.timeout(IN_TIME):
            await run.cancelled.wait()


# Who may speak


async def test_the_key_is_shown_in_a_header_or_in_a_first_message(start: Start, engine: StubEngine) -> None:
    served = await start(engine, api_keys=("secret",))
    for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        async with connected(served, headers=headers) as client:
            await client.ask("a")
            await client.until("done")
    async with connected(served) as client:
        await client.say(type="auth", key="secret")
        assert await client.next() == {"type": "authorized"}
        await client.ask("a")
        await client.until("done")


@pytest.mark.parametrize(
    "first", ['{"type": "auth", "key": "wrong"}', '{"type": "ping"}', "{", '{"type": "auth"}']
)
async def test_without_the_key_nothing_is_heard(start: Start, engine: StubEngine, first: str) -> None:
    served = await start(engine, api_keys=("secret",))
    async with connected(served) as client:
        await client.ws.send_str(first)
        await client.closed()
    assert [message["error"]["code"] for message in client.heard] == ["invalid_api_key"]
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        async with connected(served, headers={"x-api-key": "wrong"}):
            pass
    assert refused.value.status == 401
    assert engine.requests == []


async def test_pages_of_other_origins_cannot_connect(start: Start, engine: StubEngine) -> None:
    served = await start(engine, cors=("https://good.org",))
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        async with connected(served, origin="https://evil.org"):
            pass
    assert refused.value.status == 403
    for origin in (served.url, "https://good.org"):
        async with connected(served, origin=origin) as client:
            await client.say(type="ping")
            await client.until("pong")


async def test_a_plain_request_is_told_that_the_route_speaks_websocket(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    status, body = await served.get("/v1/stream")
    assert status == 426
    assert "WebSocket" in body["error"]["message"]


async def test_a_message_that_is_too_large_closes_the_connection(start: Start, engine: StubEngine) -> None:
    served = await start(engine, body_limit=2000)
    async with connected(served) as client:
        await client.ws.send_str(json.dumps({"type": "ping", "more": "x" * 3000}))
        assert await client.closed() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
