"""The pace of running rows while something is read beside them: what they are owed, how long they wait.

A chunk that takes longer than rows may wait is parted between its layers: they get there what they would get
after it. Whatever made them wait for longer than that is counted, a copy or a snapshot too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from regrow.policy.schedule import SHORT, ScheduleState, after_chunk, after_step, must_pause

SAFE = 1.5  # times what a short chunk is expected to take


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """Counters of the loop: chunks read, decode steps, tokens drawn, seconds of both.

    long_chunks: those that took longer than running rows may wait. pauses: how often such rows were stepped
    between two layers of a chunk. stalls: how often they waited for longer all the same; longest_wait_s: the
    longest they did at all.
    """

    chunks: int = 0
    read_tokens: int = 0
    read_s: float = 0.0
    long_chunks: int = 0
    steps: int = 0
    drawn: int = 0
    step_s: float = 0.0
    pauses: int = 0
    stalls: int = 0
    longest_wait_s: float = 0.0


@dataclass(slots=True)
class Pace:
    """share: of the time that running rows get beside a read. most_s: seconds they may wait for their next
    step. now: a clock in seconds."""

    share: float
    most_s: float
    now: Callable[[], float]
    schedule: ScheduleState = field(default_factory=ScheduleState)
    counters: DeviceCounters = field(default_factory=DeviceCounters)
    _waits_since: float | None = None  # None: no row runs
    _part_at: float = 0.0
    _layer_at: float = 0.0
    _layer_s: float = 0.0
    _read_s: float = 0.0
    _short: tuple[int, int, float] = 1, 1, math.inf  # the last short chunk: its tokens, its end, its seconds

    def rows_run(self, running: bool) -> None:
        """Say whether there are running rows: those that come first wait from now on."""
        if not running:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self.now()

    def may_part(self, start: int, stop: int) -> bool:
        """Say whether the chunk [start, stop), which begins now, may have to be parted. A short one need not
        be where by an earlier one it is over long before: its time grows with tokens and depth at most."""
        since, tokens = self._waits_since, stop - start
        if since is None or tokens > SHORT:
            return since is not None
        known_tokens, known_stop, seconds = self._short
        expected = seconds * max(1.0, tokens / known_tokens) * max(1.0, stop / known_stop)
        return must_pause(self.now() - since, SAFE * expected, self.most_s)

    def chunk_begins(self) -> None:
        self._part_at = self._layer_at = self.now()
        self._layer_s = self._read_s = 0.0

    def layer_begins(self, slot: int) -> bool:
        """Say whether running rows must be stepped before this layer of a chunk of `slot`, as long as
        `schedule` owes them steps."""
        now = self.now()
        self._layer_s = max(self._layer_s, now - self._layer_at)
        self._layer_at = now
        since = self._waits_since
        if since is None or not must_pause(now - since, self._layer_s, self.most_s):
            return False
        self._part_ends(slot, 0, now)
        self.counters = replace(self.counters, pauses=self.counters.pauses + 1)
        return True

    def chunk_goes_on(self) -> None:
        self._part_at = self._layer_at = self.now()

    def chunk_ends(self, slot: int, start: int, stop: int) -> float:
        """Return the seconds that the chunk took, without the steps in it."""
        tokens = stop - start
        self._part_ends(slot, tokens, self.now())
        counters, seconds = self.counters, self._read_s
        if SHORT // 2 <= tokens <= SHORT:
            self._short = tokens, stop, seconds
        self.counters = replace(
            counters,
            chunks=counters.chunks + 1,
            read_tokens=counters.read_tokens + tokens,
            read_s=counters.read_s + seconds,
            long_chunks=counters.long_chunks + (seconds > self.most_s),
        )
        return seconds

    def step_begins(self) -> None:
        begin = self.now()
        waited = 0.0 if self._waits_since is None else begin - self._waits_since
        self.counters = replace(
            self.counters,
            stalls=self.counters.stalls + (waited > self.most_s),
            longest_wait_s=max(self.counters.longest_wait_s, waited),
        )
        self._waits_since = begin

    def step_ends(self, drawn: int) -> float:
        """Return the seconds that the step took; `drawn` tokens came of it."""
        now, begin = self.now(), self._waits_since
        assert begin is not None
        self._waits_since = now
        self.schedule = after_step(self.schedule, now - begin)
        counters = self.counters
        self.counters = replace(
            counters,
            steps=counters.steps + 1,
            drawn=counters.drawn + drawn,
            step_s=counters.step_s + now - begin,
        )
        return now - begin

    def _part_ends(self, slot: int, tokens: int, now: float) -> None:
        part = now - self._part_at
        self._read_s += part
        before = self.schedule if self._waits_since is not None else replace(self.schedule, owed_s=0.0)
        self.schedule = after_chunk(before, slot, tokens, part, self.share)
