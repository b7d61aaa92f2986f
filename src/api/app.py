"""The web application: routes, middlewares, limits."""

from aiohttp import web

from regrow.api.access import access, add_request_id
from regrow.api.guard import guard
from regrow.api.port import EnginePort, Gate
from regrow.api.routes import ROUTES
from regrow.api.state import GATE, SETTINGS
from regrow.config import ServerSettings


def make_app(engine: EnginePort | None, settings: ServerSettings) -> web.Application:
    """Return the application; without an engine it answers as loading until `app[GATE]` is given one."""
    app = web.Application(client_max_size=settings.body_limit, middlewares=[access, guard(settings.host)])
    app[GATE] = Gate(engine)
    app[SETTINGS] = settings
    app.on_response_prepare.append(add_request_id)
    app.add_routes(web.route(route.method, route.path, route.handler) for route in ROUTES)
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """Return the runner to serve `app` with: the handler of a client that goes away is cancelled at once."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
