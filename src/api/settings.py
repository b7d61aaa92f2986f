"""The settings that hold, by the names of their options, for those who look at the server."""

import dataclasses
from pathlib import Path

from regrow.api.facts import Body
from regrow.api.port import ModelInfo
from regrow.config import EngineSettings, ServerSettings

# Those that are named otherwise.
OPTIONS = {"context": "ctx", "served_names": "served-model-name", "api_keys": "api-key"}


def settings_body(engine: EngineSettings, server: ServerSettings, info: ModelInfo) -> Body:
    """Return every setting; what was decided at start as it was decided. Of keys and of a template only
    whether there are any."""
    decided = dataclasses.replace(
        engine,
        context=info.context,
        exact=info.exact,
        tool_format=info.tool_format,
        chat_template="given" if engine.chat_template else None,
    )
    body = {
        OPTIONS.get(field.name, field.name.replace("_", "-")): _told(getattr(settings, field.name))
        for settings in (decided, server)
        for field in dataclasses.fields(settings)
    }
    return {**body, "api-key": len(server.api_keys)}


def _told(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
