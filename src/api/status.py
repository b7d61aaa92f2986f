"""/health (the process lives), /ready (it takes work), /v1/status (what it is doing),
/metrics (the same and more, for Prometheus)."""

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from regrow import __version__
from regrow.api.errors import json_response
from regrow.api.figures import exposition
from regrow.api.models import served_names
from regrow.api.settings import settings_body
from regrow.api.state import GATE, SETTINGS


async def health(request: web.Request) -> web.Response:
    return json_response({"status": request.app[GATE].state, "version": __version__})


async def ready(request: web.Request) -> web.Response:
    state = request.app[GATE].state
    return json_response({"ready": state == "ready", "status": state}, 200 if state == "ready" else 503)


async def status(request: web.Request) -> web.Response:
    gate = request.app[GATE]
    settings = request.app[SETTINGS]
    info = gate.engine.info
    engine: dict[str, object] = msgspec.to_builtins(await gate.engine.status())
    facts = {
        "version": __version__,
        "status": gate.state,
        "served_names": served_names(info, settings),
        "settings": settings_body(gate.engine.settings, settings, info),
        "recent": gate.recent.answers,
    }
    return json_response({**facts, **engine})


async def metrics(request: web.Request) -> web.Response:
    gate = request.app[GATE]
    model = served_names(gate.engine.info, request.app[SETTINGS])[0]
    figures = exposition(await gate.engine.status(), model)
    counted = gate.metrics.exposition() if gate.metrics else b""
    return web.Response(body=counted + figures, headers={"Content-Type": CONTENT_TYPE_LATEST})
