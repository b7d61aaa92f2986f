"""The bodies of an answer in Anthropic's shape: the whole message, or the events of a stream, in order.

The content of a streamed message is a row of blocks, one open at a time: what is said next opens its block
where another kind is open. Tokens read and tokens that were kept add up to the prompt.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from regrow.actors.events import Placed, Usage
from regrow.api.facts import Body, Phase, reuse_body
from regrow.api.said import Ended, Said, WholeAnswer
from regrow.models.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def whole_message(id_: str, model: str, answer: WholeAnswer) -> Body:
    """Return the answer of a request without streaming."""
    parts, end = answer.parts, answer.ended
    content: list[Body] = []
    if parts.reasoning:
        content.append({"type": "thinking", "thinking": parts.reasoning, "signature": ""})
    if parts.content:
        content.append({"type": "text", "text": parts.content})
    content.extend({**_tool_use(call.name), "input": _input(call.arguments)} for call in parts.calls)
    return {
        **_message(id_, model, content),
        "stop_reason": _reason(end),
        "stop_sequence": end.end.stop_string,
        "usage": _usage(end.end.usage),
        "regrow": reuse_body(end.end.reuse),
    }


@dataclass(slots=True)
class MessageStream:
    """Makes the events of one stream; `begun` once the message has been opened."""

    id: str
    model: str
    begun: bool = False
    _index: int = -1
    _open: type[Delta] | None = None
    _usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))

    def events(self, event: Phase | Said | Ended) -> Iterator[Body]:
        """Yield what tells of an event; the type of each is also the name of its event."""
        match event:
            case Placed():
                yield from self._begin(Usage(event.prompt, 0, event.reused))
            case Said():
                for delta in event.deltas:
                    yield from self._begin(self._usage)
                    yield from self._say(delta)
            case Ended():
                yield from self._begin(event.end.usage)
                yield from self._close()
                yield {
                    "type": "message_delta",
                    "delta": {"stop_reason": _reason(event), "stop_sequence": event.end.stop_string},
                    "usage": _usage(event.end.usage),
                    "regrow": reuse_body(event.end.reuse),
                }

    def _begin(self, usage: Usage) -> Iterator[Body]:
        if not self.begun:
            self.begun, self._usage = True, usage
            message = {
                **_message(self.id, self.model, []),
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(usage),
            }
            yield {"type": "message_start", "message": message}

    def _say(self, delta: Delta) -> Iterator[Body]:
        match delta:
            case Content():
                yield from self._within(Content, {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": delta.text})
            case Reasoning():
                yield from self._within(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": delta.text})
            case CallStart():
                yield from self._close()
                yield from self._within(CallStart, {**_tool_use(delta.name), "input": {}})
            case CallArguments():
                yield self._delta({"type": "input_json_delta", "partial_json": delta.text})
            case CallEnd():
                yield from self._close()

    def _within(self, kind: type[Delta], block: Body) -> Iterator[Body]:
        """Open a block of this kind, unless one is open."""
        if self._open is not kind:
            yield from self._close()
            self._open = kind
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Body]:
        if self._open is Reasoning:
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Body) -> Body:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _message(id_: str, model: str, content: list[Body]) -> Body:
    return {"id": id_, "type": "message", "role": "assistant", "model": model, "content": content}


def _tool_use(name: str) -> Body:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name}


def _input(arguments: str) -> object:
    """Return arguments as the object they say; what says none stands as it is under a name of its own."""
    try:
        msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"arguments": arguments}
    return msgspec.Raw(arguments.encode())


def _reason(end: Ended) -> str:
    if end.reason == "stop":
        return "end_turn" if end.end.stop_string is None else "stop_sequence"
    return REASONS[end.reason]


def _usage(usage: Usage) -> Body:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
