"""A relay before the fake provider, both on real sockets of this machine, in virtual time."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import anthropic
import openai
import pytest_asyncio
from aiohttp import web
from hypothesis import settings

from regrow.api.relay.app import Relay, make_app, make_runner
from regrow.config import RelaySettings
from tests.api.relay.server import KEY, FakeProvider
from tests.store.relays import Machine

settings.register_profile("relay", deadline=None)  # how long an example takes says nothing about a rule
settings.load_profile("relay")


@dataclass
class World:
    """provider: behind the relay. http: a plain client of the relay; direct: of the provider."""

    machine: Machine
    provider: FakeProvider
    relay: Relay
    url: str
    provider_url: str
    http: aiohttp.ClientSession
    direct: aiohttp.ClientSession
    anthropic: anthropic.AsyncAnthropic
    openai: openai.AsyncOpenAI

    async def get(self, path: str) -> dict:
        async with self.http.get(path) as response:
            assert response.status == 200
            return await response.json()

    @property
    def sent(self) -> bytes:
        """The body of the last request as the provider got it."""
        return self.provider.received[-1].body


Start = Callable[..., Awaitable[World]]


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start both: `await start(repack_cold=True)`. upstream: instead of the provider. by_name: the relay has
    the provider's name, not its address."""
    closing: list[Callable[[], Awaitable[None]]] = []

    async def serve(runner: web.AppRunner) -> str:
        await runner.setup()
        closing.append(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def started(upstream: str | None = None, by_name: bool = False, **chosen: object) -> World:
        machine = Machine(tmp_path)
        provider = FakeProvider(lambda: machine.true)
        at = await serve(web.AppRunner(provider.app(), auto_decompress=False, handler_cancellation=True))
        known = at.replace("127.0.0.1", "localhost") if by_name else at
        relay = Relay(
            RelaySettings(upstream=upstream or known, **{"data_dir": tmp_path, **chosen}), machine.clock()
        )
        url = await serve(make_runner(make_app(relay)))
        http, direct = (aiohttp.ClientSession(place, auto_decompress=False) for place in (url, at))
        anthropic_client = anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0)
        openai_client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        closing.extend([http.close, direct.close, anthropic_client.close, openai_client.close])
        return World(machine, provider, relay, url, at, http, direct, anthropic_client, openai_client)

    yield started
    for close in reversed(closing):
        await close()
