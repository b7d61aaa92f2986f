"""The server's life: it answers while the model loads, drains at a signal, and leaves nothing behind."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from regrow.api.server import serve, where_to_look
from regrow.config import ServerSettings
from regrow.errors import BadConfig, EngineGaveUp, ModelRefused
from tests.api.conftest import chat_body
from tests.api.stub import TOKENS, Hold, StubEngine, finished


class Life:
    """One server: its engine loads when `load` is set, or fails with `fault`; what it says is in `said`."""

    def __init__(self, engine: StubEngine, fault: Exception | None = None) -> None:
        self.engine = engine
        self.load = asyncio.Event()
        self.fault = fault
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.closed = False

    @asynccontextmanager
    async def opening(self) -> AsyncIterator[StubEngine]:
        await self.load.wait()
        if self.fault is not None:
            raise self.fault
        try:
            yield self.engine
        finally:
            self.closed = True

    def begin(self, **settings: object) -> "asyncio.Task[None]":
        chosen = ServerSettings(port=0, **settings)
        return asyncio.create_task(serve(chosen, self.opening(), self.said.put_nowait))

    async def url(self) -> str:
        """Wait until the port is open; returns the address."""
        return (await self.said.get()).split("; ")[1].partition("/ready")[0]


async def get(url: str, path: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(url + path) as response:
        return response.status


async def test_the_port_answers_before_the_model_is_loaded(engine: StubEngine) -> None:
    life = Life(engine)
    server = life.begin()
    url = await life.url()
    assert [await get(url, path) for path in ("/health", "/ready", "/v1/models")] == [200, 503, 503]
    life.load.set()
    assert f"{url}/v1/chat/completions" in await life.said.get()
    assert [await get(url, path) for path in ("/health", "/ready", "/v1/models")] == [200, 200, 200]
    signal.raise_signal(signal.SIGTERM)
    await server
    assert life.closed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_at_a_signal_what_runs_may_finish_and_nothing_new_is_taken(number: signal.Signals) -> None:
    hold = Hold()
    engine = StubEngine([*TOKENS, hold, finished()])
    engine.drain_gate.clear()
    life = Life(engine)
    life.load.set()
    server = life.begin()
    url = await life.url()
    async with aiohttp.ClientSession(url) as http:
        running = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        run = await engine.started.get()
        await run.waiting.wait()
        await life.said.get()
        signal.raise_signal(number)
        await life.said.get()
        assert await get(url, "/ready") == 503
        async with http.post("/v1/chat/completions", json=chat_body()) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
        hold.gate.set()
        async with await running as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "Grüße dir!"
        engine.drain_gate.set()
        await server
    assert life.closed


async def test_an_engine_that_gives_up_ends_the_server_with_its_reason(engine: StubEngine) -> None:
    life = Life(engine)
    life.load.set()
    server = life.begin()
    url = await life.url()
    assert await get(url, "/ready") == 200
    engine.fails.set()
    with pytest.raises(EngineGaveUp, match="given up: device crashed 4 times within 60 s"):
        await server
    assert life.closed


async def test_a_signal_ends_the_loading(engine: StubEngine) -> None:
    life = Life(engine)
    server = life.begin()
    await life.url()
    signal.raise_signal(signal.SIGINT)
    await server


ENDLESS_DRAIN = """
import asyncio, contextlib
from regrow.api.server import serve
from regrow.config import ServerSettings
from tests.api.stub import StubEngine

@contextlib.asynccontextmanager
async def opening():
    engine = StubEngine()
    engine.drain_gate.clear()
    yield engine

asyncio.run(serve(ServerSettings(port=0), opening(), lambda text: print(text.split()[0], flush=True)))
"""


async def test_a_second_signal_ends_a_drain_that_takes_too_long() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ENDLESS_DRAIN), stdout=asyncio.subprocess.PIPE
    )
    assert [await process.stdout.readline() for _ in range(2)] == [b"Loading\n", b"Serving\n"]
    process.send_signal(signal.SIGINT)
    assert await process.stdout.readline() == b"Stopping:\n"
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130


async def test_a_model_that_is_refused_ends_the_server_with_the_reason(engine: StubEngine) -> None:
    life = Life(engine, ModelRefused("no such family"))
    server = life.begin()
    url = await life.url()
    life.load.set()
    with pytest.raises(ModelRefused, match="no such family"):
        await server
    with pytest.raises(aiohttp.ClientConnectionError):
        await get(url, "/health")


async def test_a_port_in_use_is_told_with_its_option(engine: StubEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadConfig, match=rf"--port: 127\.0\.0\.1:{port} cannot be opened: .*in use"):
            await serve(ServerSettings(port=port), Life(engine).opening(), print)


async def test_being_cancelled_from_outside_is_not_taken_for_a_signal(engine: StubEngine) -> None:
    life = Life(engine)
    server = life.begin()
    await life.url()
    server.cancel()
    with pytest.raises(asyncio.CancelledError):
        await server


@pytest.mark.parametrize(
    ("has_template", "route", "prompt"),
    [(True, "chat/completions", "messages"), (False, "completions", "prompt")],
)
@pytest.mark.parametrize("keyed", [False, True])
def test_what_the_server_says_holds_a_request_to_copy_and_fits_100_columns(
    has_template: bool, route: str, prompt: str, keyed: bool
) -> None:
    url, name, program = "http://127.0.0.1:8420", "SmolLM2-135M-Instruct", ".venv/bin/regrow"
    text = where_to_look(url, name, has_template, program, keyed)
    assert (' -H "x-api-key: $REGROW_API_KEY" \\\n' in text) is keyed
    assert f"curl http://127.0.0.1:8420/v1/{route} " in text
    assert "Serving SmolLM2-135M-Instruct at http://127.0.0.1:8420/v1\n" in text
    body = json.loads(text.partition("-d '")[2].partition("'\n")[0])
    assert body["model"] == "SmolLM2-135M-Instruct"
    assert prompt in body
    assert ("completions only" in text) is (".venv/bin/regrow chat --url" not in text) is not has_template
    assert max(map(len, text.splitlines())) <= 100
