"""/v1/completions, streamed and not: prompts as they are, without a chat template."""

import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog
from aiohttp import web

from regrow.actors.events import Finished, Logprob, ReadDone, ReadProgress
from regrow.api.batch import Batch, submitted_together
from regrow.api.body import read_body
from regrow.api.errors import json_response
from regrow.api.facts import Body
from regrow.api.intake import completion_requests
from regrow.api.logprobs import TextLogprobs
from regrow.api.models import check_served
from regrow.api.port import Run
from regrow.api.runs import Whole, ended_properly, events_of, whole_answer
from regrow.api.schema import CompletionRequest
from regrow.api.sse import EventStream
from regrow.api.state import GATE, SETTINGS
from regrow.api.text_answer import TextAnswer

Echo = Callable[[int], Awaitable[str]]


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer every prompt of one request."""
    settings = request.app[SETTINGS]
    engine = request.app[GATE].engine
    body = await read_body(request, CompletionRequest)
    check_served(body.model, engine.info, settings)
    requests = completion_requests(body, engine.info)
    async with submitted_together(engine, requests) as batch:
        structlog.contextvars.bind_contextvars(request=batch.runs[0].id)
        answer = TextAnswer(
            id=f"cmpl-{batch.runs[0].id}",
            model=body.model,
            created=int(time.time()),
            prompts=len(requests) // (body.n or 1),
            n=body.n or 1,
            usage=body.stream_options is not None and bool(body.stream_options.include_usage),
            progress=body.regrow is not None and bool(body.regrow.progress),
            logprobs=body.logprobs is not None,
        )

        async def echo(index: int) -> str:
            """Return what stands before an answer: the text of its prompt, where that was asked for."""
            if not body.echo:
                return ""
            prompt = requests[index].prompt or ()
            return prompt if isinstance(prompt, str) else await engine.text_of(prompt)

        if not body.stream:
            return json_response(await _whole(batch, answer, echo))
        async with EventStream(request, settings.keepalive_s) as stream, ended_properly(stream):
            await _stream(batch, answer, echo, stream)
        return stream.response


async def _whole(batch: Batch, answer: TextAnswer, echo: Echo) -> Body:
    choices: dict[int, tuple[str, Whole]] = {}

    async def follow(index: int, run: Run) -> None:
        whole = await whole_answer(run)
        choices[index] = await echo(index), whole

    await batch.each(follow)
    return answer.whole([choices[index] for index in sorted(choices)])


async def _stream(batch: Batch, answer: TextAnswer, echo: Echo, stream: EventStream) -> None:
    ends: dict[int, Finished] = {}

    async def send(chunks: Sequence[Body]) -> None:
        for chunk in chunks:
            await stream.send(msgspec.json.encode(chunk))

    async def follow(index: int, run: Run) -> None:
        before = await echo(index)
        logprobs = TextLogprobs()
        prompt: list[Logprob] = []
        if not answer.logprobs:  # else the text of the prompt comes with them, once they are known
            await send(answer.text(index, before))
        async for event in events_of(run):
            if isinstance(event, ReadProgress):
                prompt.extend(event.logprobs)
            if isinstance(event, ReadDone) and prompt:
                logprobs = TextLogprobs(before, prompt)
                await send(answer.text(index, before, logprobs.of(prompt)))
            await send(answer.chunks(index, event, logprobs))
            if isinstance(event, Finished):
                ends[index] = event

    await batch.each(follow)
    await send(answer.closing([ends[index] for index in sorted(ends)]))
