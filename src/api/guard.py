"""From where a browser may speak to the server: from its own pages, and from the origins of `--cors`.

Bound to loopback, the Host header must name loopback, or a foreign page could reach the server through a name
that it rebinds to 127.0.0.1. A request with an Origin must come from the very host it is sent to, or from an
origin that is allowed; to such pages a browser shows the answers.
"""

import ipaddress
import re
from collections.abc import Awaitable, Callable, Container

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from regrow.api.errors import Refused

PORT = re.compile(r":\d*$")
ANY = "*"
SHOWN = {"Access-Control-Expose-Headers": "X-Request-Id, Retry-After", "Vary": "Origin"}
ASKED_BEFORE = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE",
    "Access-Control-Allow-Headers": "*, Authorization",  # the star alone does not cover that one
    "Access-Control-Max-Age": "600",
}


def is_loopback(host: str) -> bool:
    """Tell whether `host`, a name or an address without port, can only mean this machine."""
    name = host.lower().strip("[]").rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def guard(bound_to: str, cors: Container[str] = ()) -> Middleware:
    """Return the middleware for a server bound to `bound_to`; it raises Refused. cors: see `allows`."""
    loopback_only = is_loopback(bound_to)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if loopback_only and host and not is_loopback(PORT.sub("", host)):
            raise Refused("the Host header does not name this machine")
        origin = request.headers.get("Origin")
        if origin is not None and allows(cors, origin):
            if request.method == "OPTIONS":  # a browser asks before it sends, and shows no key then
                return web.Response(status=204, headers=ASKED_BEFORE)
        elif origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Refused("requests from other origins are refused")
        return await handler(request)

    return check


def allows(cors: Container[str], origin: str) -> bool:
    """Tell whether pages of `origin` are among the origins `cors`, such as https://example.org:8443, or *."""
    return ANY in cors or origin.lower() in cors


def shows(cors: Container[str]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return the signal handler that lets browsers show answers to pages of the origins `cors`."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if origin is not None and allows(cors, origin):
            response.headers.update({"Access-Control-Allow-Origin": origin, **SHOWN})

    return add
