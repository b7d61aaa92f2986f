"""A client of any OpenAI-compatible server, as far as the terminal chat and the bench need one."""

import contextlib
import os
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from regrow.errors import RegrowError

LONGEST_LINE = 2**20


class Unanswered(RegrowError):
    """The server cannot be reached, or it refused the request."""


class Unreachable(Unanswered):
    """Nobody answers there."""


class Server:
    """url: with or without scheme and /v1. key: shown with every request."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def model(self) -> dict[str, Any]:
        """Return what the server says of its first model; raises Unanswered."""
        async with self.answered("GET", "/v1/models") as response:
            found: dict[str, Any] = (await response.json())["data"][0]
            return found

    @contextlib.asynccontextmanager
    async def answered(
        self, method: str, path: str, body: dict[str, object] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request on a connection of its own; raises Unanswered unless the answer is 200."""
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, read_bufsize=LONGEST_LINE) as session,
                session.request(method, self.url + path, json=body, headers=self._headers) as response,
            ):
                if response.status != 200:
                    raise Unanswered(await _reason(response))
                yield response
        except aiohttp.ClientConnectorError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise Unreachable(f"no connection to {self.url}: {reason}") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unanswered(f"no connection to {self.url}: {error}") from None


async def chunks_of(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of an event stream up to its end."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield msgspec.json.decode(line[len(b"data: ") :])


async def _reason(response: aiohttp.ClientResponse) -> str:
    try:
        said = str((await response.json())["error"]["message"])
        unauthorized = response.status == HTTPStatus.UNAUTHORIZED
        return f"{said} (--api-key, or REGROW_API_KEY)" if unauthorized else said
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        return f"{response.url} answered {response.status}"
