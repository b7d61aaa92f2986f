"""From the text of an answer, as it comes, to what it is made of: reasoning, content, calls.

    reader = AnswerReader(tags, prompt_thinks, call_reader(format, tools))
    for piece in pieces:
        for delta in reader.feed(piece): ...
    for delta in reader.finish(): ...

Reasoning is what stands between the model's thinking tags, where the answer begins with them or the prompt
has opened them already. Inside it nothing is a call.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from regrow.models.call_reader import CallReader
from regrow.models.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning
from regrow.models.piece_reader import PieceReader, Steps


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    open: str
    close: str


TAGS = (ThinkingTags("<think>", "</think>"), ThinkingTags("[THINK]", "[/THINK]"))


def thinking_tags(template: str) -> ThinkingTags | None:
    """Return the tags that a template's text speaks of."""
    return next((tags for tags in TAGS if tags.close in template), None)


def prompt_thinks(prompt: str, tags: ThinkingTags | None) -> bool:
    """Whether a prompt ends with an open thinking tag, so that the answer begins inside of it."""
    return tags is not None and prompt[-64:].rstrip().endswith(tags.open)


class AnswerReader(PieceReader):
    """Reads one answer. tags: None for a model that does not think. thinks: the prompt ends inside the tags.

    parallel: False takes the first call for the last: what follows it is left out, and `full` says so.
    """

    def __init__(
        self, tags: ThinkingTags | None, thinks: bool, calls: CallReader, parallel: bool = True
    ) -> None:
        super().__init__()
        self._tags = tags
        self._thinks = thinks
        self._reader = calls
        self._parallel = parallel
        self.full = False

    def _read(self) -> Steps[None]:
        if self._tags is not None:
            opened = yield from self._skip(self._tags.open)
            if opened or self._thinks:
                yield from self._reasoning(self._tags.close)
        while True:
            yield from self._within(self._reader.feed(self._take(len(self._text))))
            if self._ended:
                yield from self._within(self._reader.finish())
                return
            yield None

    def _reasoning(self, close: str) -> Steps[None]:
        """Say what stands before `close` as reasoning, without the white space around it and after it."""
        yield from self._skip_space()
        for delta in self._until([close]):
            yield Reasoning(delta.text) if isinstance(delta, Content) else delta
        yield from self._skip_space()

    def _within(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yield what is told of the answer, up to the end of the only call where there may be but one."""
        for delta in deltas:
            if self.full:
                return
            yield delta
            self.full = not self._parallel and isinstance(delta, CallEnd)


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call. arguments: a JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What a whole answer is made of."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def parts_of(deltas: Sequence[Delta]) -> Parts:
    """Return what the deltas of an answer add up to; a call without an end is none."""
    names = {delta.index: delta.name for delta in deltas if isinstance(delta, CallStart)}
    arguments = dict.fromkeys(names, "")
    for delta in deltas:
        if isinstance(delta, CallArguments):
            arguments[delta.index] += delta.text
    return Parts(
        content="".join(delta.text for delta in deltas if isinstance(delta, Content)),
        reasoning="".join(delta.text for delta in deltas if isinstance(delta, Reasoning)),
        calls=tuple(
            Call(names[delta.index], arguments[delta.index]) for delta in deltas if isinstance(delta, CallEnd)
        ),
    )
