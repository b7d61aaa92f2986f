"""From the bytes of a request to a checked body: what msgspec cannot decode is a 400 that names the field."""

import asyncio
import re
from typing import TypeVar

import msgspec
from aiohttp import web

from regrow.api.schema import ALLOWED
from regrow.api.state import SETTINGS
from regrow.errors import BadRequest

LARGE = 64 * 1024  # bytes that are decoded in well under a millisecond
VALUES = 2_000_000  # JSON values in a body; more would hold the interpreter's lock for long, on any thread

PLACE = re.compile(r"(?s)(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?")
MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")

T = TypeVar("T", bound=msgspec.Struct)


async def read_body(request: web.Request, kind: type[T]) -> T:
    """Read and decode a JSON body, a large one on a thread; raises BadRequest, or aiohttp's 400, 408, 413
    and 415."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send the body as Content-Type: application/json")
    try:
        async with asyncio.timeout(request.app[SETTINGS].body_s):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text="the body did not arrive in time", headers={"Connection": "close"}
        ) from None
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).split())
        raise web.HTTPBadRequest(
            text=f"the body cannot be read: {reason}", headers={"Connection": "close"}
        ) from None
    return await decoded(body, kind)


async def decoded(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body, a large one on a thread; raises BadRequest as `decode` does."""
    return decode(body, kind) if len(body) < LARGE else await asyncio.to_thread(decode, body, kind)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body; raises BadRequest with `param` naming the field, e.g. "messages[0].role"."""
    if sum(map(body.count, b",[{")) > VALUES:
        raise BadRequest(f"the body has more than {VALUES:,} commas and brackets", code="invalid_json")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from None


def _field_error(message: str) -> BadRequest:
    """Turn msgspec's "what - at `$.path`" into a BadRequest."""
    place = PLACE.fullmatch(message)
    what, path = (place["what"], place["path"] or "") if place else (message, "")
    path = path.removesuffix("[...]")  # some entry of a mapping
    if missing := MISSING.fullmatch(what):
        path = f"{path}.{missing['field']}".lstrip(".")
        return BadRequest(f"{path} is missing", param=path, code="missing_required_parameter")
    general = re.sub(r"\[\d+\]", "[]", path)
    for suffix, allowed in ALLOWED.items():
        if what.startswith("Invalid") and general.endswith(suffix):
            what = f"{what}; allowed: {', '.join(allowed)}"
    subject = path or "the body"
    return BadRequest(f"{subject}: {what[:1].lower()}{what[1:]}", param=path or None, code="invalid_value")
