"""The bodies of a chat answer in OpenAI's shape: the whole answer, or the chunks of a stream, in order."""

from collections.abc import Mapping
from dataclasses import dataclass

from regrow.actors.events import Event, Finished, Logprob, Token
from regrow.api.facts import Body, Phase, facts, phase_facts, reuse_body
from regrow.api.logprobs import chat_logprobs
from regrow.api.runs import Whole


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What all bodies of one answer share. `created` in unix seconds; `usage` and `progress`: the client
    asked for them in the stream; `logprobs`: it asked for them."""

    id: str
    model: str
    created: int
    usage: bool = False
    progress: bool = False
    logprobs: bool = False

    def whole(self, answer: Whole) -> Body:
        """Return the answer of a request without streaming."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(answer.tokens) if self.logprobs else None,
            "finish_reason": answer.end.reason,
        }
        return {**self._head("chat.completion", [choice]), **facts(answer.end)}

    def opening(self) -> Body:
        """Return the first chunk: who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, event: Event) -> list[Body]:
        """Return the chunks that tell of an event; the very last of a stream carries `regrow`."""
        match event:
            case Token():
                return self._text(event.text, event.logprob)
            case Finished():
                return [*self._text(event.text), *self._closing(event)]
            case _ if self.progress and isinstance(event, Phase):
                return [{**self._stream_head([]), "regrow": phase_facts(event)}]
        return []

    def _text(self, text: str, logprob: Logprob | None = None) -> list[Body]:
        told = None if logprob is None else chat_logprobs([logprob])
        return [self._chunk({"content": text}, logprobs=told)] if text or told else []

    def _closing(self, end: Finished) -> list[Body]:
        last = self._chunk({}, end.reason)
        if self.usage:
            return [last, {**self._stream_head([]), **facts(end)}]
        return [{**last, "regrow": reuse_body(end.reuse)}]

    def _chunk(
        self, delta: Mapping[str, object], finish_reason: str | None = None, logprobs: Body | None = None
    ) -> Body:
        return self._stream_head(
            [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}]
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
