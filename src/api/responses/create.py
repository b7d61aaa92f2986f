"""Making a response: from its request and what it goes on from, to the events of its stream.

A response is kept from its first event on, so that it can be cancelled, and again at its end, with the items
that a later one goes on from.
"""

import dataclasses
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import structlog
from aiohttp import web

from regrow.api.errors import Cancelled, body_of
from regrow.api.facts import Body
from regrow.api.intake import chat_request
from regrow.api.models import check_served, served_names
from regrow.api.port import EnginePort, Run
from regrow.api.responses.answer import LOGPROBS, ResponseAnswer
from regrow.api.responses.items import items_of, messages_of, new_id
from regrow.api.responses.schema import Item, ResponsesRequest, Said
from regrow.api.responses.store import Kept, ResponseStore
from regrow.api.runs import BrokenOff, submitted
from regrow.api.said import said_by
from regrow.api.schema import (
    ChatRequest,
    Function,
    Generation,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolChoiceMode,
)
from regrow.api.state import GATE, SETTINGS
from regrow.errors import BadRequest, RegrowError
from regrow.policy.request import GenerateRequest

CALLED_OTHERWISE = (  # fields of a chat, and what they are called here
    (re.compile(r"^messages.*"), "input"),
    (re.compile(r"^response_format\.json_schema"), "text.format"),
    (re.compile(r"^response_format"), "text.format"),
    (re.compile(r"^max_(completion_)?tokens"), "max_output_tokens"),
)


@dataclass(slots=True)
class Turn:
    """One response to be made. history: what it goes on from; history_bytes: of that and the input. stores:
    where it is kept."""

    engine: EnginePort
    asked: ResponsesRequest
    request: GenerateRequest
    answer: ResponseAnswer
    input: Sequence[Item]
    history: Sequence[Item]
    history_bytes: int
    stores: Sequence[ResponseStore]
    error: RegrowError | None = None

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Run]:
        """The run of the response; raises what the engine refuses it with, by the names of fields here."""
        try:
            async with submitted(self.engine, self.request) as run:
                yield run
        except BadRequest as error:
            raise named_otherwise(error) from None

    async def events(self, run: Run) -> AsyncGenerator[Body, None]:
        """Yield the events of the stream; `error` says afterwards why the answer is not complete."""
        structlog.contextvars.bind_contextvars(request=run.id)
        answer = self.answer
        for store in self.stores:
            store.put(answer.id, self._kept(run))
        try:
            for body in answer.opening():
                yield body
            parallel = self.asked.parallel_tool_calls is not False
            async for event in said_by(self.engine, run, self.request, parallel):
                for body in self._kept_at_the_end(answer.events(event)):
                    yield body
        except BrokenOff as broken:
            self.error = broken.error
            error = body_of(broken.error)["error"]
            code, message = error["code"] or "server_error", error["message"] or ""
            cancelled = isinstance(broken.error, Cancelled)
            ending = answer.broken(code, message, broken.end, cancelled=cancelled)
            for body in self._kept_at_the_end(ending):
                yield body
        finally:  # also where nobody hears the rest
            if answer.status == "in_progress":
                answer.abandon()
                self._keep_again()

    def _kept_at_the_end(self, bodies: Sequence[Body]) -> Iterator[Body]:
        """Keep the response before its last event is told: the next one may come at once."""
        if self.answer.status != "in_progress":
            self._keep_again()
        yield from bodies

    def _keep_again(self) -> None:
        """Keep it as it is at its end, where it was not forgotten meanwhile."""
        for store in self.stores:
            if store.get(self.answer.id) is not None:
                store.put(self.answer.id, self._kept(None))

    def _kept(self, run: Run | None) -> Kept:
        body, items = self.answer.body, self.answer.items
        history = (*self.history, *self.input, *items)
        history_bytes = self.history_bytes + len(msgspec.json.encode(items))
        return Kept(body, self.input, history, len(msgspec.json.encode(body)), history_bytes, run)


def turn_of(
    app: web.Application,
    asked: ResponsesRequest,
    known: Sequence[ResponseStore],
    kept_in: Sequence[ResponseStore],
) -> Turn:
    """Return the response that is asked for; raises BadRequest naming the field, or ModelNotFound.

    known: where what it goes on from is looked for. kept_in: where it is kept itself.
    """
    settings, engine = app[SETTINGS], app[GATE].engine
    check_served(asked.model, engine.info, settings)
    model = asked.model or served_names(engine.info, settings)[0]
    for param, reason in _not_served(asked):
        raise BadRequest(f"{param}: {reason}", param=param, code="unsupported_value")
    history, history_bytes = _history(asked.previous_response_id, known)
    news = items_of(asked.input, history)
    opening = () if asked.instructions is None else (Said(role="system", content=asked.instructions),)
    if not (*opening, *history, *news):
        raise BadRequest("input is missing", param="input", code="missing_required_parameter")
    chat = _chat(asked, model, messages_of((*opening, *history, *news)))
    try:
        request = chat_request(chat, engine.info, settings.message_limit)
    except BadRequest as error:
        raise named_otherwise(error) from None
    if silent := asked.generate is False:
        request = dataclasses.replace(request, max_tokens=1, min_tokens=0, answer=None)
    answer = ResponseAnswer(new_id("resp"), model, asked, silent)
    history_bytes += len(msgspec.json.encode(news))
    return Turn(engine, asked, request, answer, news, history, history_bytes, kept_in)


def named_otherwise(error: BadRequest) -> BadRequest:
    """Name the field of a chat as it is called here."""
    for pattern, name in CALLED_OTHERWISE:
        if error.param is not None and pattern.match(error.param):
            error.args = (str(error).replace(error.param, pattern.sub(name, error.param), 1),)
            error.param = pattern.sub(name, error.param)
            return error
    return error


def _history(name: str | None, known: Sequence[ResponseStore]) -> tuple[Sequence[Item], int]:
    """Return what a response that is gone on from holds, and its bytes."""
    if name is None:
        return (), 0
    for store in known:
        if (kept := store.get(name)) is not None and kept.run is None:
            return kept.history, kept.history_bytes
    raise BadRequest(
        f"previous_response_id: no response {name!r} that could be continued is kept",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _not_served(asked: ResponsesRequest) -> Iterator[tuple[str, str]]:
    """Yield (field, reason) for what OpenAI allows and this server does not do."""
    for i, tool in enumerate(asked.tools or ()):
        if tool.type != "function":
            yield f"tools[{i}].type", "only functions are served"
        elif not tool.name:
            yield f"tools[{i}].name", "is missing"
    choice = asked.tool_choice
    if choice is not None and not isinstance(choice, str) and (choice.type != "function" or not choice.name):
        yield "tool_choice", "give auto, none, required, or a function by its name"
    if (asked.n or 1) > 1:
        yield "n", "there is one answer to a request"
    for name in ("conversation", "prompt"):
        if getattr(asked, name) is not None:
            yield name, "is not served; send the input, or previous_response_id"
    if asked.top_logprobs and LOGPROBS not in (asked.include or ()):
        yield "top_logprobs", f"only together with include: {LOGPROBS}"
    if asked.background and (asked.stream or asked.store is False):
        yield "background", "neither with stream nor with store: false"


def _chat(asked: ResponsesRequest, model: str, messages: list[Message]) -> ChatRequest:
    """Return the chat that a request is."""
    logprobs = LOGPROBS in (asked.include or ())
    choice: ToolChoiceMode | NamedTool | None
    if asked.tool_choice is None or isinstance(asked.tool_choice, str):
        choice = asked.tool_choice
    else:
        choice = NamedTool(type="function", function=NamedFunction(name=asked.tool_choice.name or ""))
    tools = [
        Tool(
            type="function",
            function=Function(name=tool.name or "", description=tool.description, parameters=tool.parameters),
        )
        for tool in asked.tools or ()
    ]
    form = asked.text.format if asked.text else None
    return ChatRequest(
        **{name: getattr(asked, name) for name in Generation.__struct_fields__ if name != "n"},
        model=model,
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        max_completion_tokens=asked.max_output_tokens,
        response_format=None
        if form is None
        else ResponseFormat(type=form.type, json_schema=JsonSchema(schema=form.schema)),
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
        logprobs=logprobs or None,
        top_logprobs=asked.top_logprobs if logprobs else None,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
