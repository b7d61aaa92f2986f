"""/v1/chat/completions, streamed and not."""

import time
from collections.abc import Sequence

import msgspec
import structlog
from aiohttp import web

from regrow.actors.events import Finished
from regrow.api.answer import ChatAnswer
from regrow.api.batch import Batch, submitted_together
from regrow.api.body import read_body
from regrow.api.errors import json_response
from regrow.api.facts import Body
from regrow.api.intake import chat_request, forks
from regrow.api.models import check_served
from regrow.api.port import Run
from regrow.api.runs import ended_properly
from regrow.api.said import Ended, WholeAnswer, said_by, whole_said
from regrow.api.schema import ChatRequest
from regrow.api.sse import EventStream
from regrow.api.state import GATE, SETTINGS


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer one chat request."""
    settings = request.app[SETTINGS]
    engine = request.app[GATE].engine
    body = await read_body(request, ChatRequest)
    check_served(body.model, engine.info, settings)
    requests = forks(chat_request(body, engine.info, settings.message_limit), body.n or 1)
    parallel = body.parallel_tool_calls is not False
    async with submitted_together(engine, requests) as batch:
        structlog.contextvars.bind_contextvars(request=batch.runs[0].id)
        answer = ChatAnswer(
            id=f"chatcmpl-{batch.runs[0].id}",
            model=body.model,
            created=int(time.time()),
            choices=len(requests),
            usage=body.stream_options is not None and bool(body.stream_options.include_usage),
            progress=body.regrow is not None and bool(body.regrow.progress),
            logprobs=bool(body.logprobs),
        )
        if not body.stream:
            return json_response(answer.whole(await _whole(batch, parallel)))
        async with EventStream(request, settings.keepalive_s) as stream, ended_properly(stream):
            await _stream(batch, parallel, answer, stream)
        return stream.response


async def _whole(batch: Batch, parallel: bool) -> list[WholeAnswer]:
    answers: dict[int, WholeAnswer] = {}

    async def follow(index: int, run: Run) -> None:
        answers[index] = await whole_said(batch.engine, run, batch.requests[index], parallel)

    await batch.each(follow)
    return [answers[index] for index in sorted(answers)]


async def _stream(batch: Batch, parallel: bool, answer: ChatAnswer, stream: EventStream) -> None:
    ends: dict[int, Finished] = {}

    async def send(chunks: Sequence[Body]) -> None:
        for chunk in chunks:
            await stream.send(msgspec.json.encode(chunk))

    async def follow(index: int, run: Run) -> None:
        async for event in said_by(batch.engine, run, batch.requests[index], parallel):
            await send(answer.chunks(index, event))
            if isinstance(event, Ended):
                ends[index] = event.end

    await send(answer.opening())
    await batch.each(follow)
    await send(answer.closing([ends[index] for index in sorted(ends)]))
