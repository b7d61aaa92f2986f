"""/v1/models: what is served, and under which names."""

from aiohttp import web

from regrow.api.errors import json_response
from regrow.api.port import ModelInfo
from regrow.api.state import GATE, SETTINGS
from regrow.config import ServerSettings
from regrow.errors import ModelNotFound


def served_names(info: ModelInfo, settings: ServerSettings) -> tuple[str, ...]:
    """Return the names a request may use: those of the settings, else the model's own."""
    return settings.served_names or (info.name,)


def check_served(name: str | None, info: ModelInfo, settings: ServerSettings) -> None:
    """Raise ModelNotFound where `name` is given and not served."""
    names = served_names(info, settings)
    if name is not None and name not in names:
        raise ModelNotFound(f"the model {name!r} is not served here; served: {', '.join(names)}")


async def list_models(request: web.Request) -> web.Response:
    info = request.app[GATE].engine.info
    data = [_model(name, info) for name in served_names(info, request.app[SETTINGS])]
    return json_response({"object": "list", "data": data})


async def get_model(request: web.Request) -> web.Response:
    info = request.app[GATE].engine.info
    name = request.match_info["name"]
    check_served(name, info, request.app[SETTINGS])
    return json_response(_model(name, info))


def _model(name: str, info: ModelInfo) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "regrow",
        "context_length": info.context,
        "capabilities": ["chat", "completions"] if info.has_template else ["completions"],
    }
