"""Who may use the server: whoever shows one of its keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

Keys are compared by their digests, each with all of them, so that the time taken tells nothing of them.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from regrow.api.errors import Unauthorized
from regrow.api.route import Route
from regrow.errors import BadConfig


class Keys:
    """The keys that are taken. Where there are none, everybody is let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admit(self, given: Iterable[str]) -> bool:
        """Tell whether one of the given keys is taken."""
        digests = map(_digest, given)
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        return any(matches) or not self._digests


def keyed(keys: Keys, routes: Iterable[Route]) -> Middleware:
    """Return the middleware that lets in whoever `keys` admit; it raises Unauthorized for all others, also
    where there is no such route, so that nobody learns which there are."""
    keyless = {(route.method, route.path) for route in routes if route.keyless}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        is_open = resource is not None and (method, resource.canonical) in keyless
        if not is_open and not keys.admit(given_keys(request)):
            raise Unauthorized("give a valid key as Authorization: Bearer KEY or as x-api-key: KEY")
        return await handler(request)

    return check


def given_keys(request: web.Request) -> Iterator[str]:
    """Yield the keys that a request shows in its headers."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip()
    if "x-api-key" in request.headers:
        yield request.headers["x-api-key"].strip()


def keys_in(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one a line, without empty lines and those that begin with #; raises
    BadConfig."""
    try:
        lines = map(str.strip, path.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"--api-key-file: {path} cannot be read: {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise BadConfig(f"--api-key-file: {path} holds no key; write one a line")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
