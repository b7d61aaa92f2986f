"""The web application: routes, middlewares, limits."""

from aiohttp import web

from regrow.api.access import access, add_request_id
from regrow.api.cache import delete_cache, delete_root, get_cache
from regrow.api.chat import chat_completions
from regrow.api.completions import completions
from regrow.api.guard import guard
from regrow.api.models import get_model, list_models
from regrow.api.port import EnginePort, Gate
from regrow.api.state import GATE, SETTINGS
from regrow.api.status import health, ready, status
from regrow.api.tokens import apply_template, detokenize, tokenize
from regrow.config import ServerSettings


def make_app(engine: EnginePort | None, settings: ServerSettings) -> web.Application:
    """Return the application; without an engine it answers as loading until `app[GATE]` is given one."""
    app = web.Application(client_max_size=settings.body_limit, middlewares=[access, guard(settings.host)])
    app[GATE] = Gate(engine)
    app[SETTINGS] = settings
    app.on_response_prepare.append(add_request_id)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.post("/apply-template", apply_template),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{name:.+}", get_model),
            web.get("/v1/status", status),
            web.get("/v1/cache", get_cache),
            web.delete("/v1/cache", delete_cache),
            web.delete("/v1/cache/roots/{id}", delete_root),
            web.get("/health", health),
            web.get("/ready", ready),
        ]
    )
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """Return the runner to serve `app` with: the handler of a client that goes away is cancelled at once."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
