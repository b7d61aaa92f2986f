"""A server-sent event stream that is never silent for long and never blocks the loop.

Headers go out at once. Whenever nothing was written for `keepalive_s` by the loop's clock, a comment goes
out, whatever phase the request is in. Every write waits until the transport has room (back-pressure), and
raises ConnectionResetError where the client is gone, or has taken nothing for STUCK_S: then it is cut off.
"""

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self

from aiohttp import web

STUCK_S = 60.0
LITTLE = 8192  # bytes that fit into what a transport takes without a pause
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"[DONE]"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a reverse proxy would otherwise hold the stream back
}


class EventStream:
    """One open stream: `async with EventStream(request, 5.0) as stream: await stream.send(data)`."""

    def __init__(self, request: web.Request, keepalive_s: float) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._written_at = self._loop.time()

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeper.cancel()
        await asyncio.wait([self._keeper])

    async def send(self, data: bytes, event: str | None = None) -> None:
        """Write one event, with its name where it has one; `data` is a single line."""
        named = b"" if event is None else b"event: %b\n" % event.encode()
        await self._write(b"%bdata: %b\n\n" % (named, data))

    async def end(self, data: bytes, event: str | None = None) -> None:
        """Write the last event and the end of the body. A client may leave once it has the event, so the
        handler has nothing left to wait for then."""
        async with self._lock:  # never cancel the keeper inside a write
            self._keeper.cancel()
        await asyncio.wait([self._keeper])
        await self.send(data, event)
        await self._taken(self.response.write_eof())

    async def _write(self, frame: bytes) -> None:
        async with self._lock:
            writing = self.response.write(frame)
            await (writing if self._has_room(frame) else self._taken(writing))
            self._written_at = self._loop.time()

    def _has_room(self, frame: bytes) -> bool:
        """Say whether a write does not wait for the client: nothing of what was written before waits for it,
        and this is little. So nearly every token costs no timer."""
        transport = self._request.transport
        return (
            isinstance(transport, asyncio.WriteTransport)
            and not transport.get_write_buffer_size()
            and len(frame) < LITTLE
        )

    async def _taken(self, writing: Awaitable[None]) -> None:
        """Wait until the client has taken what is written, or cut it off."""
        try:
            async with asyncio.timeout(STUCK_S):
                await writing
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client takes nothing") from None

    def _silent_for(self) -> float:
        """Return for how many more seconds nothing need be written."""
        return self._written_at + self._keepalive_s - self._loop.time()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._silent_for())
            async with self._lock:
                if self._silent_for() > 0:
                    continue
                try:
                    await self._taken(self.response.write(KEEP_ALIVE))
                except ConnectionResetError:
                    return  # the handler hears of it by cancellation, or at its next event
                self._written_at = self._loop.time()
