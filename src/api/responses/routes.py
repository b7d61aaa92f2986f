"""/v1/responses over HTTP: create and stream, retrieve, delete, cancel, list the input, count tokens."""

import asyncio
from contextlib import aclosing

import msgspec
import structlog
from aiohttp import web

from regrow.api.body import read_body
from regrow.api.errors import Cancelled, ResponseNotFound, body_of, json_response
from regrow.api.facts import Body
from regrow.api.port import Run
from regrow.api.responses.create import Turn, turn_of
from regrow.api.responses.items import listed
from regrow.api.responses.schema import ResponsesRequest
from regrow.api.responses.store import STORE, Kept
from regrow.api.sse import EventStream
from regrow.api.state import SETTINGS
from regrow.errors import BadRequest, RegrowError

BACKGROUND = web.AppKey("background", set[asyncio.Task[None]])
PAGE = 20  # items, where no limit is given
LARGEST_PAGE = 100

log = structlog.get_logger(__name__)


async def create_response(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses"""
    asked = await read_body(request, ResponsesRequest)
    store = request.app[STORE]
    turn = turn_of(request.app, asked, [store], [] if asked.store is False else [store])
    if asked.background:
        return json_response(await _in_background(request.app, turn))
    async with turn.taken() as run:
        if asked.stream:
            return await _streamed(request, turn, run)
        async with aclosing(turn.events(run)) as events:
            async for _ in events:
                pass
        if turn.error is not None and not isinstance(turn.error, Cancelled):
            raise turn.error
        return json_response(turn.answer.body)


async def _streamed(request: web.Request, turn: Turn, run: Run) -> web.StreamResponse:
    async with EventStream(request, request.app[SETTINGS].keepalive_s) as stream:
        try:
            async with aclosing(turn.events(run)) as events:
                async for body in events:
                    last = turn.answer.status != "in_progress" and _is_last(body)
                    send = stream.end if last else stream.send
                    await send(msgspec.json.encode(body), str(body["type"]))
        except ConnectionResetError:
            raise
        except Exception as error:
            if not isinstance(error, RegrowError):
                log.exception("answer failed")
            await stream.end(msgspec.json.encode({"type": "error", **body_of(error)["error"]}), "error")
    return stream.response


def _is_last(body: Body) -> bool:
    return body["type"] in ("response.completed", "response.incomplete", "response.failed")


async def _in_background(app: web.Application, turn: Turn) -> Body:
    """Make a response that outlives its request; return it as it is at its beginning."""
    taken: asyncio.Future[Body] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            async with turn.taken() as run, aclosing(turn.events(run)) as events:
                async for _ in events:
                    if not taken.done():
                        taken.set_result(turn.answer.body)
        except Exception as error:
            if taken.done():
                log.exception("answer failed")
            else:
                taken.set_exception(error)

    task = asyncio.create_task(work())
    app[BACKGROUND].add(task)
    task.add_done_callback(app[BACKGROUND].discard)
    return await taken


async def end_background(app: web.Application) -> None:
    """Signal handler: the server stops, what ran has ended."""
    for task in app[BACKGROUND]:
        task.cancel()
    await asyncio.gather(*app[BACKGROUND], return_exceptions=True)


async def get_response(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}"""
    if request.query.get("stream") == "true":
        raise BadRequest("stream: a stream cannot be taken up again; ask without it", param="stream")
    return json_response(_kept(request).body)


async def delete_response(request: web.Request) -> web.Response:
    """DELETE /v1/responses/{id}: responses that go on from it stay; one that is being made goes on."""
    name = request.match_info["id"]
    if not request.app[STORE].drop(name):
        raise _not_found(name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.Response:
    """POST /v1/responses/{id}/cancel: returns the response, which a moment later is at its end."""
    kept = _kept(request)
    if kept.run is not None:
        await kept.run.cancel()
        return json_response({**kept.body, "status": "cancelled"})
    return json_response(kept.body)


async def list_input_items(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}/input_items"""
    items = [listed(item) for item in _kept(request).input]
    if request.query.get("order", "desc") != "asc":
        items.reverse()
    after = request.query.get("after")
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        items = items[places[0] + 1 :] if places else []
    given = request.query.get("limit", str(PAGE))
    if not given.isdigit() or not 1 <= int(given) <= LARGEST_PAGE:
        raise BadRequest(f"limit: a whole number from 1 to {LARGEST_PAGE}", param="limit")
    page = items[: int(given)]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


async def count_input_tokens(request: web.Request) -> web.Response:
    """POST /v1/responses/input_tokens"""
    asked = await read_body(request, ResponsesRequest)
    turn = turn_of(request.app, asked, [request.app[STORE]], [])
    tokens, _ = await turn.engine.plan_of(turn.request)
    return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})


def _kept(request: web.Request) -> Kept:
    name = request.match_info["id"]
    kept = request.app[STORE].get(name)
    if kept is None:
        raise _not_found(name)
    return kept


def _not_found(name: str) -> ResponseNotFound:
    return ResponseNotFound(f"no response {name!r} is kept")
