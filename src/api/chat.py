"""/v1/chat/completions, streamed and not.

On every way out of a handler (answer complete, error, client gone: then the handler is cancelled) the run is
cancelled, which has no effect once it has ended. Until the engine has taken the request an error is an HTTP
status; in a stream a later one is an error event and a proper end.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog
from aiohttp import web

from regrow.actors.events import Failed, Finished, Token
from regrow.api.answer import ChatAnswer
from regrow.api.body import read_body
from regrow.api.errors import Cancelled, body_of, json_response
from regrow.api.intake import generate_request
from regrow.api.models import check_served
from regrow.api.port import EnginePort, Run
from regrow.api.schema import ChatRequest
from regrow.api.sse import DONE, EventStream
from regrow.api.state import GATE, SETTINGS
from regrow.errors import ActorDown, RegrowError
from regrow.policy.request import GenerateRequest

log = structlog.get_logger(__name__)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer one chat request."""
    settings = request.app[SETTINGS]
    engine = request.app[GATE].engine
    body = await read_body(request, ChatRequest)
    check_served(body.model, engine.info, settings)
    async with submitted(engine, generate_request(body, engine.info, settings.message_limit)) as run:
        structlog.contextvars.bind_contextvars(request=run.id)
        answer = ChatAnswer(
            id=f"chatcmpl-{run.id}",
            model=body.model,
            created=int(time.time()),
            usage=body.stream_options is not None and bool(body.stream_options.include_usage),
            progress=body.regrow is not None and bool(body.regrow.progress),
        )
        if not body.stream:
            return await _whole(run, answer)
        async with EventStream(request, settings.keepalive_s) as stream:
            await _stream(run, answer, stream)
        return stream.response


@asynccontextmanager
async def submitted(engine: EnginePort, request: GenerateRequest) -> AsyncIterator[Run]:
    """A run that does not outlive its handler, also where the client leaves while the engine takes it."""
    submitting = asyncio.create_task(engine.submit(request))
    try:
        run = await asyncio.shield(submitting)
    except asyncio.CancelledError:
        with suppress(RegrowError):
            await (await submitting).cancel()
        raise
    try:
        yield run
    finally:
        await run.cancel()


async def _whole(run: Run, answer: ChatAnswer) -> web.Response:
    texts = []
    async for event in run:
        match event:
            case Token():
                texts.append(event.text)
            case Finished(reason="cancelled"):
                raise Cancelled("the answer was cancelled")
            case Finished():
                return json_response(answer.whole("".join(texts) + event.text, event))
            case Failed():
                raise event.error
    raise ActorDown("the answer broke off")


async def _stream(run: Run, answer: ChatAnswer, stream: EventStream) -> None:
    try:
        await stream.send(msgspec.json.encode(answer.opening()))
        async for event in run:
            for chunk in answer.chunks(event):
                await stream.send(msgspec.json.encode(chunk))
    except ConnectionResetError:
        raise
    except Exception as error:
        if not isinstance(error, RegrowError):
            log.exception("answer failed")
        await stream.send(msgspec.json.encode(body_of(error)))
    await stream.end(DONE)
