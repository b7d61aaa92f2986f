"""The bodies of a chat answer in OpenAI's shape: the whole answer, or the chunks of a stream, in order."""

from collections.abc import Mapping
from dataclasses import dataclass

from regrow.actors.events import Event, Finished, Token
from regrow.api.facts import Body, Phase, facts, phase_facts, reuse_body


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
        return {**self._head("chat.completion", [choice]), **facts(end)}

    def opening(self) -> Body:
        """Return the first chunk: who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, event: Event) -> list[Body]:
        """Return the chunks that tell of an event; the very last of a stream carries `regrow`."""
        match event:
            case Token():
                return self._text(event.text)
            case Finished():
                return [*self._text(event.text), *self._closing(event)]
            case _ if self.progress and isinstance(event, Phase):
                return [{**self._stream_head([]), "regrow": phase_facts(event)}]
        return []

    def _text(self, text: str) -> list[Body]:
        return [self._chunk({"content": text})] if text else []

    def _closing(self, end: Finished) -> list[Body]:
        last = self._chunk({}, end.reason)
        if self.usage:
            return [last, {**self._stream_head([]), **facts(end)}]
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
