"""The event loop is never blocked: four streams run and a long prompt is read, over HTTP, in one process.

A chunk of reading is the longest piece of work there is. Were it, or anything of its size, done in the loop,
the loop would be late by that much; so the bound is half of a chunk's own time, whatever machine this is.
"""

import asyncio
import time
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from regrow import Engine, EngineSettings
from regrow.api.app import make_app, make_runner
from regrow.config import ServerSettings

MODEL = "random:llama"
STREAMS = 4
CHUNK = 4096
TICK_S = 0.002


class LoopLag:
    """Within the block, how late the event loop was at worst: `longest`, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def __aenter__(self) -> "LoopLag":
        self._loop = asyncio.get_running_loop()
        self._wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._due = self._loop.time() + TICK_S
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self.longest = max(self.longest, self._loop.time() - self._due)
        self._wait()


@dataclass(frozen=True)
class Load:
    """What a run under load gave, in seconds."""

    longest_lag: float
    chunk: float


async def block(request: web.Request) -> web.Response:
    """A handler as no handler may be."""
    end = time.perf_counter() + float(request.query["seconds"])
    while time.perf_counter() < end:
        pass
    return web.Response()


async def stream(http: aiohttp.ClientSession, text: str, answers: asyncio.Event, max_tokens: int) -> None:
    """Read a streamed answer to its end; set `answers` at its first text."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if b'"delta":{"content":"' in line:
                answers.set()


async def under_load(engine: Engine, http: aiohttp.ClientSession, *, blocked: bool) -> Load:
    """Read a prompt of two chunks beside running streams; with `blocked`, a handler then blocks for
    as long as a chunk took."""
    answering = [asyncio.Event() for _ in range(STREAMS)]
    running = [asyncio.create_task(stream(http, "Go on.", event, 30_000)) for event in answering]
    await asyncio.gather(*(event.wait() for event in answering))
    before = (await engine.status()).device.counters
    async with LoopLag() as lag:
        await stream(http, "word " * (2 * CHUNK // 5 - 20), asyncio.Event(), 1)
        after = (await engine.status()).device.counters
        chunk = (after.read_s - before.read_s) / (after.chunks - before.chunks)
        if blocked:
            await http.get("/block", params={"seconds": str(chunk)})
    assert not any(task.done() for task in running)
    assert after.steps > before.steps
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    return Load(lag.longest, chunk)


async def load(*, blocked: bool) -> Load:
    settings = EngineSettings(model=MODEL, parallel=STREAMS + 1, chunk=CHUNK)
    async with Engine.open(settings) as engine:
        app = make_app(engine, ServerSettings())
        app.router.add_get("/block", block)
        runner = make_runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
            try:
                return await under_load(engine, http, blocked=blocked)
            finally:
                await runner.cleanup()


async def test_the_loop_is_never_late_by_half_a_chunk() -> None:
    found = await load(blocked=False)
    assert found.longest_lag < found.chunk / 2


async def test_a_handler_that_blocks_for_a_chunk_is_caught_by_this_measure() -> None:
    found = await load(blocked=True)
    assert found.longest_lag > found.chunk / 2
