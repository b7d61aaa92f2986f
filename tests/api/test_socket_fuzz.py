"""Whatever is said on a socket, the connection lives, and the next request is answered."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from regrow.api.app import make_app, make_runner
from regrow.config import ServerSettings
from tests.api.conftest import chat_body
from tests.api.from_schema import ANY, RAW, TEXTS
from tests.api.stub import StubEngine
from tests.api.test_fuzz import few

BOUND_S = 30
GOOD: dict[str, Any] = {
    "/v1/stream": {"type": "create", "id": "good", "request": chat_body()},
    "/v1/responses": {
        "type": "response.create",
        "model": "stub",
        "input": "Hello there",
        "stream_id": "good",
    },
}
LAST = {"/v1/stream": "done", "/v1/responses": "response.completed"}
TYPES = ["create", "cancel", "ping", "auth", "response.create", "response.steer", "dance"]
FIELDS = [
    *("id", "key", "request", "model", "input", "stream_id", "previous_response_id", "tools", "tool_choice"),
    *("text", "include", "regrow", "max_output_tokens", "generate", "background", "store", "instructions"),
]
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "x"]),
        "role": st.sampled_from(["user", "assistant", "system", "x"]),
        **dict.fromkeys(("content", "call_id", "output", "name", "arguments"), TEXTS | ANY),
    },
)
MESSAGES = st.one_of(
    RAW,
    st.tuples(
        st.fixed_dictionaries({"type": st.sampled_from(TYPES)}),
        st.dictionaries(st.sampled_from(FIELDS), ANY | TEXTS | st.lists(ITEMS, max_size=4), max_size=5),
    ).map(lambda parts: json.dumps({**parts[1], **parts[0]}).encode()),
)


@dataclass
class Talker:
    """A server, and one connection to each of its sockets."""

    runner: asyncio.Runner
    sockets: dict[str, aiohttp.ClientWebSocketResponse]

    def say(self, path: str, data: bytes, binary: bool) -> None:
        """Say something, then something right, and wait for the answer to that."""

        async def say() -> None:
            ws = self.sockets[path]
            if binary:
                await ws.send_bytes(data)
            else:
                await ws.send_str(data.decode(errors="replace"))
            await ws.send_json(GOOD[path])
            async with asyncio.timeout(BOUND_S):
                while True:
                    event = await ws.receive_json()
                    if "good" in (event.get("id"), event.get("stream_id")):
                        assert event["type"] != "error", event
                        if event["type"] == LAST[path]:
                            return

        self.runner.run(say())


@pytest.fixture(scope="module")
def talker() -> Iterator[Talker]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def serve() -> Talker:
            served = make_runner(make_app(StubEngine(), ServerSettings()))
            await served.setup()
            stack.push_async_callback(served.cleanup)
            await web.TCPSite(served, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{served.addresses[0][1]}"
            http = await stack.enter_async_context(aiohttp.ClientSession(url))
            return Talker(runner, {path: await http.ws_connect(path) for path in GOOD})

        yield runner.run(serve())
        runner.run(stack.aclose())


@pytest.mark.parametrize("path", GOOD)
def test_whatever_is_said_the_next_request_is_answered(talker: Talker, path: str) -> None:
    @few(300)
    @given(MESSAGES, st.booleans())
    def said(data: bytes, binary: bool) -> None:
        talker.say(path, data, binary)

    said()
