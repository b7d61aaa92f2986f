"""The bodies of a chat answer in OpenAI's shape: the whole answer, or the chunks of a stream, in order."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regrow.actors.events import Finished, Usage
from regrow.api.facts import Body, Phase, phase_facts, reuse_body, usage_body
from regrow.api.logprobs import chat_logprobs
from regrow.api.said import Ended, Said, WholeAnswer
from regrow.models.answer_reader import Parts
from regrow.models.deltas import CallArguments, CallStart, Content, Delta, Reasoning


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What all bodies of one answer share. `created` in unix seconds; `choices`: how many answers there are;
    `usage` and `progress`: the client asked for them in the stream; `logprobs`: it asked for them."""

    id: str
    model: str
    created: int
    choices: int = 1
    usage: bool = False
    progress: bool = False
    logprobs: bool = False

    def whole(self, answers: Sequence[WholeAnswer]) -> Body:
        """Return the answer of a request without streaming."""
        choices: list[Body] = [
            {
                "index": index,
                "message": message_body(answer.parts),
                "logprobs": chat_logprobs(answer.tokens) if self.logprobs else None,
                "finish_reason": answer.ended.reason,
                **self._own_facts(answer.ended.end),
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._head("chat.completion", choices), **_facts([a.ended.end for a in answers])}

    def opening(self) -> list[Body]:
        """Return the first chunk of each choice: who speaks."""
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self.choices)]

    def chunks(self, index: int, event: Phase | Said | Ended) -> list[Body]:
        """Return the chunks that tell of an event in the life of a choice."""
        match event:
            case Said():
                told = None if event.logprob is None else chat_logprobs([event.logprob])
                deltas = [body for delta in event.deltas if (body := delta_body(delta)) is not None]
                if told and not deltas:
                    deltas = [{"content": ""}]
                return [
                    self._chunk(index, delta, logprobs=None if i else told) for i, delta in enumerate(deltas)
                ]
            case Ended():
                last = self._chunk(index, {}, event.reason)
                last.update(self._own_facts(event.end))
                if self.choices == 1 and not self.usage:
                    last["regrow"] = reuse_body(event.end.reuse)
                return [last]
            case _ if self.progress:
                which = {} if self.choices == 1 else {"index": index}
                return [{**self._stream_head([]), "regrow": {**phase_facts(event), **which}}]
        return []

    def closing(self, ends: Sequence[Finished]) -> list[Body]:
        """Return the last chunks of a stream, once every choice has ended, given in their order."""
        return [{**self._stream_head([]), **_facts(ends)}] if self.usage else []

    def _own_facts(self, end: Finished) -> Body:
        """Return what a choice tells of its own reuse, where there are several."""
        return {} if self.choices == 1 else {"regrow": reuse_body(end.reuse)}

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, object],
        finish_reason: str | None = None,
        logprobs: Body | None = None,
    ) -> Body:
        return self._stream_head(
            [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}]
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


def message_body(parts: Parts) -> Body:
    """Return a whole answer as a message."""
    body: Body = {
        "role": "assistant",
        "content": parts.content if parts.content or not parts.calls else None,
        "refusal": None,
    }
    if parts.reasoning:
        body["reasoning_content"] = parts.reasoning
    if parts.calls:
        body["tool_calls"] = [
            {
                "id": call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parts.calls
        ]
    return body


def delta_body(delta: Delta) -> Body | None:
    """Return the member `delta` of a chunk; None for what needs no chunk: the end of a call is seen."""
    match delta:
        case Content():
            return {"content": delta.text}
        case Reasoning():
            return {"reasoning_content": delta.text}
        case CallStart():
            function: Body = {"name": delta.name, "arguments": ""}
            call = {"index": delta.index, "id": call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments():
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    return None


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _facts(ends: Sequence[Finished]) -> Body:
    """Return the members `usage` and `regrow` of an answer; several answers have read one prompt, the first
    of them."""
    first = ends[0].usage
    usage = Usage(first.prompt, sum(end.usage.completion for end in ends), first.cached)
    return {"usage": usage_body([usage]), "regrow": reuse_body(ends[0].reuse)}
