"""/openapi.json: what can be asked, written from the very types that requests are checked with."""

import re
from collections.abc import Iterable

import msgspec
from aiohttp import web

from regrow import __version__
from regrow.api.errors import json_response
from regrow.api.facts import Body
from regrow.api.route import Route
from regrow.api.state import OPENAPI

SCHEMAS = "#/components/schemas/{name}"
PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")
ERROR = {"description": "An error, in OpenAI's shape (on /v1/messages in Anthropic's)."}
DONE = {"description": "Done."}


async def openapi(request: web.Request) -> web.Response:
    return json_response(request.app[OPENAPI])


def document(routes: Iterable[Route]) -> Body:
    """Return the OpenAPI 3.1 document of `routes`."""
    routes = list(routes)
    bodies = list({route.body: None for route in routes if route.body is not None})
    schemas, components = msgspec.json.schema_components(bodies, schema_hook=_any_value, ref_template=SCHEMAS)
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, Body] = {}
    for route in routes:
        operation: Body = {"summary": route.about, "responses": {"200": DONE, "default": ERROR}}
        if names := PARAMETER.findall(route.path):
            operation["parameters"] = [_in_path(name) for name in names]
        if route.body is not None:
            content = {"application/json": {"schema": schema_of[route.body]}}
            operation["requestBody"] = {"required": True, "content": content}
        if route.keyless:
            operation["security"] = []
        paths.setdefault(PARAMETER.sub(r"{\1}", route.path), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "regrow", "version": __version__},
        "security": [{"bearer": []}, {"x-api-key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _in_path(name: str) -> Body:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _any_value(kind: type) -> Body:
    if kind is object:
        return {"description": "Any JSON value."}
    raise NotImplementedError
