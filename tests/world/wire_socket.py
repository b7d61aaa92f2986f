"""A WebSocket client in the virtual world: what the server says arrives, until it stops reading.

`stop_reading` makes the connection fill up: after `ROOM` bytes the server's protocol is paused, as a real
transport does it.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

ROOM = 1 << 16
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10


class _Transport(asyncio.Transport):
    def __init__(self, line: "Line") -> None:
        super().__init__()
        self._line = line
        self.closing = False

    def write(self, data: Any) -> None:
        self._line.arrived(bytes(data))

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self._line.lost()

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@dataclass
class Line:
    """One connection. heard: (virtual second, message). code: what the server closed it with."""

    loop: asyncio.AbstractEventLoop
    server: web.Server
    heard: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    status: int = 0
    code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _raw: bytes = b""
    _unread: bytes = b""
    _reading: bool = True
    _paused: bool = False

    def open(self, path: str, headers: Mapping[str, str]) -> None:
        lines = {
            "Host": "localhost",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            **headers,
        }
        head = "\r\n".join([f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())])
        self._transport = _Transport(self)
        self._protocol = self.server()
        self._protocol.connection_made(self._transport)
        self._protocol.data_received(f"{head}\r\n\r\n".encode())

    def say(self, **message: object) -> None:
        self._send(TEXT, json.dumps(message).encode())

    def leave(self) -> None:
        """The client's machine is gone."""
        self._transport.close()

    def stop_reading(self) -> None:
        self._reading = False

    def read_again(self) -> None:
        self._reading = True
        if self._paused:
            self._paused = False
            self._protocol.resume_writing()
        unread, self._unread = self._unread, b""
        self.arrived(unread)

    async def until(self, kind: str, name: str | None = None) -> dict[str, Any]:
        """Wait for a message of this kind (of this request)."""
        while True:
            for _, message in self.heard:
                if message["type"] == kind and (name is None or message.get("id") == name):
                    return message
            assert not self.ended.is_set(), self.heard[-3:]
            self.news.clear()
            await self.news.wait()

    def of(self, name: str) -> list[dict[str, Any]]:
        return [message for _, message in self.heard if message.get("id") == name]

    def text(self, name: str) -> str:
        return "".join(message.get("content", "") for message in self.of(name))

    def arrived(self, data: bytes) -> None:
        if not self._reading:
            self._unread += data
            if len(self._unread) > ROOM and not self._paused:
                self._paused = True
                self._protocol.pause_writing()
            return
        self._raw += data
        if not self.status and b"\r\n\r\n" in self._raw:
            head, _, self._raw = self._raw.partition(b"\r\n\r\n")
            self.status = int(head.split()[1])
        while self.status == 101 and (taken := _frame(self._raw)):
            kind, payload, self._raw = taken
            self._take(kind, payload)
        self.news.set()

    def lost(self) -> None:
        self.loop.call_soon(self._protocol.connection_lost, None)
        self.ended.set()
        self.news.set()

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == TEXT:
            self.heard.append((self.loop.time(), json.loads(payload)))
        elif kind == PING:
            self._send(PONG, payload)
        elif kind == CLOSE:
            self.code = int.from_bytes(payload[:2], "big")
            self._send(CLOSE, payload[:2])

    def _send(self, kind: int, payload: bytes) -> None:
        """Send one frame, masked with zeros, as a client has to."""
        size = len(payload)
        length = bytes([0x80 | size]) if size < 126 else bytes([0xFE]) + size.to_bytes(2, "big")
        self._protocol.data_received(bytes([0x80 | kind]) + length + bytes(4) + payload)


def _frame(raw: bytes) -> tuple[int, bytes, bytes] | None:
    """Take a whole frame off: (kind, payload, the rest)."""
    if len(raw) < 2:
        return None
    size, start = raw[1], 2
    if size >= 126:
        start = 4 if size == 126 else 10
        size = int.from_bytes(raw[2:start], "big")
    if len(raw) < start + size:
        return None
    return raw[0] & 15, raw[start : start + size], raw[start + size :]


def connect(server: web.Server, path: str = "/v1/stream", **headers: str) -> Line:
    line = Line(asyncio.get_running_loop(), server)
    line.open(path, headers)
    return line
