"""The web application: routes, middlewares, limits."""

from aiohttp import web

from regrow.api.access import access, add_request_id
from regrow.api.guard import guard, shows
from regrow.api.keys import Keys, keyed
from regrow.api.openapi import document
from regrow.api.port import EnginePort, Gate
from regrow.api.routes import ROUTES
from regrow.api.state import GATE, KEYS, OPENAPI, SETTINGS
from regrow.config import ServerSettings


def make_app(engine: EnginePort | None, settings: ServerSettings) -> web.Application:
    """Return the application; without an engine it answers as loading until `app[GATE]` is given one."""
    keys = Keys(settings.api_keys)
    app = web.Application(
        client_max_size=settings.body_limit,
        middlewares=[access, guard(settings.host, settings.cors), keyed(keys, ROUTES)],
    )
    app[GATE] = Gate(engine)
    app[SETTINGS] = settings
    app[KEYS] = keys
    app[OPENAPI] = document(ROUTES)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(shows(settings.cors))
    app.add_routes(web.route(route.method, route.path, route.handler) for route in ROUTES)
    return app


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
