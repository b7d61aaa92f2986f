"""Learning from a chat template how messages begin and end in tokens (P1), once, when a model is loaded.

Trial conversations are rendered with a word of its own in every message. What lies between two words is the
end of one message and the beginning of the next, mixed with what the first and last characters of a content
merge into. So contents vary at their edges (newlines, spaces, digits, marks, other scripts), and only tokens
are kept that are the same in all of them. In the end the marks must find the ends of all trial conversations;
what does not is left out, and said so.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise, product, takewhile

from regrow.policy.keys import as_keys
from regrow.policy.plan import ASSISTANT, MessageMarks, message_ends

Message = dict[str, object]
Tokens = tuple[int, ...]
Render = Callable[[Sequence[Message], bool], str]
Tokenise = Callable[[str], tuple[Sequence[int], Sequence[tuple[int, int]]]]

SYSTEM, USER, TOOL = "system", "user", "tool"
_CALL = "call"  # an assistant message that calls a tool: its word is an argument
_WORDS = ("quokka", "narwhal", "axolotl", "pangolin", "ocelot", "tapir")
_EDGES = ("", "\n", " ", "\n\n", "7", ".", "\u00e9", '"', "<", ">", "{", "}")
_CONVERSATIONS = (
    (SYSTEM,),
    (USER,),
    (SYSTEM, USER),
    (USER, ASSISTANT),
    (SYSTEM, USER, ASSISTANT),
    (USER, ASSISTANT, USER),
    (SYSTEM, USER, ASSISTANT, USER, ASSISTANT),
    (USER, _CALL, TOOL),
    (USER, ASSISTANT, TOOL),
    (USER, _CALL, TOOL, TOOL),
    (USER, ASSISTANT, TOOL, TOOL),
    (SYSTEM, USER, _CALL, TOOL, ASSISTANT, USER),
    (SYSTEM, USER, ASSISTANT, TOOL, ASSISTANT, USER),
)


@dataclass(frozen=True, slots=True)
class LearnedMarks:
    """The marks, and what could not be learned and why (empty: everything could)."""

    marks: MessageMarks
    note: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A rendered conversation; word i is in the tokens [first[i], after[i]).

    conversation: the roles it was made of. generate: with the prompt for an answer at the end. spelled: the
    ids whose text has a letter.
    """

    conversation: tuple[str, ...]
    roles: tuple[str, ...]
    generate: bool
    ids: Tokens
    first: tuple[int, ...]
    after: tuple[int, ...]
    spelled: frozenset[int]

    def gap(self, i: int) -> Tokens:
        """The tokens between word i and the next one, or the end; i = -1 is what is before the first word."""
        start = self.after[i] if i >= 0 else 0
        return self.ids[start : self.stop(i)]

    def stop(self, i: int) -> int:
        return self.first[i + 1] if i + 1 < len(self.first) else len(self.ids)

    @property
    def last(self) -> int:
        return len(self.roles) - 1


def learn_marks(render: Render, tokenise: Tokenise, own_tokens: frozenset[int]) -> LearnedMarks:
    """Learn the marks of a template.

    render(messages, generate) gives the text or raises ValueError where the template refuses. tokenise(text)
    gives ids and character spans. own_tokens: ids that never come from merging text (special and added ones).
    """
    rendered = (_trial(*trial, render, tokenise) for trial in product(_CONVERSATIONS, _EDGES, (False, True)))
    trials = [trial for trial in rendered if trial is not None]
    lesson = _Lesson(trials, own_tokens, own_tokens.union(*(trial.spelled for trial in trials)))
    closing = {role: lesson.closing(role) for role in (SYSTEM, USER, ASSISTANT, TOOL)}
    end = {role: lesson.end(role, closing[role]) for role in closing}
    begin = lesson.begins(closing, end)
    before_user = lesson.before(SYSTEM, USER, begin.get(USER, ()))
    end[SYSTEM] = end[SYSTEM] or lesson.end(SYSTEM, before_user)
    for role, following in ((SYSTEM, USER), (USER, ASSISTANT), (TOOL, ASSISTANT)):
        end[role] = end[role] or lesson.end(role, begin.get(following, ()))
    told = {role: end[role] for role in (SYSTEM, USER, TOOL) if lesson.tells(end[role])}
    marks = MessageMarks(begin, told)
    marks = _verified(marks, trials, lesson.tells)
    notes = [_note(role, marks, trials) for role in (SYSTEM, USER, TOOL)]
    return LearnedMarks(marks, "; ".join(note for note in notes if note))


def _trial(
    roles: tuple[str, ...], edge: str, generate: bool, render: Render, tokenise: Tokenise
) -> Trial | None:
    """Render one conversation; None where the template refuses it or does not show every word in order."""
    if generate and roles[-1] in (SYSTEM, ASSISTANT):
        return None
    words = _WORDS[: len(roles)]
    try:
        text = render([_message(role, word, edge) for role, word in zip(roles, words, strict=True)], generate)
    except ValueError:
        return None
    ids, spans = tokenise(text)
    first, after, at = [], [], 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return None
        stop = at + len(word)
        first.append(next((i for i, (_, b) in enumerate(spans) if b > at), len(ids)))
        after.append(next((i for i, (a, _) in enumerate(spans) if a >= stop), len(ids)))
        at = stop
    plain = tuple(ASSISTANT if role == _CALL else role for role in roles)
    spelled = frozenset(i for i, (a, b) in zip(ids, spans, strict=True) if any(map(str.isalpha, text[a:b])))
    return Trial(roles, plain, generate, tuple(ids), tuple(first), tuple(after), spelled)


def _message(role: str, word: str, edge: str) -> Message:
    if role == _CALL:
        call = {"name": "look", "arguments": {"at": word}}
        return {
            "role": ASSISTANT,
            "content": "",
            "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
        }
    message: Message = {"role": role, "content": edge + word + edge}
    return message | {"tool_call_id": "call00001", "name": "look"} if role == TOOL else message


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What the trials say about the edges of messages. telling: ids that a mark can be known by."""

    trials: Sequence[Trial]
    own: frozenset[int]
    telling: frozenset[int]

    def closing(self, role: str) -> Tokens:
        """What follows a content of `role` at the very end of a text, whatever the content ends with."""
        tails = [t.gap(t.last) for t in self.trials if t.roles[-1] == role and not t.generate]
        return _common_end(tails)

    def begins(self, closing: Mapping[str, Tokens], end: Mapping[str, Tokens]) -> dict[str, Tokens]:
        """What follows the end of the message before, whatever the content begins with."""
        seen: dict[str, dict[object, list[Tokens]]] = defaultdict(lambda: defaultdict(list))
        for trial in self.trials:
            for i, (before, role) in enumerate(pairwise(trial.roles)):
                rest = self._beginning(
                    trial.gap(i), (closing if role == before else end)[before], role == before
                )
                if rest:
                    seen[role][trial.conversation, i].append(rest)
        begin: dict[str, Tokens] = {}
        for role in (USER, ASSISTANT, TOOL, SYSTEM):
            rests = [_common_start(rests) for rests in seen[role].values()]
            others = [r for other in seen.keys() - {role} for rests in seen[other].values() for r in rests]
            heads = [trial.gap(-1) for trial in self.trials if trial.roles[0] == role]
            mark = _common_start(rests) or _common_end(rests) or self._opening(heads, others, begin)
            while mark and any(_find(head, mark) < 0 for head in heads):
                mark = mark[1:]  # its first characters merge with what is before
            mark = self._shortest(mark, others)
            if self.tells(mark) and mark not in begin.values():
                begin[role] = mark
        return begin

    def _beginning(self, gap: Tokens, end: Tokens, same: bool) -> Tokens:
        """The part of a gap after the end of the message before.

        Where that has no known end, everything from the first own token on; but not between messages of the
        same role, which may share one frame.
        """
        if end:
            at = _find(gap, end)
            return gap[at + len(end) :] if at >= 0 else ()
        return () if same else tuple(dropwhile(lambda token: token not in self.own, gap))

    def _opening(
        self, heads: Sequence[Tokens], others: Sequence[Tokens], begin: Mapping[str, Tokens]
    ) -> Tokens:
        """What precedes the content of a role that only opens conversations, if it tells it from others.

        What precedes a user message there too (a start token) is not part of it.
        """
        mark = _common_start(heads)
        user_head = next((trial.gap(-1) for trial in self.trials if trial.roles[0] == USER), ())
        lead = user_head[: max(_find(user_head, begin.get(USER, ())), 0)]
        if mark[: len(lead)] == lead != mark:
            mark = mark[len(lead) :]
        return () if any(other[: len(mark)] == mark for other in others) else mark

    def _shortest(self, mark: Tokens, others: Sequence[Tokens]) -> Tokens:
        """No more of a mark than tells it from other roles: what follows may change (a date) or merge."""
        for n in range(1, len(mark)):
            named = mark[n] in self.telling and mark[n] not in self.own  # a name is taken whole
            if self.own & set(mark[:n]) and not named and not any(other[:n] == mark[:n] for other in others):
                return mark[:n]
        return mark

    def before(self, role: str, following: str, begin: Tokens) -> Tokens:
        """What closes a message of `role` that can only be seen before one of `following`."""
        heads = []
        for trial in self.trials:
            for i, pair in enumerate(pairwise(trial.roles)):
                if pair == (role, following):
                    heads.append(trial.gap(i)[: max(_find(trial.gap(i), begin), 0)])
        return _common_end(heads)

    def end(self, role: str, closing: Tokens) -> Tokens:
        """The part of `closing` that is there whatever follows.

        Messages of the same role may share one frame (tool results in one turn): the frame's end counts.
        """
        following = [
            trial.gap(i)
            for trial in self.trials
            for i, own in enumerate(trial.roles)
            if own == role and (trial.generate or i < trial.last) and trial.roles[i + 1 : i + 2] != (role,)
        ]
        while closing and any(_find(gap, closing) < 0 for gap in following):
            closing = closing[:-1]
        return closing if following else ()

    def tells(self, pattern: Tokens) -> bool:
        """Whether a pattern is more than spaces and punctuation, which any text may hold."""
        return not self.telling.isdisjoint(pattern)


def _verified(marks: MessageMarks, trials: Sequence[Trial], tells: Callable[[Tokens], bool]) -> MessageMarks:
    """Leave out the ends that are missed, or found where the assistant's message ends.

    Before that a shorter begin mark is tried: in some contexts its last tokens merge with the content.
    """
    begin, end = dict(marks.begin), dict(marks.end)
    while wrong := {role for trial in trials for role in _wrong(MessageMarks(begin, end), trial)}:
        for role in wrong:
            shorter = begin.get(role, ())[:-1]
            if tells(shorter) and shorter not in begin.values():
                begin[role] = shorter
            else:
                del end[role]
                if role in marks.begin:
                    begin[role] = marks.begin[role]
    return MessageMarks(begin, end)


def _wrong(marks: MessageMarks, trial: Trial) -> Iterable[str]:
    """Yield the roles whose marks mislead in this trial."""
    found = message_ends(as_keys(trial.ids), marks)
    for i, role in enumerate(trial.roles):
        inside = [end for end in found if trial.after[i] < end.position <= trial.stop(i)]
        if pattern := marks.end.get(role):
            frame_goes_on = trial.roles[i + 1 : i + 2] == (role,)
            nothing_follows = i == trial.last and (
                not trial.generate or trial.ids[-len(pattern) :] == pattern
            )
            if not inside and not frame_goes_on and not nothing_follows:
                yield role
            if role in marks.begin and any(end.role != role for end in inside):
                yield role
        for end in inside if role == ASSISTANT else ():
            yield from (r for r, p in marks.end.items() if trial.ids[: end.position][-len(p) :] == p)


def _note(role: str, marks: MessageMarks, trials: Sequence[Trial]) -> str:
    if role in marks.end:
        return ""
    if not any(role in trial.roles for trial in trials):
        return f"the template takes no {role} messages"
    return f"the template does not mark where a {role} message ends"


def _common_start(sequences: Sequence[Tokens]) -> Tokens:
    same = takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False))
    return tuple(column[0] for column in same)


def _common_end(sequences: Sequence[Tokens]) -> Tokens:
    return _common_start([tokens[::-1] for tokens in sequences])[::-1]


def _find(tokens: Tokens, pattern: Tokens) -> int:
    """Return the first place of `pattern`, or -1."""
    n = len(pattern)
    return next((i for i in range(len(tokens) - n + 1) if tokens[i : i + n] == pattern), -1)
