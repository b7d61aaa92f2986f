"""The relay's life: it serves until SIGINT or SIGTERM; running answers may finish; its book is saved."""

import asyncio
import os
import signal
from collections.abc import Callable

from aiohttp import web
from yarl import URL

from regrow.api.relay.app import Relay, make_app, make_runner
from regrow.config import RelaySettings
from regrow.errors import BadConfig

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130


def check(settings: RelaySettings) -> None:
    """Raises BadConfig where the settings make no sense."""
    url = URL(settings.upstream)
    if url.scheme not in ("http", "https") or not url.host or url.query_string or url.fragment or url.user:
        raise BadConfig("--upstream: give the provider's URL alone, such as https://api.anthropic.com")
    if settings.dry_run and not (settings.repack_cold or settings.prune):
        raise BadConfig("--dry-run: say what to try: --repack-cold or --prune")


async def serve_relay(settings: RelaySettings, say: Callable[[str], None]) -> None:
    """Serve until a signal comes; a second one ends the process. Raises BadConfig."""
    try:
        relay = Relay(settings)
    except OSError as error:
        raise BadConfig(f"--data-dir: {settings.data_dir}: {error.strerror}") from None
    runner = make_runner(make_app(relay))
    await runner.setup()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, lambda: os._exit(INTERRUPTED) if stop.is_set() else stop.set())
    try:
        say(where_to_look(await _bind(runner, settings), settings))
        await stop.wait()
        say("Stopping: what runs may finish. Press Ctrl-C again to end at once.")
    finally:
        await runner.cleanup()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _bind(runner: web.AppRunner, settings: RelaySettings) -> str:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        reason = error.strerror or error
        raise BadConfig(f"--port: {settings.host}:{settings.port} cannot be opened: {reason}") from None
    host, port, *_ = runner.addresses[0]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def where_to_look(url: str, settings: RelaySettings) -> str:
    """Return what the relay says once it is up."""
    opted = [name for name in ("repack_cold", "prune") if getattr(settings, name)]
    changes = " and ".join(f"--{name.replace('_', '-')}" for name in opted) or "nothing"
    tried = " (a dry run: decided and logged, not done)" if settings.dry_run else ""
    return f"""
Relaying {url} to {settings.upstream}; it may change: {changes}{tried}.
State and prices are kept in {settings.data_dir}.

  ANTHROPIC_BASE_URL={url}        for Anthropic's clients
  OPENAI_BASE_URL={url}/v1        for OpenAI's clients
  {url}/relay/status      what it did and saved; {url}/metrics for Prometheus

Ctrl-C stops it.
"""
