"""The whole HTTP server in the virtual world: real protocol, real handlers, no socket.

A `Call` is one client with a connection of its own. It notes when each piece of the answer arrives, in
virtual seconds, and may leave at any time.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from regrow.api.app import make_app, make_runner
from regrow.api.port import EnginePort
from regrow.config import ServerSettings

KEEP_ALIVE = ": keep-alive"
DONE = "data: [DONE]"
ROUTES = {  # the routes that answer, and what the last event of a stream says where the answer is cut off
    "/v1/chat/completions": "[DONE]",
    "/v1/completions": "[DONE]",
    "/v1/messages": "message_stop",
    "/v1/responses": "response.incomplete",
}


class _Transport(asyncio.Transport):
    """The server's end of a connection. on_its_way: bytes that the client has not taken."""

    on_its_way = 0

    def __init__(self, arrived: Callable[[bytes], None], closed: Callable[[], None]) -> None:
        super().__init__()
        self._arrived = arrived
        self._closed = closed
        self._closing = False

    def write(self, data: Any) -> None:
        self._arrived(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.on_its_way

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._closed()

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@dataclass
class Call:
    """One request and its answer. blocks: (virtual second, text) of each block of an event stream, or of the
    whole body."""

    loop: asyncio.AbstractEventLoop
    server: web.Server
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    blocks: list[tuple[float, str]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _raw: bytes = b""
    _body: bytes = b""

    def send(self, method: str, path: str, body: object = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        self._transport = _Transport(self._arrived, self._lost)
        self._protocol = self.server()
        self._protocol.connection_made(self._transport)
        self._protocol.data_received(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)

    def leave(self) -> None:
        """The client goes away."""
        self._transport.close()

    def take_nothing(self) -> None:
        """The client stops reading, and what is on its way to it is already more than a connection holds."""
        self._transport.on_its_way = 1 << 20
        self._protocol.pause_writing()

    async def end(self) -> "Call":
        """Wait for the end of the answer, or of the connection."""
        await self.ended.wait()
        return self

    async def until(self, holds: Callable[[str], bool]) -> None:
        """Wait for a block for which `holds` says yes."""
        while not any(holds(block) for _, block in self.blocks):
            assert not self.ended.is_set(), self.blocks
            self.news.clear()
            await self.news.wait()

    @property
    def json(self) -> Any:
        return json.loads("".join(block for _, block in self.blocks))

    @property
    def chunks(self) -> list[Any]:
        """The decoded events of a stream, without [DONE]."""
        texts = [block.removeprefix("data: ") for _, block in self.blocks if block.startswith("data: ")]
        return [json.loads(text) for text in texts if text != "[DONE]"]

    @property
    def text(self) -> str:
        """What the stream of a chat says."""
        deltas = [choice["delta"] for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(delta.get("content") or "" for delta in deltas)

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.blocks]

    def times_of(self, what: str) -> list[float]:
        return [at for at, block in self.blocks if block == what]

    def _arrived(self, data: bytes) -> None:
        self._raw += data
        if not self.status and b"\r\n\r\n" in self._raw:
            head, _, self._raw = self._raw.partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            self.status = int(first.split()[1])
            self.headers = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
            }
        if self.status:
            self._take_body()
        self.news.set()

    def _take_body(self) -> None:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            if len(self._raw) >= int(self.headers.get("content-length", 0)):
                self.blocks.append((self.loop.time(), self._raw.decode()))
                self.ended.set()
            return
        while b"\r\n" in self._raw:
            size, _, rest = self._raw.partition(b"\r\n")
            length = int(size, 16)
            if len(rest) < length + 2:
                return
            self._body, self._raw = self._body + rest[:length], rest[length + 2 :]
            *blocks, self._body = self._body.split(b"\n\n")
            self.blocks += [(self.loop.time(), block.decode()) for block in blocks]
            if not length:
                self.ended.set()

    def _lost(self) -> None:
        self.loop.call_soon(self._protocol.connection_lost, None)
        self.ended.set()
        self.news.set()


@dataclass(frozen=True)
class Site:
    """A server without a socket."""

    server: web.Server

    def call(self, method: str, path: str, body: object = None) -> Call:
        call = Call(asyncio.get_running_loop(), self.server)
        call.send(method, path, body)
        return call

    def chat(self, text: str, **fields: object) -> Call:
        """Ask for a streamed chat; returns at once."""
        messages = [{"role": "user", "content": text}]
        body = {"model": "world", "messages": messages, "max_tokens": 6, "stream": True, "temperature": 0}
        return self.call("POST", "/v1/chat/completions", {**body, **fields})

    def stream(self, route: str, text: str, tokens: int = 6, stream: bool = True) -> Call:
        """Ask any of the routes that answer (`ROUTES`); returns at once."""
        messages = [{"role": "user", "content": text}]
        bodies: dict[str, dict[str, object]] = {
            "/v1/chat/completions": {"messages": messages, "max_tokens": tokens},
            "/v1/completions": {"prompt": text, "max_tokens": tokens},
            "/v1/messages": {"messages": messages, "max_tokens": tokens},
            "/v1/responses": {"input": text, "max_output_tokens": tokens},
        }
        return self.call("POST", route, {"model": "world", "stream": stream, **bodies[route]})

    @staticmethod
    async def ends(calls: Sequence[Call]) -> list[Call]:
        return list(await asyncio.gather(*(call.end() for call in calls)))


@asynccontextmanager
async def site(engine: EnginePort, **settings: Any) -> AsyncIterator[Site]:
    """Serve an engine in the virtual world; at the end every connection is closed."""
    runner = make_runner(make_app(engine, ServerSettings(**settings)))
    await runner.setup()
    assert runner.server is not None
    try:
        yield Site(runner.server)
    finally:
        await runner.cleanup()
