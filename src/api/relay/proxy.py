"""The HTTP half of the relay: a request goes up, its answer comes down, byte for byte.

Prompts are read whole and may be changed on the way; every other body streams through, both ways, no faster
than the other side takes it. Headers pass, authorisation included, except those of the one connection; where
a prompt's usage is measured, Accept-Encoding is narrowed to codings that can be looked into. Nothing is sent
twice. A client that goes away cancels the upstream request. An upstream that cannot be reached, or breaks
before its headers, is a 502 that says why; one that breaks later leaves the client's answer unfinished.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from regrow.api.relay.bodies import LIMIT_BYTES, Style, style_of
from regrow.api.relay.counts import Counts
from regrow.api.relay.decide import Considered, Decider
from regrow.api.relay.usage import READABLE, UsageReader

HOP_BY_HOP = frozenset(
    {
        "connection",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
ADDED_BY_CLIENT = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
PIECE = 64 * 1024
MAX_HEADER = 64 * 1024
THREADS = 4  # bodies looked into at once; each holds a decoded copy of up to LIMIT_BYTES

log = structlog.get_logger(__name__)


class Proxy:
    """Passes requests on to `upstream`, a URL whose path is put before theirs, while it is entered."""

    def __init__(self, upstream: str, style: Style | None, decider: Decider, counts: Counts) -> None:
        self._upstream = upstream.rstrip("/")
        self._style = style
        self._decider = decider
        self._counts = counts

    async def __aenter__(self) -> Self:
        self._threads = ThreadPoolExecutor(THREADS, "relay")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
            auto_decompress=False,
            skip_auto_headers=ADDED_BY_CLIENT,
            max_line_size=MAX_HEADER,
            max_field_size=MAX_HEADER,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        self._threads.shutdown()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Handle any request that is not the relay's own."""
        if not request.raw_path.startswith("/"):
            raise web.HTTPBadRequest(text="the request target must be a path")
        headers = passing(request.headers)
        style = style_of(request.method, request.path, self._style)
        if style is None:
            body = request.content.iter_any() if request.can_read_body else None
            return await self._pass_on(request, headers, body, None)
        start, whole = await _read(request.content)
        if not whole:
            return await self._pass_on(request, headers, _chained(start, request.content), None)
        considered = await self._consider(style, start, headers.get("Content-Encoding", ""))
        if considered.changed:
            headers.popall("Content-Encoding", None)
        headers["Content-Length"] = str(len(considered.body))
        _narrow(headers)
        return await self._pass_on(request, headers, _pieces(considered.body), considered)

    async def _consider(self, style: Style, body: bytes, encoding: str) -> Considered:
        """Consider the prompt on a thread; what it opened is closed where the client leaves meanwhile."""
        loop, run = asyncio.get_running_loop(), copy_context().run  # so that its log lines name the request
        work = loop.run_in_executor(self._threads, run, self._decider.consider, style, body, encoding)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(lambda done: self._decider.finished(done.result(), None))
            raise

    async def _pass_on(
        self,
        request: web.Request,
        headers: CIMultiDict[str],
        body: AsyncIterator[bytes] | None,
        considered: Considered | None,
    ) -> web.StreamResponse:
        usage = None
        try:
            try:
                upstream = await self._session.request(
                    request.method,
                    URL(self._upstream + request.raw_path, encoded=True),
                    headers=headers,
                    data=body,
                    allow_redirects=False,
                )
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                return self._unreachable(request, error)
            async with upstream:
                if considered is not None and upstream.status < 300:
                    coding = upstream.headers.get("Content-Encoding", "")
                    usage = UsageReader(upstream.content_type, coding)
                return await self._answer(request, upstream, usage)
        finally:
            if considered is not None:
                tokens = usage.tokens if usage else None
                if usage and tokens is None:
                    self._counts.unmeasured()
                self._decider.finished(considered, tokens)

    async def _answer(
        self, request: web.Request, upstream: aiohttp.ClientResponse, usage: UsageReader | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=passing(upstream.headers)
        )
        await response.prepare(request)
        self._counts.answered(upstream.status)
        chunks = upstream.content.iter_any()
        while True:
            try:
                chunk = await anext(chunks, b"")
            except (aiohttp.ClientError, OSError) as error:
                self._counts.broke("answer")
                log.warning("the upstream broke its answer off", reason=_reason(error))
                if request.transport is not None:
                    request.transport.close()
                return response
            if not chunk:
                break
            if usage is not None:
                usage.feed(chunk)
            try:
                await response.write(chunk)
            except ConnectionResetError:
                return response  # the client is gone
        return response

    def _unreachable(self, request: web.Request, error: Exception) -> web.Response:
        reason = f"the upstream gave no answer: {_reason(error)}"
        self._counts.broke("request")
        self._counts.answered(502)
        log.warning("no answer from the upstream", reason=reason)
        style = style_of(request.method, request.path, None)
        told = {"type": "api_error", "message": reason}
        body = {"type": "error", "error": told} if style == "anthropic" else {"error": told}
        return web.Response(body=msgspec.json.encode(body), status=502, content_type="application/json")


def passing(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that are passed on: all but those of the one connection (RFC 9110, 7.6.1)."""
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    dropped = HOP_BY_HOP | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def _narrow(headers: CIMultiDict[str]) -> None:
    """Accept only those codings that usage can be read from, of those that the client accepts."""
    if "Accept-Encoding" in headers:
        asked = ",".join(headers.popall("Accept-Encoding")).split(",")
        kept = [coding.strip() for coding in asked if coding.split(";")[0].strip().lower() in READABLE]
        headers["Accept-Encoding"] = ", ".join(kept) or "identity"


async def _read(content: aiohttp.StreamReader) -> tuple[bytes, bool]:
    """Read a body up to the limit; returns what was read, and whether that is all."""
    start = bytearray()
    async for chunk in content.iter_any():
        start += chunk
        if len(start) > LIMIT_BYTES:
            return bytes(start), False
    return bytes(start), True


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body in pieces, so that a large one does not hold up the loop."""
    for at in range(0, len(body), PIECE):
        yield body[at : at + PIECE]


async def _chained(start: bytes, rest: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    async for piece in _pieces(start):
        yield piece
    async for chunk in rest.iter_any():
        yield chunk


def _reason(error: Exception) -> str:
    """Tell an error without URLs: those can hold keys."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"{error.host}:{error.port}: {error.os_error.strerror or error.os_error}"
    return type(error).__name__
