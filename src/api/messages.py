"""/v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak to them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog
from aiohttp import web

from regrow.api.body import read_body
from regrow.api.errors import json_response, message_error
from regrow.api.facts import Body, facts
from regrow.api.intake import chat_request
from regrow.api.messages_answer import MessageStream, whole_message
from regrow.api.messages_prompt import as_chat
from regrow.api.messages_schema import CountRequest, MessagesRequest
from regrow.api.models import check_served
from regrow.api.runs import BrokenOff, submitted
from regrow.api.said import said_by, whole_said
from regrow.api.sse import EventStream
from regrow.api.state import GATE, SETTINGS
from regrow.errors import RegrowError

log = structlog.get_logger(__name__)


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer one request."""
    settings = request.app[SETTINGS]
    engine = request.app[GATE].engine
    body = await read_body(request, MessagesRequest)
    check_served(body.model, engine.info, settings)
    chat = as_chat(body, settings.keep_stamps)
    asked = chat_request(chat, engine.info, settings.message_limit)
    parallel = chat.parallel_tool_calls is not False
    async with submitted(engine, asked) as run:
        structlog.contextvars.bind_contextvars(request=run.id)
        id_ = f"msg_{run.id}"
        if not body.stream:
            answer = await whole_said(engine, run, asked, parallel)
            return json_response(whole_message(id_, body.model, answer))
        told = MessageStream(id_, body.model)
        async with EventStream(request, settings.keepalive_s) as stream, _ended_properly(stream):
            async for event in said_by(engine, run, asked, parallel):
                for part in told.events(event):
                    await _send(stream, part)
        return stream.response


async def count_tokens(request: web.Request) -> web.Response:
    """Answer with the number of tokens that a request would read."""
    settings = request.app[SETTINGS]
    engine = request.app[GATE].engine
    body = await read_body(request, CountRequest)
    check_served(body.model, engine.info, settings)
    chat = as_chat(body, settings.keep_stamps)
    tokens, _ = await engine.plan_of(chat_request(chat, engine.info, settings.message_limit))
    return json_response({"input_tokens": len(tokens)})


async def _send(stream: EventStream, part: Body) -> None:
    await stream.send(msgspec.json.encode(part), str(part["type"]))


@asynccontextmanager
async def _ended_properly(stream: EventStream) -> AsyncIterator[None]:
    """Whatever happens in the block, the stream gets its end: that of a message, or an error."""
    last: Body = {"type": "message_stop"}
    try:
        yield
    except ConnectionResetError:
        raise
    except BrokenOff as broken:
        last = {**message_error(broken.error), **facts(broken.end)}
    except Exception as error:
        if not isinstance(error, RegrowError):
            log.exception("answer failed")
        last = message_error(error)
    await stream.end(msgspec.json.encode(last), str(last["type"]))
