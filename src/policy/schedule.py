"""What the device does next: a chunk of a read, or a decode step for the running rows.

After a chunk of t seconds the running rows are owed at least one step, and share / (1 - share) * t seconds of
steps, before the next chunk: with a share of 0.5 as long as the chunk took. Somebody waits for the end of a
short read, so that comes after one step, or at once where little was read since the last one. The rest of
what is owed is paid after it, and rows that are owed more than `DEFERRED_S` let nothing pass. A long read
yields to a waiting one under half its remaining length, at a chunk end, at most twice. Where a chunk takes
longer than running rows may wait, they get what they are owed between its layers (`must_pause`): each part
counts as a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_YIELDS = 2
SHORT = 64  # tokens, of a read and between two steps
DEFERRED_S = 0.2


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A prompt that is not read yet. order: its place in the queue, smaller is earlier. remaining: tokens
    left to read. yielded: how often it has let another one pass."""

    slot: int
    order: int
    remaining: int
    yielded: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """reading: the slot whose chunk was read last. owed_steps and owed_s: what the running rows must get
    before the next chunk. since_step: tokens read since the last step."""

    reading: int | None = None
    owed_steps: int = 0
    owed_s: float = 0.0
    since_step: int = 0

    @property
    def owing(self) -> bool:
        return self.owed_steps > 0 or self.owed_s > 0


@dataclass(frozen=True, slots=True)
class Work:
    """Read the next chunk of slot `read`, or decode where it is None. yielding: the slots whose reads let
    this one pass."""

    read: int | None
    yielding: tuple[int, ...] = ()


def next_work(state: ScheduleState, reads: Sequence[PendingRead], decoding: int) -> Work | None:
    """Return what to do with `decoding` running rows, or None where there is nothing to do."""
    if not reads:
        return Work(read=None) if decoding else None
    queue = sorted(reads, key=lambda read: read.order)
    head = next((read for read in queue if read.slot == state.reading), queue[0])
    yielding: tuple[int, ...] = ()
    if head.yielded < MAX_YIELDS:
        shorter = next((read for read in queue if 2 * read.remaining < head.remaining), None)
        if shorter is not None:
            head, yielding = shorter, (head.slot,)
    if decoding and not _may_pass(state, head):
        return Work(read=None)
    return Work(head.slot, yielding)


def _may_pass(state: ScheduleState, read: PendingRead) -> bool:
    if state.owed_steps and state.since_step + read.remaining > SHORT:
        return False
    return state.owed_s <= (DEFERRED_S if read.remaining <= SHORT else 0.0)


def after_chunk(state: ScheduleState, slot: int, tokens: int, seconds: float, share: float) -> ScheduleState:
    """Return the state after a chunk of `slot`, or a part of one, with `tokens` in `seconds`; 0 <= share < 1.

    What was owed before is owed still.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the decode share is at least 0 and below 1, not {share}")
    return ScheduleState(slot, 1, state.owed_s + seconds * share / (1 - share), state.since_step + tokens)


def must_pause(waited_s: float, next_s: float, most_s: float) -> bool:
    """Say whether running rows that have waited for `waited_s` get a step before the next layer of a chunk,
    which takes about `next_s`, lest they wait for more than `most_s`."""
    return waited_s + next_s > most_s


def after_step(state: ScheduleState, seconds: float) -> ScheduleState:
    """Return the state after a decode step that took `seconds`."""
    return ScheduleState(state.reading, max(state.owed_steps - 1, 0), max(state.owed_s - seconds, 0.0))
