"""What the handlers share."""

from aiohttp import web

from regrow.api.facts import Body
from regrow.api.keys import Keys
from regrow.api.port import Gate
from regrow.config import ServerSettings

GATE = web.AppKey("gate", Gate)
SETTINGS = web.AppKey("settings", ServerSettings)
KEYS = web.AppKey("keys", Keys)
OPENAPI: web.AppKey[Body] = web.AppKey("openapi", dict)
