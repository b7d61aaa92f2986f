"""/v1/cache: what is kept, by size and use, and forgetting it."""

import msgspec
from aiohttp import web

from regrow.api.errors import json_response
from regrow.api.state import GATE
from regrow.errors import BadRequest


async def get_cache(request: web.Request) -> web.Response:
    report, roots, records = await request.app[GATE].engine.cache_report()
    body: dict[str, object] = msgspec.to_builtins(report)
    return json_response({**body, "roots": roots, "disk": records})


async def get_original(request: web.Request) -> web.Response:
    """Give back a text that `--repack-cold` left out of a conversation, by the name that stands there."""
    text = await request.app[GATE].engine.original(request.match_info["name"])
    if text is None:
        raise web.HTTPNotFound(text="no original of that name is kept")
    return web.Response(body=text.encode(errors="replace"), content_type="text/plain", charset="utf-8")


async def delete_cache(request: web.Request) -> web.Response:
    """Forget everything that is kept and not in use. What the slots hold stays until they are needed."""
    return json_response({"forgotten": await request.app[GATE].engine.forget()})


async def delete_root(request: web.Request) -> web.Response:
    root = request.match_info["id"]
    forgotten = await request.app[GATE].engine.forget(root)
    if not forgotten:
        raise BadRequest(f"no root {root} is kept", param="id", code="root_not_found")
    return json_response({"forgotten": forgotten})
