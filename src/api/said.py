"""What a run says: its events, with the text of its tokens taken apart into content, reasoning and calls.

async for event in said_by(engine, run, request):
    match event:
        case Said(): ...      # deltas (`models/deltas.py`)
        case Ended(): ...     # the last one
        case _: ...           # queued, placed, mounted, reading
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from regrow.actors.events import Finished, Logprob, Token
from regrow.api.facts import Phase
from regrow.api.port import EnginePort, Run
from regrow.api.runs import BrokenOff, events_of
from regrow.errors import ActorDown, FormBroken
from regrow.models.answer_reader import AnswerReader, Parts, parts_of
from regrow.models.deltas import CallEnd, Content, Delta
from regrow.models.tool_formats import call_reader
from regrow.policy.request import GenerateRequest, JsonAnswer

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Said:
    """What a token, or the end, adds to an answer; maybe nothing yet. logprob: where it was asked for."""

    deltas: Sequence[Delta]
    logprob: Logprob | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is complete. reason: why, in OpenAI's words."""

    end: Finished
    reason: Reason


async def said_by(
    engine: EnginePort, run: Run, request: GenerateRequest, parallel: bool = True
) -> AsyncIterator[Phase | Said | Ended]:
    """Yield what a run does and says, `Ended` last; raises BrokenOff where the answer is not complete.

    parallel: False ends the answer after its first call; so does a template that takes one call a message, or
    the conversation could not go on. An answer that had to have a form and has another
    is not told as complete.
    """
    calls = call_reader(engine.info.tool_format, request.tools)
    reader = AnswerReader(engine.info.thinking, run.thinks, calls, parallel and engine.info.parallel_calls)
    said: list[str] = []
    called = False
    end: Finished | None = None
    try:
        async for event in events_of(run):
            logprob: Logprob | None = None
            if isinstance(event, Token):
                deltas, logprob = reader.feed(event.text), event.logprob
            elif isinstance(event, Finished):
                end, deltas = event, [*reader.feed(event.text), *reader.finish()]
            else:
                yield event
                continue
            called = called or any(isinstance(delta, CallEnd) for delta in deltas)
            if isinstance(request.answer, JsonAnswer):
                said.extend(delta.text for delta in deltas if isinstance(delta, Content))
            yield Said(deltas, logprob)
            if reader.full and not end:
                await run.cancel()
    except BrokenOff as broken:
        if not reader.full or not isinstance(broken.end, Finished):
            raise
        end = replace(broken.end, reason="stop")
    if end is None:
        raise ActorDown("the answer broke off")
    form = request.answer if _own_end(request, end) and not called else None
    if isinstance(form, JsonAnswer) and not await engine.conforms(form, "".join(said)):
        raise BrokenOff(FormBroken("the answer has not the form that was asked for"), end)
    yield Ended(end, "length" if end.reason == "length" else "tool_calls" if called else "stop")


def _own_end(request: GenerateRequest, end: Finished) -> bool:
    """Whether the model has said all that it wanted to."""
    return end.reason == "stop" and not request.stop and not request.stop_token_ids


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A complete answer. tokens: their log-probabilities, where they were asked for."""

    parts: Parts
    ended: Ended
    tokens: Sequence[Logprob]


async def whole_said(
    engine: EnginePort, run: Run, request: GenerateRequest, parallel: bool = True
) -> WholeAnswer:
    """Return an answer once it is complete; raises what it failed with."""
    deltas: list[Delta] = []
    tokens: list[Logprob] = []
    try:
        async for event in said_by(engine, run, request, parallel):
            match event:
                case Said():
                    deltas.extend(event.deltas)
                    if event.logprob is not None:
                        tokens.append(event.logprob)
                case Ended():
                    return WholeAnswer(parts_of(deltas), event, tokens)
    except BrokenOff as broken:
        raise broken.error from None
    raise ActorDown("the answer broke off")
