"""/v1/chat/completions, streamed and not."""

import time

import msgspec
import structlog
from aiohttp import web

from regrow.api.answer import ChatAnswer
from regrow.api.body import read_body
from regrow.api.errors import json_response
from regrow.api.intake import chat_request
from regrow.api.models import check_served
from regrow.api.runs import ended_properly, events_of, submitted, whole_answer
from regrow.api.schema import ChatRequest
from regrow.api.sse import EventStream
from regrow.api.state import GATE, SETTINGS


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer one chat request."""
    settings = request.app[SETTINGS]
    engine = request.app[GATE].engine
    body = await read_body(request, ChatRequest)
    check_served(body.model, engine.info, settings)
    async with submitted(engine, chat_request(body, engine.info, settings.message_limit)) as run:
        structlog.contextvars.bind_contextvars(request=run.id)
        answer = ChatAnswer(
            id=f"chatcmpl-{run.id}",
            model=body.model,
            created=int(time.time()),
            usage=body.stream_options is not None and bool(body.stream_options.include_usage),
            progress=body.regrow is not None and bool(body.regrow.progress),
            logprobs=bool(body.logprobs),
        )
        if not body.stream:
            return json_response(answer.whole(await whole_answer(run)))
        async with EventStream(request, settings.keepalive_s) as stream, ended_properly(stream):
            await stream.send(msgspec.json.encode(answer.opening()))
            async for event in events_of(run):
                for chunk in answer.chunks(event):
                    await stream.send(msgspec.json.encode(chunk))
        return stream.response
