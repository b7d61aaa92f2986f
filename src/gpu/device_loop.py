"""The device loop: every step on the device, in the order `policy.schedule` says, on one thread.

Commands come in from other threads (`post`), events go out through one callback. The loop draws tokens, and
applies token stops and limits itself, so that no token waits for a round trip to an actor. After an error of
the runner it refuses work until it is told to `Reset`; jobs carry the generation they were made for.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Literal

import torch

from regrow.errors import DeviceFailed
from regrow.gpu.logprobs import prompt_scores, scores_of
from regrow.gpu.outgoing import Outgoing
from regrow.gpu.pace import DeviceCounters, Pace
from regrow.gpu.transfers import Fill, Save, Transfers
from regrow.gpu.types import Chunk, LogitsMask, Row, Runner, Scored, Snapshot, WantLogits
from regrow.policy.copy_share import CopyShare, after_copies
from regrow.policy.copy_share import at as share_at
from regrow.policy.keys import Keys
from regrow.policy.request import SamplingParams, StopRules
from regrow.policy.schedule import PendingRead, ScheduleState, next_work
from regrow.policy.stops import RepeatGuard

EXPECTED = 2  # times `linger_s`, that a request which is being prepared is waited for
EndReason = Literal["stop", "length", "repeat", "halted", "non_finite", "failed"]


@dataclass(frozen=True, slots=True)
class Job:
    """Read `chunks` of `ids` into `slot`, then draw an answer: the first token from the last chunk where that
    ends with `ids`, else from a step that is fed the last of them. Events carry `epoch` back.

    start: cells the slot holds already. snapshot_at: cuts at which to copy the running state.
    prompt_logprobs: score each token of the prompt, with so many alternatives; `start` is then 0.
    """

    slot: int
    epoch: int
    generation: int
    ids: Keys
    start: int
    chunks: tuple[tuple[int, int], ...]
    snapshot_at: frozenset[int]
    sampling: SamplingParams
    stops: StopRules
    banned: frozenset[int] = frozenset()
    mask: LogitsMask | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Halt:
    """End the job of `slot` at the next chunk or step; `epoch` None means whichever it has."""

    slot: int
    epoch: int | None


@dataclass(frozen=True, slots=True)
class SnapshotAt:
    """Also copy the running state at `position`, if the job of `slot` has not come there yet."""

    slot: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class Empty:
    """Forget what `slot` holds; what is being copied from it is finished first."""

    generation: int
    slot: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Start again with fresh arenas as `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class Call:
    """Run `function` on the device thread; `done` gets its result, or its error, there."""

    generation: int
    function: Callable[[Runner], object]
    done: Callable[[object], None]


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """`slot` has read `position` tokens of its prompt now: after the last chunk all but one, unless there is
    only one. A snapshot was taken there where one was wanted and the state was finite. scores: where asked
    for, those of the prompt's tokens that are known since this chunk, the one at `position` included."""

    slot: int
    epoch: int
    position: int
    seconds: float
    snapshot: Snapshot | None
    scores: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDrawn:
    """score: where the job's sampling asks for log-probabilities."""

    slot: int
    epoch: int
    token: int
    score: Scored | None = None


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over and the slot holds `length` tokens. snapshot: the running state there, where the job
    was halted between two chunks."""

    slot: int
    epoch: int
    reason: EndReason
    length: int
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A call of the runner raised; all jobs are gone and the arenas cannot be trusted."""

    generation: int
    error: Exception


DeviceEvent = ChunkRead | TokenDrawn | JobEnded | Broken
Command = Job | Halt | Reset | Call | Fill | Save | SnapshotAt | Empty


@dataclass(slots=True)
class _Active:
    """A job on its way: chunks still to read, and its row once it decodes."""

    job: Job
    todo: deque[tuple[int, int]]
    order: int
    snapshot_at: set[int]
    yielded: int = 0
    row: Row | None = None
    answer: list[int] = field(default_factory=list)
    guard: RepeatGuard = field(default_factory=RepeatGuard)


class DeviceLoop:
    """Drives a `Runner`. `post`, `close` and `wait` are safe from any thread; `step` belongs to one.

    now: a clock in seconds. deliver: gets the events of one step, in order. max_stall_s: how long a running
    row may wait while a chunk is read, before it is stepped between two of the chunk's layers. linger_s: how
    long, once a slot was filled, the loop waits for what its request wants next.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        decode_share: float,
        now: Callable[[], float],
        deliver: Callable[[Sequence[DeviceEvent]], None],
        max_stall_s: float = math.inf,
        linger_s: float = 0.0,
    ) -> None:
        self.runner = runner
        self._pace = Pace(decode_share, max_stall_s, now)
        self._now = now
        self._deliver = deliver
        self._linger_s = linger_s
        self._expected_until = 0.0
        self._since: float | None = None  # when the present piece of work began
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._generation = 0
        self._broken = False
        self._active: dict[int, _Active] = {}
        self._transfers = Transfers(runner)
        self._copy_share = CopyShare()
        self._orders = 0
        self._events = Outgoing[DeviceEvent](_slot_of, _with_snapshot)

    @property
    def counters(self) -> DeviceCounters:
        return self._pace.counters

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def busy_s(self) -> float:
        """Seconds that the present command, copy, chunk or step has taken so far; from any thread."""
        since = self._since
        return 0.0 if since is None else self._now() - since

    @property
    def at_work(self) -> bool:
        """Whether there is anything to be done; from any thread."""
        waiting = self._commands or self._active or self._transfers or self._events
        return self._since is not None or bool(waiting)

    def post(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def expect(self) -> None:
        """Say that a request for a slot is being prepared; from any thread."""
        self._expected_until = self._now() + EXPECTED * self._linger_s

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()

    @property
    def awake(self) -> bool:
        return bool(self._commands) or self._closed

    def wait(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self.awake)

    def step(self) -> bool:
        """Carry out the waiting commands, then one chunk or one decode step. False when nothing was done."""
        worked = bool(self._commands)
        try:
            with torch.inference_mode():
                filled = self._transfers.filled
                self._obey()
                self._since = self._now()
                worked = self._copy() or worked
                if self._transfers.filled > filled:
                    self._linger()
                self._await_expected()
                self._since = self._now()
                worked = self._work() or worked or self.runner.foresee()
                self._events.look(0.0 if worked else math.inf)
        except Exception as error:  # noqa: BLE001  whatever a step raises, the arenas are in doubt
            self._break(error)
        self._since = None
        self._tell()
        return worked or bool(self._events)

    def _obey(self) -> None:
        while self._commands:
            self._since = self._now()
            self._command(self._commands.popleft())

    def _linger(self) -> None:
        """Take the job of a slot that was just filled before the next step, if it comes soon."""
        if self._linger_s:
            with self._wake:
                self._wake.wait_for(lambda: self.awake, self._linger_s)
            self._obey()

    def _await_expected(self) -> None:
        """Begin no step while a request is about to come: it would wait for all of it, and what prepares the
        request would get no core."""
        end = min(self._expected_until, self._now() + EXPECTED * self._linger_s)
        while not self._transfers.urgent and len(self._decoding()) == len(self._active) > 0:
            if self._closed or (left := end - self._now()) <= 0:
                break
            with self._wake:
                self._wake.wait_for(lambda: self.awake, left)
            self._obey()
        else:
            self._expected_until = 0.0

    def _tell(self) -> None:
        if events := self._events.ready():
            self._deliver(events)

    def _command(self, command: Command) -> None:
        match command:
            case Job():
                self._begin(command)
            case Halt(slot, epoch):
                active = self._active.get(slot)
                if active is not None and epoch in (None, active.job.epoch):
                    self._end(active, "halted")
            case Reset(generation):
                self._give_up()
                self._transfers.fail(DeviceFailed("the device was restarted"))
                self._generation = generation
                self.runner.reset()
                self._broken = False
            case Call():
                self._call(command)
            case Empty(generation, slot):
                if generation == self._generation and not self._broken and slot not in self._active:
                    self._transfers.settle(slot)
                    self.runner.empty(slot)
            case SnapshotAt(slot, epoch, position):
                active = self._active.get(slot)
                if active is not None and active.job.epoch == epoch:
                    active.snapshot_at.add(position)
            case Fill() | Save():
                if self._broken or command.generation != self._generation:
                    command.done(DeviceFailed("the device was restarted"))
                elif isinstance(command, Fill):
                    self._transfers.fill(command)
                else:
                    self._transfers.save(command)

    def _call(self, call: Call) -> None:
        if self._broken or call.generation != self._generation:
            call.done(DeviceFailed("the device was restarted"))
            return
        try:
            result = call.function(self.runner)
        except ValueError as error:  # the call was refused before it touched a tensor
            call.done(DeviceFailed(str(error)))
        except Exception as error:  # noqa: BLE001  whatever it raises, the arenas are in doubt
            self._break(error)
            call.done(DeviceFailed(f"{type(error).__name__}: {error}"))
        else:
            call.done(result)

    def _begin(self, job: Job) -> None:
        if self._broken or job.generation != self._generation:
            self._events.add(JobEnded(job.slot, job.epoch, "failed", 0))
            return
        if job.slot in self._active:
            raise RuntimeError(f"slot {job.slot} has a job already")
        if self._pace.schedule.reading == job.slot:  # another read, which has had its turn
            self._pace.schedule = replace(self._pace.schedule, reading=None)
        self._orders += 1
        self._transfers.settle(job.slot, job.start)
        active = _Active(job, deque(job.chunks), self._orders, set(job.snapshot_at))
        self._active[job.slot] = active
        if not active.todo:
            self._join(active, int(job.ids[-1]), len(job.ids) - 1)

    def _copy(self) -> bool:
        """Let the copies go on: for their share of the time beside running streams, not between a chunk and
        the step after it, and without a pause while nothing else is to be done."""
        share = self._copy_share = share_at(self._copy_share, self._now())
        if not self._transfers:
            return False
        self._transfers.look()
        decoding = bool(self._decoding())
        if not self._active:
            while self._transfers.advance(math.inf) and not self._commands:
                pass
        elif not (decoding and self._pace.schedule.owed_steps):
            seconds = share.seconds(urgent=self._transfers.urgent, decoding=decoding)
            while seconds > 0:
                begin = self._now()
                ended = self._transfers.advance(seconds)
                took = self._now() - begin
                self._copy_share = after_copies(self._copy_share, took)
                seconds = seconds - took if ended else 0.0
        return True

    def _work(self) -> bool:
        reading = [a for a in self._active.values() if a.row is None]
        decoding = self._decoding()
        reads = [
            PendingRead(a.job.slot, order=a.order, remaining=a.todo[-1][1] - a.todo[0][0], yielded=a.yielded)
            for a in sorted(reading, key=lambda a: a.order)
        ]
        work = next_work(self._pace.schedule, reads, decoding=len(decoding))
        if work is None:
            return False
        if work.read is None:
            self._decode(decoding)
        else:
            for slot in work.yielding:
                self._active[slot].yielded += 1
            self._read(self._active[work.read])
        return True

    def _decoding(self) -> list[_Active]:
        return [a for a in self._active.values() if a.row is not None]

    def _read(self, active: _Active) -> None:
        job = active.job
        start, stop = active.todo.popleft()
        whole = stop == len(job.ids)
        want: WantLogits = "last" if whole else "none"
        if job.prompt_logprobs is not None:
            want = "all"
        chunk = Chunk(job.slot, start, job.ids[start:stop], want_logits=want)
        pause = partial(self._pause, job.slot) if self._pace.may_part(start, stop) else None
        self._pace.chunk_begins()
        result = self.runner.read(chunk, pause)
        told = prompt_scores(job.ids, start, stop, result.logits, job.prompt_logprobs)
        snapshot = self.runner.snapshot(job.slot) if stop in active.snapshot_at else None
        seconds = self._pace.chunk_ends(job.slot, start, stop)
        if told is None:
            self._end(active, "non_finite")
            return
        position = min(stop, max(len(job.ids) - 1, 1))
        self._events.add(ChunkRead(job.slot, job.epoch, position, seconds, None, told), snapshot)
        if active.todo:
            return
        if whole:
            assert result.logits is not None
            logits = result.logits if want == "last" else result.logits[-1]
            row = self._row(active, int(job.ids[-1]), stop - 1)
            token = self.runner.sample(row, logits)
            self._join(active, -1 if token is None else token, stop)
            tokens = () if token is None else (token,)
            self._drawn(active, tokens, scores_of(row, token, logits))
        else:
            self._join(active, int(job.ids[-1]), stop)

    def _pause(self, reading: int) -> None:
        """Between two layers of a chunk: step the running rows where they cannot wait any longer. A layer is
        a piece of work: a chunk with many steps in it does not hang."""
        self._since = self._now()
        if not self._pace.layer_begins(reading):
            return
        while self._pace.schedule.owing and (decoding := self._decoding()):
            self._decode(decoding)
            self._tell()
            self._since = self._now()
        self._pace.chunk_goes_on()

    def _row(self, active: _Active, token: int, length: int) -> Row:
        job = active.job
        return Row(
            job.slot,
            token,
            length,
            job.sampling,
            prompt_ids=job.ids,
            answer_ids=active.answer,
            banned=self._banned(active),
            mask=job.mask,
        )

    def _join(self, active: _Active, token: int, length: int) -> None:
        self.runner.join(active.job.slot)
        active.row = self._row(active, token, length)
        self._pace.rows_run(True)

    def _decode(self, decoding: Sequence[_Active]) -> None:
        decoding = sorted(decoding, key=lambda a: a.job.slot)
        self._pace.step_begins()
        result = self.runner.step([a.row for a in decoding if a.row is not None])
        self._pace.step_ends(sum(len(tokens) for tokens in result.tokens))
        for active, tokens, scored in zip(decoding, result.tokens, result.scores, strict=True):
            self.runner.commit(active.job.slot, max(len(tokens), 1))
            self._drawn(active, tokens, scored)

    def _drawn(self, active: _Active, tokens: Sequence[int], scored: Sequence[Scored]) -> None:
        """Give the drawn tokens, with their scores where there are any, to the request, up to the one that
        ends it."""
        job, row = active.job, active.row
        assert row is not None
        if not tokens:
            self._end(active, "non_finite")
            return
        for token, score in zip_longest(tokens, scored):
            if token in job.stops.token_ids:
                self._end(active, "stop")
                return
            active.answer.append(token)
            if job.mask is not None:
                job.mask.accept(token)
            self._events.add(TokenDrawn(job.slot, job.epoch, token, score))
            if active.guard.repeats(token):
                self._end(active, "repeat")
                return
            if len(active.answer) >= job.stops.max_tokens:
                self._end(active, "length")
                return
        row.token = tokens[-1]
        row.length = self.runner.length(job.slot)
        row.counter = len(active.answer)
        row.banned = self._banned(active)

    def _banned(self, active: _Active) -> frozenset[int]:
        job = active.job
        early = len(active.answer) < job.stops.min_tokens
        return job.banned | job.stops.token_ids if early else job.banned

    def _end(self, active: _Active, reason: EndReason) -> None:
        job = active.job
        if active.row is not None:
            self.runner.leave(job.slot)
        del self._active[job.slot]
        self._pace.rows_run(bool(self._decoding()))
        length = self.runner.length(job.slot)
        between = reason == "halted" and active.row is None and length > job.start
        kept = self.runner.snapshot(job.slot) if between and self.runner.geometry.hybrid else None
        self._events.add(JobEnded(job.slot, job.epoch, reason, length), kept)

    def _break(self, error: Exception) -> None:
        """Refuse work until `Reset`."""
        self._give_up()
        self._broken = True
        self._events.add(Broken(self._generation, error))
        self._tell()  # first: who gets an answer and asks again is to find the device restarted
        self._transfers.fail(DeviceFailed(f"{type(error).__name__}: {error}"))

    def _give_up(self) -> None:
        """End every job as failed; no snapshot is waited for."""
        self._events.give_up()
        for active in self._active.values():
            self._events.add(JobEnded(active.job.slot, active.job.epoch, "failed", 0))
        self._active.clear()
        self._pace.rows_run(False)
        self._pace.schedule = ScheduleState()


def _slot_of(event: DeviceEvent) -> int | None:
    return None if isinstance(event, Broken) else event.slot


def _with_snapshot(event: DeviceEvent, snapshot: Snapshot | None) -> DeviceEvent:
    assert isinstance(event, ChunkRead | JobEnded)
    return replace(event, snapshot=snapshot)
