"""The bodies of an answer of /v1/completions in OpenAI's shape: one choice for each prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from regrow.actors.events import Event, Finished, Token
from regrow.api.facts import Body, Phase, phase_facts, reuse_body, usage_body
from regrow.api.logprobs import TextLogprobs
from regrow.api.runs import Whole


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """What all bodies of one answer share. `created` in unix seconds; `n`: choices for each of `prompts`;
    `usage` and `progress`: the client asked for them in the stream; `logprobs`: it asked for them.

    `regrow` stands where it does in a chat answer; of several choices, each has its own.
    """

    id: str
    model: str
    created: int
    prompts: int = 1
    n: int = 1
    usage: bool = False
    progress: bool = False
    logprobs: bool = False

    def whole(self, choices: Sequence[tuple[str, Whole]]) -> Body:
        """Return the answer of a request without streaming, given for each choice what stands before the
        answer, and that."""
        rows = [
            self._choice(index, before + answer.text, self._logprobs(before, answer), answer.end)
            for index, (before, answer) in enumerate(choices)
        ]
        return {**self._head(rows), **self._facts([answer.end for _, answer in choices])}

    def text(self, index: int, text: str, logprobs: Body | None = None) -> list[Body]:
        """Return the chunks that add to a choice: none where there is nothing to add."""
        return [self._chunk([self._choice(index, text, logprobs)])] if text or logprobs else []

    def chunks(self, index: int, event: Event, logprobs: TextLogprobs) -> list[Body]:
        """Return the chunks that tell of an event in the life of a choice; `logprobs` is the choice's own."""
        match event:
            case Token():
                told = None if event.logprob is None else logprobs.of([event.logprob])
                return self.text(index, event.text, told)
            case Finished():
                last = self._chunk([self._choice(index, "", None, event)])
                if self._one and not self.usage:
                    last["regrow"] = reuse_body(event.reuse)
                return [*self.text(index, event.text), last]
            case _ if self.progress and isinstance(event, Phase):
                which = {} if self._one else {"index": index}
                return [{**self._chunk([]), "regrow": {**phase_facts(event), **which}}]
        return []

    def closing(self, ends: Sequence[Finished]) -> list[Body]:
        """Return the last chunks of a stream, once every choice has ended."""
        return [{**self._chunk([]), **self._facts(ends)}] if self.usage else []

    def _facts(self, ends: Sequence[Finished]) -> Body:
        """`ends` in the order of the choices; the choices of one prompt have read it once."""
        read = [
            replace(end.usage, prompt=0, cached=0) if i % self.n else end.usage for i, end in enumerate(ends)
        ]
        usage: Body = {"usage": usage_body(read)}
        return {**usage, "regrow": reuse_body(ends[0].reuse)} if self._one else usage

    @property
    def _one(self) -> bool:
        return self.prompts * self.n == 1

    def _logprobs(self, before: str, answer: Whole) -> Body | None:
        told = TextLogprobs(before, answer.prompt)
        return told.of([*answer.prompt, *answer.tokens]) if self.logprobs else None

    def _choice(self, index: int, text: str, logprobs: Body | None, end: Finished | None = None) -> Body:
        choice: Body = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if end is None else end.reason,
        }
        if end is not None and not self._one:
            choice["regrow"] = reuse_body(end.reuse)
        return choice

    def _chunk(self, choices: list[Body]) -> Body:
        head = self._head(choices)
        return {**head, "usage": None} if self.usage else head

    def _head(self, choices: list[Body]) -> Body:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
