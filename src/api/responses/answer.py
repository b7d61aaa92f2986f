"""A response as it is made: the events of its stream in order, and its body at any time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from regrow.actors.events import Failed, Finished, Logprob
from regrow.api.answer import call_id
from regrow.api.facts import Body, Phase, phase_facts, reuse_body
from regrow.api.logprobs import chat_logprobs
from regrow.api.responses.items import new_id
from regrow.api.responses.schema import (
    Called,
    Item,
    OutputText,
    Reasoned,
    ReasoningText,
    ResponsesRequest,
    Said,
)
from regrow.api.said import Ended
from regrow.api.said import Said as Spoken
from regrow.models.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning

LOGPROBS = "message.output_text.logprobs"


@dataclass(slots=True)
class _Open:
    """The output item that is being made."""

    kind: str
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    text: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)

    @property
    def whole(self) -> str:
        return "".join(self.text)


@dataclass(slots=True)
class ResponseAnswer:
    """One response. silent: nothing of what is drawn is told (`generate` false). items: its output, to go on
    from."""

    id: str
    model: str
    asked: ResponsesRequest
    silent: bool = False
    status: str = "in_progress"
    items: list[Item] = field(default_factory=list)
    _created: float = field(default_factory=time.time)
    _output: list[Body] = field(default_factory=list)
    _about: Body = field(default_factory=dict)
    _sequence: int = 0
    _items: int = 0
    _open: _Open | None = None
    _reasoning_tokens: int = 0
    _spoke: bool = False
    _pending: list[Logprob] = field(default_factory=list)

    @property
    def body(self) -> Body:
        """Return the response object."""
        asked = self.asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": list(self._output),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "store": asked.store is not False,
            "background": bool(asked.background),
            "temperature": asked.temperature,
            "text": {"format": _format(asked)},
            "tool_choice": _choice(asked),
            "tools": [_tool(tool) for tool in asked.tools or ()],
            "top_p": asked.top_p,
            "truncation": asked.truncation or "disabled",
            "user": asked.user,
            "usage": None,
            **self._about,
        }

    @property
    def _short(self) -> Body:
        """Return the response without what its request has said, for events that come often."""
        return {**self.body, "instructions": None, "tools": [], "metadata": {}, "text": {}}

    def opening(self) -> list[Body]:
        """Return the first events."""
        return [self._event(f"response.{kind}", response=self.body) for kind in ("created", "in_progress")]

    def events(self, event: Phase | Spoken | Ended) -> list[Body]:
        """Return the events of the stream that tell of something in the life of the run."""
        match event:
            case Spoken():
                return [] if self.silent else self._speak(event)
            case Ended():
                return self._end(event)
        if self.asked.regrow is not None and self.asked.regrow.progress:
            return [self._event("response.in_progress", response=self._short, regrow=phase_facts(event))]
        return []

    def broken(self, code: str, message: str, end: Finished | Failed, *, cancelled: bool) -> list[Body]:
        """Return the events of an end without a complete answer."""
        events = self._close(whole=False)
        self.status = "cancelled" if cancelled else "failed"
        self._about = self._facts(end)
        if not cancelled:
            self._about["error"] = {"code": code, "message": message}
        kind = "response.incomplete" if cancelled else "response.failed"
        return [*events, self._event(kind, response=self.body)]

    def abandon(self) -> None:
        """End where nobody hears the rest; what was said is kept."""
        self._close(whole=False)
        self.status = "cancelled"

    def _speak(self, said: Spoken) -> list[Body]:
        events: list[Body] = []
        if said.logprob is not None:
            self._pending.append(said.logprob)
        for delta in said.deltas:
            events += self._delta(delta)
        if not self._spoke:
            self._reasoning_tokens += 1
        return events

    def _delta(self, delta: Delta) -> list[Body]:
        match delta:
            case Reasoning():
                return self._add("reasoning", delta.text)
            case Content():
                self._spoke = True
                return self._add("message", delta.text)
            case CallStart():
                self._spoke = True
                events = self._close()
                opened = self._start("function_call")
                opened.name, opened.call_id = delta.name, call_id()
                item = self._item(opened, "in_progress")
                added = self._event("response.output_item.added", output_index=opened.index, item=item)
                return [*events, added]
            case CallArguments() if self._open is not None:
                self._open.text.append(delta.text)
                kind = "response.function_call_arguments.delta"
                return [self._event(kind, **self._place(), delta=delta.text)]
            case CallEnd():
                return self._close()
        return []

    def _add(self, kind: str, text: str) -> list[Body]:
        """Add to the text of the open item, or open one."""
        events: list[Body] = []
        if self._open is None or self._open.kind != kind:
            events = self._close()
            opened = self._start(kind)
            item = {**self._item(opened, "in_progress"), "content": []}
            events.append(self._event("response.output_item.added", output_index=opened.index, item=item))
            part = self._part(opened)
            events.append(self._event("response.content_part.added", **self._place(0), part=part))
        assert self._open is not None
        self._open.text.append(text)
        if kind == "reasoning":
            return [*events, self._event("response.reasoning_text.delta", **self._place(0), delta=text)]
        logprobs = self._take_logprobs()
        event = self._event("response.output_text.delta", **self._place(0), delta=text, logprobs=logprobs)
        return [*events, event]

    def _start(self, kind: str) -> _Open:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self._open = _Open(kind, new_id(prefix), self._items)
        self._items += 1
        return self._open

    def _close(self, *, whole: bool = True) -> list[Body]:
        """End the open item. whole: it is complete; a call that is not is none, and is not kept."""
        opened = self._open
        if opened is None:
            return []
        status = "completed" if whole else "incomplete"
        item, text = self._item(opened, status), opened.whole
        events: list[Body] = []
        if opened.kind == "function_call":
            if whole:
                kind = "response.function_call_arguments.done"
                events.append(self._event(kind, **self._place(), name=opened.name, arguments=text))
        else:
            part = self._part(opened)
            about: Body = {"text": text}
            if opened.kind == "message":
                about["logprobs"] = opened.logprobs
            kind = "output_text" if opened.kind == "message" else "reasoning_text"
            events.append(self._event(f"response.{kind}.done", **self._place(0), **about))
            events.append(self._event("response.content_part.done", **self._place(0), part=part))
        events.append(self._event("response.output_item.done", output_index=opened.index, item=item))
        if whole or opened.kind != "function_call":
            self._output.append(item)
            self.items.append(_kept(opened))
        self._open = None
        return events

    def _end(self, ended: Ended) -> list[Body]:
        short = ended.reason == "length" and not self.silent
        events = self._close(whole=not short)
        self.status = "incomplete" if short else "completed"
        self._about = {**self._facts(ended.end), "completed_at": time.time()}
        if short:
            self._about["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{self.status}", response=self.body)]

    def _facts(self, end: Finished | Failed) -> Body:
        usage = end.usage
        drawn = 0 if self.silent else usage.completion
        thought = min(self._reasoning_tokens, drawn) if _has_reasoning(self._output) else 0
        return {
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": drawn,
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage.prompt + drawn,
            },
            "regrow": reuse_body(end.reuse),
        }

    def _take_logprobs(self) -> Sequence[object]:
        told, self._pending = chat_logprobs(self._pending)["content"], []
        assert isinstance(told, list) and self._open is not None
        self._open.logprobs += told
        return told

    def _place(self, content: int | None = None) -> Body:
        assert self._open is not None
        place: Body = {"item_id": self._open.id, "output_index": self._open.index}
        return place if content is None else {**place, "content_index": content}

    def _item(self, opened: _Open, status: str) -> Body:
        head: Body = {"id": opened.id, "type": opened.kind, "status": status}
        match opened.kind:
            case "message":
                return {**head, "role": "assistant", "content": [self._part(opened)]}
            case "reasoning":
                return {**head, "summary": [], "content": [self._part(opened)]}
        return {**head, "call_id": opened.call_id, "name": opened.name, "arguments": opened.whole}

    def _part(self, opened: _Open) -> Body:
        if opened.kind == "reasoning":
            return {"type": "reasoning_text", "text": opened.whole}
        told = {"annotations": [], "logprobs": list(opened.logprobs)}
        return {"type": "output_text", "text": opened.whole, **told}

    def _event(self, kind: str, **about: object) -> Body:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **about}


def _kept(opened: _Open) -> Item:
    match opened.kind:
        case "message":
            return Said(role="assistant", content=[OutputText(text=opened.whole)], id=opened.id)
        case "reasoning":
            return Reasoned(content=[ReasoningText(text=opened.whole)], id=opened.id)
    return Called(call_id=opened.call_id, name=opened.name, arguments=opened.whole, id=opened.id)


def _has_reasoning(output: Sequence[Body]) -> bool:
    return any(item["type"] == "reasoning" for item in output)


def _format(asked: ResponsesRequest) -> Body:
    form = asked.text.format if asked.text else None
    if form is None:
        return {"type": "text"}
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "name": form.name, "schema": form.schema, "strict": True}


def _choice(asked: ResponsesRequest) -> object:
    choice = asked.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return {"type": choice.type, "name": choice.name}


def _tool(tool: object) -> Body:
    return {"strict": True, "parameters": None, **msgspec.to_builtins(tool)}
