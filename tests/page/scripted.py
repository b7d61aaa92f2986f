"""The server with a scripted engine, on a thread of its own: Playwright's loop has this one."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

from aiohttp import web

from regrow.api.app import make_app, make_runner
from regrow.config import ServerSettings
from tests.api.stub import StubEngine

Facts = dict[str, Any]
IDLE: Facts = {"phase": "idle", "request": None, "length": 0, "checkpoints": [], "version": 1}
NOTHING: Facts = {"prompt": 0, "reused": 0, "position": 0, "drawn": 0}
MODEL: Facts = {
    "name": "stub",
    "context": 4096,
    "exact": "cache",
    "created": 1_700_000_000,
    "default_sampling": {"temperature": 0.6, "seed": None},
    "has_template": True,
    "hybrid": True,
    "bytes_per_token": 1024,
    "bytes_per_checkpoint": 2048,
}
DOING: Facts = {
    "ready": True,
    "model": MODEL,
    "engine": {
        "waiting": 0,
        "running": 0,
        "draining": False,
        "totals": {"finished": 0, "failed": 0, "read": 0, "reused": 0, "drawn": 0, "misses": {}},
        "copied": {},
    },
    "slots": [{"slot": 0, **IDLE, **NOTHING}],
    "cache": {"budget": 1 << 30, "used": {}, "evictions": {}, "refusals": 0},
    "device": {"counters": {"read_tokens": 0, "read_s": 0.0, "drawn": 0, "step_s": 0.0}},
    "disk": None,
}


class Scripted:
    """engine: only for the server's thread, but for what is set before a request comes."""

    def __init__(self, engine: StubEngine, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.engine = engine
        self.url = url
        self._loop = loop

    def do(self, function: Callable[[], object]) -> None:
        """Call a function on the server's thread."""
        done: Future[object] = Future()
        self._loop.call_soon_threadsafe(lambda: done.set_result(function()))
        done.result(20)


@contextlib.contextmanager
def scripted(engine: StubEngine, **settings: object) -> Iterator[Scripted]:
    """Serve a scripted engine until the end of the block."""
    if "model" not in cast(Facts, engine.doing):
        engine.doing = DOING
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = Future()

    async def serve() -> None:
        app = make_app(engine, ServerSettings(**settings))  # type: ignore[arg-type]
        runner = make_runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stop = asyncio.Event()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set_result((asyncio.get_running_loop(), stop, url))
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    loop, stop, url = started.result(20)
    try:
        yield Scripted(engine, loop, url)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
