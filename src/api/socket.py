"""One open WebSocket: JSON messages both ways, a bounded outbox, and requests that do not outlive it.

What is to be sent waits in the outbox. While that is full whoever has more to say waits (and so does the
reading of what the client says); the events of a request then wait in the bounded buffer of its run. A client
that takes nothing for `SLOW_S` seconds is cut off, alone: its requests end with `slow_consumer`, what waited
is dropped, and the connection is closed.

Who may not set headers, as the pages of browsers, shows the key in a first message {"type": "auth", "key"}.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated

import msgspec
import structlog
from aiohttp import WSCloseCode, WSMsgType, web
from msgspec import Meta

from regrow.api.body import decode
from regrow.api.errors import Unauthorized, body_of
from regrow.api.facts import Body
from regrow.api.keys import given_keys
from regrow.api.schema import Fields
from regrow.api.state import KEYS, SETTINGS
from regrow.errors import BadRequest, RegrowError, SlowConsumer

OUTBOX_BYTES = 1 << 20
SLOW_S = 10.0
AUTH_S = 10.0
HEARTBEAT_S = 30.0  # a peer that does not answer a ping for half of it is gone
CLOSED = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR)

log = structlog.get_logger(__name__)


SOCKETS = web.AppKey("sockets", set["Socket"])


Name = Annotated[str, Meta(min_length=1, max_length=256)]  # of a request; said again with every event


class Auth(Fields, frozen=True, tag_field="type", tag="auth"):
    key: str


class Socket:
    """Made by `open_socket`. `response` is what the handler returns."""

    def __init__(self, request: web.Request) -> None:
        settings = request.app[SETTINGS]
        self.response = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, max_msg_size=settings.body_limit, compress=False, timeout=SLOW_S
        )
        self._request = request
        self._idle_s = settings.socket_idle_s
        self._loop = asyncio.get_running_loop()
        self._quiet_since = self._loop.time()
        self._works: set[asyncio.Task[None]] = set()
        self._outbox: deque[bytes] = deque()
        self._waiting = 0  # bytes in the outbox
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False
        self._slow = False
        self._refused = False

    async def send(self, body: Body) -> None:
        """Put a message into the outbox; waits for room. Raises ConnectionResetError once it is closed."""
        frame = msgspec.json.encode(body)
        while self._waiting and self._waiting + len(frame) > OUTBOX_BYTES and not self._closed:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise ConnectionResetError("the connection is closed")
        self._put(frame)

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield what the client says, until it leaves or has had nothing to do for too long."""
        while not self._refused:
            idle = 0.0 if self._works else self._loop.time() - self._quiet_since
            if idle >= self._idle_s:
                await self.close(WSCloseCode.OK, "nothing was asked for a long time")
                return
            try:
                async with asyncio.timeout(self._idle_s - idle):  # aiohttp's own begins anew with every pong
                    message = await self.response.receive()
            except TimeoutError:
                continue
            if message.type in CLOSED:
                return
            self._quiet_since = self._loop.time()
            yield message.data if isinstance(message.data, bytes) else message.data.encode()

    def start(self, work: Callable[[], Awaitable[None]], failed: Callable[[Exception], Body]) -> None:
        """Do some work beside the others. failed: the message that tells of an error."""
        task = asyncio.create_task(self._do(work, failed))
        self._works.add(task)
        task.add_done_callback(self._done)

    async def close(self, code: WSCloseCode, reason: str) -> None:
        """Close the connection, at once where the client takes nothing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOW_S):
                await self.response.close(code=code, message=reason.encode())

    async def admit(self) -> None:
        """Wait for the key in a first message, where none was shown before; who shows none may not speak."""
        keys = self._request.app[KEYS]
        if keys.admit(given_keys(self._request)):
            return
        try:
            async with asyncio.timeout(AUTH_S):
                message = await self.response.receive()
            shown = decode(message.data.encode(), Auth).key if message.type is WSMsgType.TEXT else None
        except (TimeoutError, BadRequest):
            shown = None
        if shown is not None and keys.admit([shown]):
            await self.send({"type": "authorized"})
            return
        self._refused = True
        error = Unauthorized('give a valid key in a first message: {"type": "auth", "key": ...}')
        with suppress(ConnectionResetError):
            await self.send({"type": "error", "status": 401, **body_of(error)})

    async def end(self) -> None:
        """End all work; what waits is sent still."""
        for task in self._works:
            task.cancel()
        if self._works:
            await asyncio.wait(self._works)
        self._closed = True
        self._news.set()
        self._room.set()

    async def write(self) -> None:
        """Send what is in the outbox, until all is sent after `end`, or the client is gone or cut off."""
        try:
            while not self._closed or self._outbox:
                if self._outbox:
                    await self._send_one()
                else:
                    self._news.clear()
                    await self._news.wait()
        except ConnectionResetError:
            pass
        except TimeoutError:
            self._abort()
        finally:
            self._close_outbox()

    async def _send_one(self) -> None:
        frame = self._outbox.popleft()
        self._waiting -= len(frame)
        self._room.set()
        try:
            async with asyncio.timeout(SLOW_S):
                await self.response.send_frame(frame, WSMsgType.TEXT)
        except TimeoutError:
            if self._slow or self._closed:
                raise
            await self._cut_off()

    async def _cut_off(self) -> None:
        """End the requests of a client that does not read, and leave the connection with the reasons."""
        log.warning("slow consumer", requests=len(self._works))
        self._slow = True
        self._outbox.clear()
        self._waiting = 0
        await self.end()
        while self._outbox:
            await self._send_one()
        await self.close(WSCloseCode.POLICY_VIOLATION, "slow_consumer")

    async def _do(self, work: Callable[[], Awaitable[None]], failed: Callable[[Exception], Body]) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            if self._slow:
                self._put(msgspec.json.encode(failed(SlowConsumer("the client does not read"))))
            raise
        except ConnectionResetError:
            pass
        except Exception as error:
            if not isinstance(error, RegrowError):
                log.exception("answer failed")
            with suppress(ConnectionResetError):
                await self.send(failed(error))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._works.discard(task)
        self._quiet_since = self._loop.time()

    def _put(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._waiting += len(frame)
        self._news.set()

    def _close_outbox(self) -> None:
        self._closed = True
        self._outbox.clear()
        self._room.set()
        for task in self._works:
            task.cancel()

    def _abort(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.abort()


@asynccontextmanager
async def open_socket(request: web.Request) -> AsyncIterator[Socket]:
    """Take a connection over, for as long as the block runs; raises what refuses it.

    A client that may not speak hears so, and `messages` ends at once.
    """
    if not web.WebSocketResponse().can_prepare(request):
        raise web.HTTPUpgradeRequired(text="this route speaks WebSocket")
    if any(given_keys(request)) and not request.app[KEYS].admit(given_keys(request)):
        raise Unauthorized("the key is not valid")
    socket = Socket(request)
    await socket.response.prepare(request)
    request.app[SOCKETS].add(socket)
    writer = asyncio.create_task(socket.write())
    try:
        await socket.admit()
        yield socket
    finally:
        request.app[SOCKETS].discard(socket)
        await socket.end()
        await writer
        await socket.close(WSCloseCode.OK, "")


async def close_sockets(app: web.Application) -> None:
    """Signal handler: the server stops, what ran has ended."""
    going = (socket.close(WSCloseCode.GOING_AWAY, "the server stops") for socket in app[SOCKETS])
    await asyncio.gather(*going)
