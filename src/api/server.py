"""The server's life: the port answers from the first moment, the model loads, requests are served; at
SIGINT or SIGTERM the engine drains, then everything closes. A second signal ends the process at once.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from aiohttp import web

from regrow.api.app import make_app, make_runner
from regrow.api.models import served_names
from regrow.api.port import EnginePort
from regrow.api.state import GATE
from regrow.config import ServerSettings
from regrow.errors import BadConfig, EngineGaveUp

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130


async def serve(
    settings: ServerSettings,
    opening: AbstractAsyncContextManager[EnginePort],
    say: Callable[[str], None],
) -> None:
    """Serve until a signal comes. `opening` loads the engine; what it raises ends the server.

    Raises BadConfig where the port cannot be opened, EngineGaveUp after a storm of restarts.
    """
    app = make_app(None, settings)
    gate = app[GATE]
    runner = make_runner(app)
    await runner.setup()
    stop = _stop_on_signal(asyncio.current_task(), lambda: gate.loaded is None, say)
    try:
        url = await _bind(runner, settings)
        say(f"Loading the model; {url}/ready tells when it is done.")
        async with opening as engine:
            model = served_names(engine.info, settings)[0]
            gate.open(engine, model)
            keyed = bool(settings.api_keys)
            say(where_to_look(url, model, engine.info.has_template, _program(), keyed))
            await _stopped(stop, engine)
            say("Stopping: what runs may finish. Press Ctrl-C again to end at once.")
            await engine.drain()
            await runner.cleanup()
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
        await runner.cleanup()


async def _stopped(stop: asyncio.Event, engine: EnginePort) -> None:
    """Wait for a signal. Raises EngineGaveUp where the engine gives up first, once its clients were told."""
    stopping, failing = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(engine.given_up())
    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not failing.cancel():
        raise EngineGaveUp(f"the engine has given up: {failing.result()}")


def _stop_on_signal(
    task: "asyncio.Task[None] | None", loading: Callable[[], bool], say: Callable[[str], None]
) -> asyncio.Event:
    """Return an event that the first signal sets; while `loading`, it also cancels `task`, and says so."""
    stop = asyncio.Event()

    def hear() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()
        if task is not None and loading():
            say("Stopping with the next step of loading. Press Ctrl-C again to end at once.")
            task.cancel()

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, hear)
    return stop


async def _bind(runner: web.AppRunner, settings: ServerSettings) -> str:
    """Open the port and return the server's address as a URL."""
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        reason = error.strerror or error
        raise BadConfig(f"--port: {settings.host}:{settings.port} cannot be opened: {reason}") from None
    host, port, *_ = runner.addresses[0]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _program() -> str:
    """Return how this program was started, so that what is said to the user can be typed as it stands."""
    return sys.argv[0] if Path(sys.argv[0]).name == "regrow" else "python -m regrow"


def where_to_look(url: str, model: str, has_template: bool, program: str, keyed: bool) -> str:
    """Return what the server says once the model is loaded. keyed: requests must show a key."""
    if has_template:
        note, route = "", "chat/completions"
        prompt = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
        chat = f"{program} chat --url {url}      a chat in the terminal\n  "
    else:
        note, route, chat = "\nIt has no chat template: completions only.", "completions", ""
        prompt = '"prompt": "Once upon a time"'
    key = '-H "x-api-key: $REGROW_API_KEY" \\\n    ' if keyed else ""
    return f"""
Serving {model} at {url}/v1{note}

  curl {url}/v1/{route} -H 'Content-Type: application/json' \\
    {key}-d '{{"model": "{model}",
         {prompt}}}'

  {chat}{url}/      chat and monitor in the browser

Ctrl-C stops it.
"""
