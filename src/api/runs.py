"""A run of the engine inside a handler: taken, followed to its end, and never left behind.

On every way out of a handler (answer complete, error, client gone: then the handler is cancelled) the run is
cancelled, which has no effect once it has ended. Until the engine has taken a request an error is an HTTP
status; in a stream a later one is an error event and a proper end.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec
import structlog

from regrow.actors.events import Failed, Finished, Logprob, ReadProgress, Token
from regrow.api.errors import Cancelled, body_of
from regrow.api.facts import Phase, facts
from regrow.api.port import EnginePort, Run
from regrow.api.sse import DONE, EventStream
from regrow.errors import ActorDown, RegrowError
from regrow.policy.request import GenerateRequest

log = structlog.get_logger(__name__)


class BrokenOff(Exception):
    """A run ended without a complete answer, because of `error`; `end` tells what was read and drawn."""

    def __init__(self, error: RegrowError, end: Finished | Failed) -> None:
        super().__init__(str(error))
        self.error = error
        self.end = end


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


async def events_of(run: Run) -> AsyncIterator[Phase | Token | Finished]:
    """Yield the events of a run, `Finished` last; raises BrokenOff where the answer is not complete."""
    async for event in run:
        match event:
            case Failed():
                raise BrokenOff(event.error, event)
            case Finished(reason="cancelled"):
                raise BrokenOff(Cancelled("the answer was cancelled"), event)
        yield event


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete answer. prompt, tokens: the log-probabilities of both, where they were asked for."""

    text: str
    end: Finished
    prompt: Sequence[Logprob] = ()
    tokens: Sequence[Logprob] = ()


async def whole_answer(run: Run) -> Whole:
    """Return an answer once it is complete; raises what it failed with."""
    texts: list[str] = []
    prompt: list[Logprob] = []
    tokens: list[Logprob] = []
    try:
        async for event in events_of(run):
            match event:
                case ReadProgress():
                    prompt.extend(event.logprobs)
                case Token():
                    texts.append(event.text)
                    if event.logprob is not None:
                        tokens.append(event.logprob)
                case Finished():
                    return Whole("".join(texts) + event.text, event, prompt, tokens)
    except BrokenOff as broken:
        raise broken.error from None
    raise ActorDown("the answer broke off")


@asynccontextmanager
async def ended_properly(stream: EventStream) -> AsyncIterator[None]:
    """Whatever happens in the block, the stream gets its end; an error is told first."""
    try:
        yield
    except ConnectionResetError:
        raise
    except BrokenOff as broken:
        await stream.send(msgspec.json.encode({**body_of(broken.error), **facts(broken.end)}))
    except Exception as error:
        if not isinstance(error, RegrowError):
            log.exception("answer failed")
        await stream.send(msgspec.json.encode(body_of(error)))
    await stream.end(DONE)
