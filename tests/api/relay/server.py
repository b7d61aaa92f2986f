"""The fake provider on a socket: both APIs over the cache of `provider.py`, with the faults of real ones.

What it does for a request is told by `x-fault` in its headers, so that the official clients can ask for it.
"""

import asyncio
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from tests.api.relay.provider import Bill, Cache

KEY = "sk-the-secret-key"
STATUS = {"429": 429, "529": 529, "500": 500}
TEXT = "Hello from the provider"
CALL = {"city": "Bern"}


@dataclass
class Received:
    """One request as it came over the wire."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass
class FakeProvider:
    """`now`: the time its cache lives in. gate: slow streams and late answers wait for it; waiting and left
    say that one does, and that its client went away."""

    now: Callable[[], float]
    cache: Cache = field(default_factory=Cache)
    received: list[Received] = field(default_factory=list)
    bills: list[Bill] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    redirect: str = ""
    flowed: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = [(k.decode(), v.decode()) for k, v in request.raw_headers]
        self.received.append(Received(request.method, request.raw_path, headers, body))
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "")
        if self.redirect:
            return web.Response(status=307, headers={"Location": self.redirect})
        if request.path == "/flood":
            return await self._flood(request)
        if request.path == "/echo":
            return web.Response(body=body, status=203, headers={"X-Kind": "echo", "Set-Cookie": "a=1"})
        if not key.endswith(KEY):
            return web.json_response(_error("authentication_error", "invalid key"), status=401)
        fault = request.headers.get("x-fault", "")
        if fault in STATUS:
            told = {"retry-after": "7", "request-id": "req_1"}
            return web.json_response(_error("overloaded_error", "busy"), status=STATUS[fault], headers=told)
        if fault == "hang up":
            request.transport.close()
            return web.Response()
        if fault == "late":
            await self._wait()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        if fault == "silent":
            return web.json_response({})
        bill = self.cache.bill(body, self.now())
        self.bills.append(bill)
        asked = json.loads(body)
        anthropic = request.path.endswith("/messages")
        if asked.get("stream"):
            events = anthropic_events(bill) if anthropic else openai_events(bill)
            return await self._stream(request, events, fault)
        answer = json.dumps(
            (anthropic_answer if anthropic else openai_answer)(bill, bool(asked.get("tools")))
        )
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            packed = gzip.compress(answer.encode(), mtime=0)
            return web.Response(
                body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"}
            )
        return web.Response(text=answer, content_type="application/json")

    async def _stream(self, request: web.Request, events: list[bytes], fault: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if fault == "gzip":
            response.enable_compression(web.ContentCoding.gzip, strategy=0)
        await response.prepare(request)
        for number, event in enumerate(events):
            if number == 2 and fault == "break":
                request.transport.close()
                return response
            if number == 2 and fault == "slow":
                await self._wait()
            await response.write(event)
        return response

    async def _flood(self, request: web.Request) -> web.StreamResponse:
        """Send a gibibyte, as fast as it is taken."""
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while self.flowed < 1 << 30:
                await response.write(bytes(1 << 20))
                self.flowed += 1 << 20
        except (ConnectionResetError, asyncio.CancelledError):
            self.left.set()
            raise
        return response

    async def _wait(self) -> None:
        self.waiting.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise


def _error(kind: str, message: str) -> dict:
    return {"type": "error", "error": {"type": kind, "message": message}}


def anthropic_usage(bill: Bill) -> dict:
    return {
        "input_tokens": bill.fresh,
        "cache_read_input_tokens": bill.read,
        "cache_creation_input_tokens": bill.written_5m + bill.written_1h,
        "cache_creation": {
            "ephemeral_5m_input_tokens": bill.written_5m,
            "ephemeral_1h_input_tokens": bill.written_1h,
        },
        "output_tokens": 5,
    }


def anthropic_answer(bill: Bill, tools: bool) -> dict:
    content = [{"type": "text", "text": TEXT}]
    if tools:
        content.append({"type": "tool_use", "id": "toolu_1", "name": "weather", "input": CALL})
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": content,
        "stop_reason": "tool_use" if tools else "end_turn",
        "stop_sequence": None,
        "usage": anthropic_usage(bill),
    }


def anthropic_events(bill: Bill) -> list[bytes]:
    start = {**anthropic_answer(bill, False), "content": [], "stop_reason": None}
    start["usage"] = {**start["usage"], "output_tokens": 1}
    words = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
        for word in TEXT.replace(" ", "\0 ").split("\0")
    ]
    ending = {"stop_reason": "end_turn", "stop_sequence": None}
    events = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *words,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ending, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]


def openai_usage(bill: Bill) -> dict:
    return {
        "prompt_tokens": bill.tokens,
        "completion_tokens": 5,
        "total_tokens": bill.tokens + 5,
        "prompt_tokens_details": {"cached_tokens": bill.read},
    }


def openai_answer(bill: Bill, tools: bool) -> dict:
    message: dict = {"role": "assistant", "content": TEXT}
    if tools:
        function = {"name": "weather", "arguments": json.dumps(CALL)}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    return {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if tools else "stop"}],
        "usage": openai_usage(bill),
    }


def openai_events(bill: Bill) -> list[bytes]:
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in TEXT.replace(" ", "\0 ").split("\0")]
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices.append([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    chunks = [{**head, "choices": choice} for choice in choices]
    chunks.append({**head, "choices": [], "usage": openai_usage(bill)})
    return [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + [b"data: [DONE]\n\n"]
