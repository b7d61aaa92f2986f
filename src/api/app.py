"""The web application: routes, middlewares, limits."""

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from regrow.api.access import access, add_request_id
from regrow.api.guard import guard, shows
from regrow.api.keys import Keys, keyed
from regrow.api.models import served_names
from regrow.api.openapi import document
from regrow.api.page.page import PAGE, assemble
from regrow.api.port import EnginePort, Gate
from regrow.api.responses.routes import BACKGROUND, end_background
from regrow.api.responses.store import STORE, ResponseStore
from regrow.api.routes import ROUTES
from regrow.api.socket import SOCKETS, close_sockets
from regrow.api.state import GATE, KEYS, OPENAPI, SETTINGS
from regrow.config import ServerSettings

LAG_EVERY_S = 0.25


def make_app(engine: EnginePort | None, settings: ServerSettings) -> web.Application:
    """Return the application; without an engine it answers as loading until `app[GATE]` opens."""
    keys = Keys(settings.api_keys)
    app = web.Application(
        client_max_size=settings.body_limit,
        middlewares=[access, guard(settings.host, settings.cors), keyed(keys, ROUTES)],
    )
    app[GATE] = Gate()
    if engine is not None:
        app[GATE].open(engine, served_names(engine.info, settings)[0])
    app[SETTINGS] = settings
    app[SOCKETS] = set()
    app[STORE] = ResponseStore()
    app[BACKGROUND] = set()
    app[KEYS] = keys
    app[OPENAPI] = document(ROUTES)
    app[PAGE] = assemble()
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(shows(settings.cors))
    app.on_shutdown.extend((close_sockets, end_background))
    app.cleanup_ctx.append(_loop_lag)
    app.add_routes(web.route(route.method, route.path, route.handler) for route in ROUTES)
    return app


async def _loop_lag(app: web.Application) -> AsyncIterator[None]:
    """While the application runs, count how late its event loop is."""

    async def watch() -> None:
        loop, gate = asyncio.get_running_loop(), app[GATE]
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            if gate.metrics is not None:
                gate.metrics.lag(loop.time() - due)

    watching = asyncio.create_task(watch())
    yield
    watching.cancel()


def make_runner(app: web.Application) -> web.AppRunner:
    """Return the runner to serve `app` with: the handler of a client that goes away is cancelled at once, and
    a connection on which no whole head of a request arrives in time is closed."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=5.0,
        keepalive_timeout=app[SETTINGS].idle_s,
    )
