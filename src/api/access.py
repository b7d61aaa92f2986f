"""The outermost middleware: every request gets an id, an answer whatever is raised, and a line in the log.

The id is bound to the context, so that all lines logged for the request carry it. No line holds text of a
prompt or an answer.
"""

import re
import time
import uuid

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from regrow.api.errors import message_response, response_of
from regrow.errors import RegrowError

QUIET = frozenset({"/health", "/ready", "/v1/status", "/v1/cache"})  # what is asked for again and again
CLIENT_GONE = 499
GIVEN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

log = structlog.get_logger(__name__)


@web.middleware
async def access(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get("X-Request-Id", "")
    structlog.contextvars.clear_contextvars()  # a connection's requests share one context
    structlog.contextvars.bind_contextvars(
        request_id=given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex,
    )
    begun = time.monotonic()
    status = CLIENT_GONE
    try:
        response = await _answered(request, handler)
        status = response.status
    finally:
        quiet = request.path in QUIET and request.method != "DELETE"
        line = log.debug if quiet else log.info
        ms = round((time.monotonic() - begun) * 1e3, 1)
        path = request.rel_url.raw_path  # as it was sent: decoded it may hold control characters
        line("http", method=request.method, path=path, status=status, ms=ms)
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionResetError:
        return web.Response(status=CLIENT_GONE)  # nobody hears it; what is raised is logged as an error
    except (RegrowError, web.HTTPException) as error:
        return _told(request, error)
    except Exception as error:
        log.exception("unexpected error")
        return _told(request, error)


def _told(request: web.Request, error: Exception) -> web.Response:
    return (message_response if _is_message(request) else response_of)(error)


def _is_message(request: web.Request) -> bool:
    return request.path.startswith("/v1/messages")


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: name the request in the headers of its answer, streams included."""
    name = structlog.contextvars.get_contextvars()["request_id"]
    response.headers["X-Request-Id"] = name
    if _is_message(request):
        response.headers["request-id"] = name  # as Anthropic's clients look for it
