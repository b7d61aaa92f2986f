"""Who may speak to the server: browsers only from its own pages.

Bound to loopback, the Host header must name loopback, or a foreign page could reach the server through a name
that it rebinds to 127.0.0.1. A request with an Origin must come from the very host it is sent to.
"""

import ipaddress
import re

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from regrow.api.errors import Refused

PORT = re.compile(r":\d*$")


def is_loopback(host: str) -> bool:
    """Tell whether `host`, a name or an address without port, can only mean this machine."""
    name = host.lower().strip("[]").rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def guard(bound_to: str) -> Middleware:
    """Return the middleware for a server bound to `bound_to`; it raises Refused."""
    loopback_only = is_loopback(bound_to)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if loopback_only and host and not is_loopback(PORT.sub("", host)):
            raise Refused("the Host header does not name this machine")
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Refused("requests from other origins are refused")
        return await handler(request)

    return check
