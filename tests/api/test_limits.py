"""What a client may cost: time until a request is there, its size, and the time it takes to decode."""

import asyncio
import threading
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from regrow.api.body import LARGE, VALUES, decode, read_body
from regrow.api.schema import ChatRequest
from regrow.api.state import SETTINGS
from regrow.config import ServerSettings
from regrow.errors import BadRequest
from tests.api.conftest import Served, Start, chat_body
from tests.api.stub import StubEngine

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BOUND_S = 30  # far beyond any wait that is meant


async def said_to(served: Served, *sent: bytes) -> bytes:
    """Send some bytes on a connection of its own and return all that comes back until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(served.url).port)
    for piece in sent:
        writer.write(piece)
    said = await asyncio.wait_for(reader.read(), BOUND_S)
    writer.close()
    return said


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat", HEAD])
async def test_a_head_that_never_ends_is_not_waited_for(
    start: Start, engine: StubEngine, begun: bytes
) -> None:
    assert await said_to(await start(engine, idle_s=0.05), begun) == b""


@pytest.mark.parametrize(
    "body",
    [b"Content-Length: 500\r\n\r\n", b"Content-Length: 500\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n"],
)
async def test_a_body_that_never_ends_is_a_408_and_the_server_serves_on(
    start: Start, engine: StubEngine, body: bytes
) -> None:
    served = await start(engine, body_s=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(served.url).port)
    writer.write(HEAD + body)
    said = await asyncio.wait_for(reader.readuntil(b"}}"), BOUND_S)
    writer.close()
    assert b" 408 " in said
    assert b"Connection: close" in said
    assert b"request_timeout" in said
    assert (await served.post(chat_body()))[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"X-Long: " + b"x" * 9000 + b"\r\n",
        b"".join(b"X-%d: x\r\n" % n for n in range(200)),
    ],
)
async def test_headers_that_are_too_long_or_too_many_are_a_400(
    start: Start, engine: StubEngine, head: bytes
) -> None:
    said = await said_to(await start(engine), HEAD + head + b"Content-Length: 2\r\n\r\n{}")
    assert b" 400 " in said
    assert not engine.runs


class Noted(msgspec.Struct):
    """A body that knows which thread it was decoded on."""

    text: str

    def __post_init__(self) -> None:
        decoded_on.append(threading.get_ident())


decoded_on: list[int] = []


async def read(text: str) -> Noted:
    async def pieces() -> AsyncIterator[bytes]:
        yield msgspec.json.encode({"text": text})

    app = web.Application()
    app[SETTINGS] = ServerSettings()
    request = make_mocked_request("POST", "/", {"Content-Type": "application/json"}, app=app)
    request._read_bytes = b"".join([piece async for piece in pieces()])
    return await read_body(request, Noted)


async def test_a_large_body_is_decoded_off_the_event_loop_and_a_small_one_on_it() -> None:
    decoded_on.clear()
    here = threading.get_ident()
    assert len((await read("x" * LARGE)).text) == LARGE
    assert decoded_on[0] != here
    await read("x")
    assert decoded_on[1] == here


@pytest.mark.parametrize("value", ["[],", "{},", "1,"])
def test_a_body_of_millions_of_values_is_refused_before_it_is_decoded(value: str) -> None:
    body = '{"model": "stub", "text": [' + value * VALUES + "1]}"
    with pytest.raises(BadRequest, match="commas and brackets"):
        decode(body.encode(), Noted)


def test_a_text_of_twenty_megabytes_is_no_such_body() -> None:
    text = "The quick brown fox, as they say, jumps over [the] lazy dog.\n" * 330_000
    assert len(decode(msgspec.json.encode({"text": text}), Noted).text) > 20_000_000


def test_a_message_of_thousands_of_parts_is_refused() -> None:
    part = {"type": "text", "text": "x"}
    body = chat_body(messages=[{"role": "user", "content": [part] * 10_001}])
    with pytest.raises(BadRequest, match="10000") as refused:
        decode(msgspec.json.encode(body), ChatRequest)
    assert refused.value.param == "messages[0].content"
