"""The bodies of a chat answer in OpenAI's shape: the whole answer, or the chunks of a stream, in order."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from regrow.actors.events import (
    Event,
    Failed,
    Finished,
    Mounted,
    Placed,
    Queued,
    ReadDone,
    ReadProgress,
    Reuse,
    Token,
    Usage,
)
from regrow.api.errors import Cancelled, body_of

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What all bodies of one answer share. `created` in unix seconds; `usage` and `progress`: the client
    asked for them in the stream."""

    id: str
    model: str
    created: int
    usage: bool = False
    progress: bool = False

    def whole(self, text: str, end: Finished) -> Body:
        """Return the answer of a request without streaming."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": end.reason,
        }
        return {**self._head("chat.completion", [choice]), **_facts(end)}

    def opening(self) -> Body:
        """Return the first chunk: who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, event: Event) -> list[Body]:
        """Return the chunks that tell of an event; the very last of a stream carries `regrow`."""
        match event:
            case Token():
                return self._text(event.text)
            case Finished(reason="cancelled"):
                return [{**body_of(Cancelled("the answer was cancelled")), **_facts(event)}]
            case Failed():
                return [{**body_of(event.error), **_facts(event)}]
            case Finished():
                return [*self._text(event.text), *self._closing(event)]
            case _ if self.progress:
                return [{**self._stream_head([]), "regrow": phase_facts(event)}]
        return []

    def _text(self, text: str) -> list[Body]:
        return [self._chunk({"content": text})] if text else []

    def _closing(self, end: Finished) -> list[Body]:
        last = self._chunk({}, end.reason)
        if self.usage:
            return [last, {**self._stream_head([]), **_facts(end)}]
        return [{**last, "regrow": reuse_body(end.reuse)}]

    def _chunk(self, delta: Mapping[str, object], finish_reason: str | None = None) -> Body:
        return self._stream_head(
            [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]
        )

    def _stream_head(self, choices: list[Body]) -> Body:
        head = self._head("chat.completion.chunk", choices)
        return {**head, "usage": None} if self.usage else head

    def _head(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_body(usage: Usage) -> Body:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def reuse_body(reuse: Reuse) -> Body:
    """Return the `regrow` object (E1); milliseconds are rounded to a tenth."""
    body: Body = msgspec.to_builtins(reuse)
    times = {name: round(getattr(reuse, name), 1) for name in ("queue_ms", "mount_ms", "read_ms")}
    return {**body, **times}


def phase_facts(event: Queued | Placed | Mounted | ReadProgress | ReadDone) -> Body:
    """Return what a chunk of a client that asked for progress tells of an event before the first token."""
    match event:
        case Queued():
            return {"phase": "queued", "ahead": event.ahead}
        case Placed():
            return {
                "phase": "placed",
                "slot": event.slot,
                "source": event.source,
                "reused": event.reused,
                "total": event.prompt,
            }
        case Mounted():
            return {"phase": "mounted", "reused": event.reused, "ms": round(event.ms, 1)}
        case ReadProgress():
            return {
                "phase": "reading",
                "position": event.position,
                "reused": event.reused,
                "total": event.total,
                "tok_s": round(event.tokens_per_s, 1),
                "eta_ms": round(event.eta_ms, 1),
            }
        case ReadDone():
            return {"phase": "decoding", "reused": event.reused, "read": event.read, "ms": round(event.ms, 1)}


def _facts(end: Finished | Failed) -> Body:
    return {"usage": usage_body(end.usage), "regrow": reuse_body(end.reuse)}
