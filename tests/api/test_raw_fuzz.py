"""Whatever bytes come on a connection, as HTTP or after the handshake of a WebSocket: they are answered below
500 or the connection is closed, and the next client is served."""

import asyncio
import base64
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from regrow.api.app import make_app, make_runner
from regrow.config import ServerSettings
from tests.api.stub import StubEngine
from tests.api.test_fuzz import few

BOUND_S = 30
SHORT_S = 0.02  # that the server waits for more
GOOD = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
KEY = base64.b64encode(bytes(16))
HANDSHAKE = (
    b"GET %s HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + KEY + b"\r\n\r\n"
)
CLOSING = b"\x88"  # of the server's last frame, which waits some seconds for its answer
STATUS = re.compile(rb"HTTP/1\.[01] (\d\d\d) ")
PIECES = st.sampled_from(
    [
        *(b"GET ", b"POST ", b"DANCE ", b"/v1/chat/completions", b"/ready", b"*", b"http://[", b"/%zz", b" "),
        *(b" HTTP/1.1", b" HTTP/9.9", b" HTTP/1.0", b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b": "),
        *(b"Host: localhost", b"Host:", b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 1e3"),
        *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: x", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n"),
        *(b"Content-Type: application/json", b"Content-Encoding: gzip", b"Expect: 100-continue", b"{}"),
        *(
            b"Upgrade: websocket",
            b"Sec-WebSocket-Version: 13",
            b"Connection: keep-alive, Upgrade",
            b"a" * 9000,
        ),
    ]
)
BYTES = st.lists(PIECES | st.binary(max_size=20), max_size=12).map(b"".join)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A WebSocket frame with any bits in its head, and a length that may be another one than its own."""
    payload = draw(st.binary(max_size=40))
    said = draw(st.just(len(payload)) | st.integers(0, 125))
    length = draw(
        st.sampled_from(
            [
                bytes([0x80 | said]),
                bytes([said]),
                bytes([0x80 | 126]) + said.to_bytes(2, "big"),
                bytes([0x80 | 127]) + draw(st.sampled_from([said, 2**40, 2**64 - 1])).to_bytes(8, "big"),
            ]
        )
    )
    mask = bytes(4) if length[0] & 0x80 else b""
    return bytes([draw(st.integers(0, 255))]) + length + mask + payload


@dataclass
class Speaker:
    runner: asyncio.Runner
    port: int

    def say(self, *sent: bytes, last: bytes | None = None) -> bytes:
        """Send these bytes on a connection of their own; return what comes back until it is closed,
        or until `last` comes."""

        async def say() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(b"".join(sent))
                said = b""
                async with asyncio.timeout(BOUND_S):
                    while (last is None or last not in said) and (piece := await reader.read(1 << 16)):
                        said += piece
                return said
            except ConnectionError:
                return b""
            finally:
                writer.close()

        return self.runner.run(say())


@pytest.fixture(scope="module")
def speaker() -> Iterator[Speaker]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def serve() -> Speaker:
            limits = ServerSettings(idle_s=SHORT_S, body_s=SHORT_S, socket_idle_s=SHORT_S)
            served = make_runner(make_app(StubEngine(), limits))
            await served.setup()
            stack.push_async_callback(served.cleanup)
            await web.TCPSite(served, "127.0.0.1", 0).start()
            return Speaker(runner, served.addresses[0][1])

        yield runner.run(serve())
        runner.run(stack.aclose())


def check(speaker: Speaker, answer: bytes, sent: bytes) -> None:
    statuses = [int(status) for status in STATUS.findall(answer)]
    assert all(status < 500 for status in statuses), (answer, sent)
    assert b"Traceback" not in answer
    assert b" 200 " in speaker.say(GOOD)


@few(300)
@given(sent=BYTES)
def test_any_bytes_are_answered_below_500_or_the_connection_is_closed(speaker: Speaker, sent: bytes) -> None:
    check(speaker, speaker.say(sent), sent)


@pytest.mark.parametrize("path", [b"/v1/stream", b"/v1/responses"])
def test_any_frames_end_their_connection_at_most(speaker: Speaker, path: bytes) -> None:
    @few(150)
    @given(sent=st.lists(frames() | st.binary(max_size=20), max_size=5).map(b"".join))
    def said(sent: bytes) -> None:
        answer = speaker.say(HANDSHAKE % path, sent, last=CLOSING)
        assert answer.startswith(b"HTTP/1.1 101 ")
        check(speaker, answer, sent)

    said()
