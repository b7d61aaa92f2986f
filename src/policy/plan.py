"""The read plan: where reading is cut, as a pure function of the keys and fixed settings (P1, P2).

Two kinds of cuts: the chunk grid, and the ends of messages that are not the assistant's (so the end of the
system prompt and every assistant start). How messages begin and end in tokens is learned once per chat
template (`models/template.py`) and given here as `MessageMarks`.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from regrow.policy.keys import Keys
from regrow.policy.request import Exactness

Places = npt.NDArray[np.int64]
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunk sizes by position: `steps` is ((from_position, size), ...), ascending, the first from 0.

    Every size is a multiple of 64. A chunk that starts at p has the size of the last step at or below p.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.steps or self.steps[0][0] != 0:
            raise ValueError("a chunk table starts at position 0")
        if any(size <= 0 or size % 64 for _, size in self.steps):
            raise ValueError("chunk sizes are positive multiples of 64")
        starts = [start for start, _ in self.steps]
        if starts != sorted(set(starts)):
            raise ValueError("the positions of a chunk table ascend")

    @classmethod
    def uniform(cls, size: int) -> "ChunkTable":
        return cls(((0, size),))

    @property
    def largest(self) -> int:
        return max(size for _, size in self.steps)

    @property
    def told(self) -> str:
        """Return the sizes in words, for a user."""
        return ", ".join(f"{size:,} from {start:,}" if start else f"{size:,}" for start, size in self.steps)

    def size_at(self, position: int) -> int:
        return self.steps[bisect_right(self.steps, position, key=lambda step: step[0]) - 1][1]

    def grid(self, below: int) -> tuple[int, ...]:
        """Return the grid cuts p with 0 < p < below."""
        cuts = []
        position = self.size_at(0)
        while position < below:
            cuts.append(position)
            position += self.size_at(position)
        return tuple(cuts)


@dataclass(frozen=True, slots=True)
class MessageMarks:
    """How messages begin and end in tokens. Empty marks (no template, or none that can be told) cut nothing.

    begin: role -> token ids that open a message of this role; the longest match at a place wins, so a tool
    result may open with the user's mark and more. end: role -> token ids that close a message of this role;
    the assistant's own is not looked for.
    """

    begin: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    end: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MessageStart:
    """A message of `role` opens at `position`."""

    position: int
    role: str


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """A message of `role` (never the assistant) ends before `position`."""

    position: int
    role: str


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Where the reading of a prompt of `length` keys is cut.

    cuts: ascending positions p, 0 < p < length. ends: the message ends among them. starts: where each message
    opens, the assistant's included; they cut nothing.
    """

    length: int
    cuts: tuple[int, ...]
    ends: tuple[MessageEnd, ...] = ()
    starts: tuple[MessageStart, ...] = ()

    def is_cut(self, position: int) -> bool:
        i = bisect_right(self.cuts, position)
        return i > 0 and self.cuts[i - 1] == position

    def last_cut_at_or_below(self, position: int) -> int:
        """Return the deepest cut <= position, or 0 (the start is always a place to read from)."""
        i = bisect_right(self.cuts, position)
        return self.cuts[i - 1] if i else 0

    def cut_at_end(self) -> "ReadPlan":
        """Return the plan with a cut where its reading ends: the same chunks, and a place where the very same
        prompt can go on without reading anything. A prompt of one token has none."""
        end = self.length - 1
        return replace(self, cuts=(*self.cuts, end)) if end > max(self.cuts, default=0) else self

    def chunks_from(self, start: int, exact: Exactness = "full") -> tuple[tuple[int, int], ...]:
        """Return the chunks (start, stop) still to be read from `start` (P2).

        The last chunk ends with the prompt, and the first token is drawn from it. Only where length - 1 is a
        cut does it end there, so that who resumes there and who has read it all both feed the last token in a
        decode step. Raises ValueError where `start` is neither 0 nor a cut, unless `exact` is "off", which
        may resume between cuts.
        """
        if start and exact != "off" and not self.is_cut(start):
            raise ValueError(f"{start} is not a cut of this plan")
        stop = self.length - self.is_cut(self.length - 1)
        edges = [start, *(cut for cut in self.cuts if start < cut < stop), stop]
        return tuple((a, b) for a, b in pairwise(edges) if a < b)


def build_plan(keys: Keys, table: ChunkTable, marks: MessageMarks) -> ReadPlan:
    """Return where the reading of `keys` (int64 [n]) is cut (P1)."""
    ends = message_ends(keys, marks)
    cuts = {*table.grid(len(keys)), *(end.position for end in ends)}
    return ReadPlan(len(keys), tuple(sorted(cuts)), ends, message_starts(keys, marks))


def message_ends(keys: Keys, marks: MessageMarks) -> tuple[MessageEnd, ...]:
    """Return where messages that are not the assistant's end, ascending, each 0 < position < len(keys).

    At each end pattern the open message is the one whose begin mark was complete last before the pattern: so
    an end depends on the keys below it alone (P1), the longer of two marks at one place wins, and a pattern
    that also ends the assistant's messages cuts none of them.
    """
    begins = _find_begins(keys, marks)
    order = np.argsort(begins.stops, kind="stable")
    stops, roles = begins.stops[order], begins.roles[order]
    found: dict[int, str] = {}
    for role, pattern in marks.end.items():
        if role == ASSISTANT:
            continue
        places = _places(keys, pattern)
        latest = np.searchsorted(stops, places, side="right") - 1
        places, latest = places[latest >= 0], latest[latest >= 0]
        for place, opened in zip(places.tolist(), roles[latest].tolist(), strict=True):
            if begins.names[opened] != ASSISTANT:
                found[place + len(pattern)] = begins.names[opened]
    return tuple(MessageEnd(p, found[p]) for p in sorted(found) if p < len(keys))


def message_starts(keys: Keys, marks: MessageMarks) -> tuple[MessageStart, ...]:
    """Return where messages open, ascending; of several marks at one place the longest gives the role."""
    begins = _find_begins(keys, marks)
    role_at = dict(zip(begins.places.tolist(), begins.roles.tolist(), strict=True))
    return tuple(MessageStart(place, begins.names[role]) for place, role in role_at.items())


@dataclass(frozen=True, slots=True)
class _Begins:
    """The begin marks in a prompt, ascending by place, then by length, so that the last one at a place wins.

    places, stops (where a mark is complete) and roles (indices into `names`) are [n].
    """

    names: Sequence[str]
    places: Places
    stops: Places
    roles: Places


def _find_begins(keys: Keys, marks: MessageMarks) -> _Begins:
    found = [_places(keys, pattern) for pattern in marks.begin.values()]
    counts = [len(places) for places in found]
    lengths = np.repeat(np.array([len(p) for p in marks.begin.values()], dtype=np.int64), counts)
    roles = np.repeat(np.arange(len(counts)), counts)
    places = np.concatenate([np.empty(0, dtype=np.int64), *found])
    order = np.lexsort((roles, lengths, places))
    return _Begins(tuple(marks.begin), places[order], (places + lengths)[order], roles[order])


def _places(keys: Keys, pattern: Sequence[int]) -> Places:
    """Return the ascending places where `pattern` starts in `keys`; an empty pattern is nowhere."""
    if not pattern:
        return np.empty(0, dtype=np.int64)
    places = np.flatnonzero(keys[: max(len(keys) - len(pattern) + 1, 0)] == pattern[0])
    for offset, token in enumerate(pattern[1:], 1):
        places = places[keys[places + offset] == token]
    return places
