"""GET /: the page with chat, monitor and about, as one document that needs nothing from anywhere else.

It is put together once from the files beside this one. The policy in its header lets the browser run the one
script and use the one style sheet that it was made with, by their hashes, and speak to this server alone.
The page itself is served without a key, since a browser shows none when it opens an address; all that it
shows it asks for, and the user's key with it.
"""

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from aiohttp import web

SCRIPTS = ("dom.js", "server.js", "markup.js", "charts.js", "chat.js", "monitor.js", "about.js", "main.js")


@dataclass(frozen=True, slots=True)
class Page:
    """policy: the value of Content-Security-Policy."""

    body: bytes
    policy: str


PAGE = web.AppKey("page", Page)


async def page(request: web.Request) -> web.Response:
    made = request.app[PAGE]
    headers = {
        "Content-Security-Policy": made.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return web.Response(body=made.body, content_type="text/html", charset="utf-8", headers=headers)


def assemble() -> Page:
    """Return the page, with its style and scripts in it."""
    style = _text("page.css")
    script = "\n".join(_text(name) for name in SCRIPTS)
    body = _text("page.html").replace("/* page.css */", style).replace("/* scripts */", script)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(body.encode(), "; ".join(f"{name} {value}" for name, value in policy.items()))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
