"""The read plan: where reading is cut, as a pure function of the keys and fixed settings (P1, P2).

Two kinds of cuts: the chunk grid, and the ends of messages that are not the assistant's (so the end of the
system prompt and every assistant start). How messages begin and end in tokens is learned once per chat
template (`models/template.py`) and given here as `MessageMarks`.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from regrow.policy.keys import Keys

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

    begin: role -> token ids that open a message of this role; the longest match at a place wins.
    end: token ids that close a message that is not the assistant's, one pattern a role.
    """

    begin: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    end: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """A message of `role` (never the assistant) ends before `position`."""

    position: int
    role: str


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Where the reading of a prompt of `length` keys is cut.

    cuts: ascending positions p, 0 < p < length. ends: the message ends among them.
    """

    length: int
    cuts: tuple[int, ...]
    ends: tuple[MessageEnd, ...] = ()

    def is_cut(self, position: int) -> bool:
        i = bisect_right(self.cuts, position)
        return i > 0 and self.cuts[i - 1] == position

    def last_cut_at_or_below(self, position: int) -> int:
        """Return the deepest cut <= position, or 0 (the start is always a place to read from)."""
        i = bisect_right(self.cuts, position)
        return self.cuts[i - 1] if i else 0

    def chunks_from(self, start: int) -> tuple[tuple[int, int], ...]:
        """Return the chunks (start, stop) still to be read from `start`, which is 0 or a cut (P2).

        The last token is fed by the first decode step, so the chunks end at length - 1; a prompt of one
        token is read as one chunk.
        """
        if start and not self.is_cut(start):
            raise ValueError(f"{start} is not a cut of this plan")
        stop = max(self.length - 1, 1)
        edges = [start, *(cut for cut in self.cuts if start < cut < stop), stop]
        return tuple((a, b) for a, b in zip(edges, edges[1:], strict=False) if a < b)
