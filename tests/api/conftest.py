"""A server on a real socket of this machine, with a scripted engine behind it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from regrow.api.app import make_app, make_runner
from regrow.config import ServerSettings
from tests.api.stub import StubEngine


@dataclass
class Served:
    """What a test talks to: the address, a plain client, and the official one. app: to look into."""

    url: str
    http: aiohttp.ClientSession
    openai: openai.AsyncOpenAI
    app: web.Application

    async def post(self, body: object, path: str = "/v1/chat/completions") -> tuple[int, dict]:
        """Post a body; returns the status and the decoded answer."""
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict]:
        async with self.http.get(path) as response:
            return response.status, await response.json()


Start = Callable[..., Awaitable[Served]]


def chat_body(**fields: object) -> dict[str, object]:
    """A valid body, with some fields set or replaced."""
    return {"model": "stub", "messages": [{"role": "user", "content": "Hello there"}], **fields}


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Start a server: `await start(engine, keepalive_s=0.02)`."""
    closing: list[Callable[[], Awaitable[None]]] = []

    async def started(engine: StubEngine | None, **settings: object) -> Served:
        app = make_app(engine, ServerSettings(**settings))
        runner = make_runner(app)
        await runner.setup()
        closing.append(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        http = aiohttp.ClientSession(url)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        closing.extend([client.close, http.close])
        return Served(url, http, client, app)

    yield started
    for close in reversed(closing):
        await close()


@pytest.fixture
def engine() -> StubEngine:
    return StubEngine()
