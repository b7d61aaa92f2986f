"""What the handlers share."""

from aiohttp import web

from regrow.api.port import Gate
from regrow.config import ServerSettings

GATE = web.AppKey("gate", Gate)
SETTINGS = web.AppKey("settings", ServerSettings)
