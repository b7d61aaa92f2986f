"""EngineActor: the admission queue, placement from the directory, and the count of what was served.

Requests wait in a bounded queue, higher priority first, then in order of arrival. The directory knows which
slot can resume where; it is fed by `SessionChanged` tells, and a placement names the version it was made for.
"""

import asyncio
import heapq
import itertools
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from regrow.actors.disk_messages import (
    DiskChanged,
)
from regrow.actors.events import Divergence, Event, Failed, Finished, Queued, Reuse, Usage
from regrow.actors.messages import (
    Admit,
    CacheChanged,
    Cancel,
    CutOff,
    Distrust,
    Drain,
    EngineReport,
    EngineStats,
    Holds,
    MountEnded,
    NowServing,
    Prepared,
    RequestDone,
    SessionChanged,
    Stale,
    Submit,
    Totals,
    WantCut,
)
from regrow.actors.placement import Choice, Placement, smoothed
from regrow.actors.run import Run
from regrow.actors.runtime import ActorRef, Down
from regrow.errors import ActorDown, DeadlineExceeded, Draining, Overloaded, RegrowError
from regrow.policy.explain import Miss, MissReason
from regrow.policy.place import Candidate
from regrow.policy.request import Exactness

CACHE, DISK = "cache", "disk"
UNMEASURED_S, LONGEST_S = 5, 600  # to wait where the queue is full: before any request has ended, and at most
PLANS = 3  # a placement that came too late is made again this often, then the prompt is read from 0


@dataclass(frozen=True, slots=True)
class EngineWiring:
    """slots: by number. cancel and expire: tell this actor to end a request. now: the clock in seconds.

    explain: says why not more could be reused, given the chosen position and every known session (E1).
    watch: is told every event of every run. deadline_s: what any request may take at most, None: any time.
    """

    slots: Sequence[ActorRef]
    cancel: Callable[[str], None]
    expire: Callable[[str, RegrowError], None]
    now: Callable[[], float]
    explain: Callable[[Prepared, int, Placement], tuple[Miss | None, Divergence | None]]
    exact: Exactness
    hybrid: bool
    bytes_per_token: int
    bytes_per_state: int
    chunk: int
    queue: int
    event_buffer: int
    watch: Callable[[str, Event], None]
    deadline_s: float | None


@dataclass(slots=True)
class LivingRequest:
    """A request that is queued (`slot` None) or being served. ending: the cancel on its way to the slot.

    wants: the reader and the cut it waits for (S6).
    """

    run: Run
    prepared: Prepared
    submitted_at: float
    order: int
    slot: int | None = None
    placed_at: float = 0.0
    plans: int = 0
    ending: Cancel | None = None
    wants: tuple[str, int] | None = None
    timer: asyncio.TimerHandle | None = None

    def end(self, error: RegrowError | None, now: float, exact: Exactness) -> None:
        """Give a request that no slot serves its terminal event, unless it had one."""
        if self.timer is not None:
            self.timer.cancel()
        if self.run.ended:
            return
        usage = Usage(0, 0, 0)
        reuse = Reuse("none", None, 0, 0, (now - self.submitted_at) * 1e3, 0.0, 0.0, exact)
        if error is None:
            self.run.end(Finished(now, "cancelled", "", usage, reuse))
        else:
            self.run.end(Failed(now, error, usage, reuse))


class EngineActor:
    """`requests` is the registry of all living requests; it outlives a crash of this actor, so that the next
    one can end what was queued."""

    def __init__(self, wiring: EngineWiring, requests: dict[str, LivingRequest]) -> None:
        self._w = wiring
        self._requests = requests
        self._queue: list[tuple[int, int, str]] = []
        self._placement = Placement(
            wiring.hybrid, wiring.exact, wiring.bytes_per_token, wiring.chunk, wiring.bytes_per_state
        )
        self._orders = itertools.count()
        self._totals = Totals()
        self._misses: Counter[MissReason] = Counter()
        self._pace: float | None = None
        self._draining = False
        self._idle_waiters: list[asyncio.Future[None]] = []

    async def started(self) -> None:
        """End what an earlier life of this actor had queued; the slots say what they serve and end it."""
        for request in list(self._requests.values()):
            if request.run.ended or request.slot is None:
                self._end(request, ActorDown("the engine actor was restarted"))

    async def handle(self, message: object) -> object:
        match message:
            case Submit(prepared):
                return self._submit(prepared)
            case Cancel(request, error):
                self._cancel(request, error)
            case SessionChanged():
                self._placement.session_changed(message)
                self._dispatch()
            case CacheChanged():
                self._placement.cache_changed(message)
                self._dispatch()
            case DiskChanged():
                self._placement.disk_changed(message)
                self._dispatch()
            case MountEnded():
                self._placement.mount_ended(message)
                self._dispatch()
            case Distrust():
                for ref in self._w.slots:
                    ref.tell(message)
            case NowServing(slot, request):
                self._found(slot, request)
            case RequestDone():
                self._done(message)
            case Stale(slot, request):
                self._stale(slot, request)
            case Down(name, _, reason):
                self._lost(name, reason)
            case Holds(prefixes):
                untold = len(self._placement.sessions) < len(self._w.slots)  # by new lives of actors
                return untold or self._placement.may_hold(prefixes)
            case Drain():
                self._draining = True
                return self._when_idle()
            case CutOff():
                self._draining = True
                for request in list(self._requests):
                    self._cancel(request, Draining("the engine is shutting down"))
                return self._when_idle()
            case EngineStats():
                return EngineReport(
                    waiting=len(self._queue),
                    running=len(self._placement.serving),
                    rates=self._placement.rates,
                    copied=dict(self._placement.copied),
                    draining=self._draining,
                    totals=replace(self._totals, misses=dict(self._misses)),
                )
            case _:
                raise TypeError(f"the engine does not know {type(message).__name__}")
        return None

    def _submit(self, prepared: Prepared) -> Run:
        if self._draining:
            raise Draining("the engine is shutting down")
        run = Run(f"req-{secrets.token_hex(8)}", self._w.event_buffer, self._w.cancel, self._w.watch)
        run.thinks = prepared.thinks
        request = LivingRequest(run, prepared, self._w.now(), next(self._orders))
        self._requests[run.id] = request
        entry = (-prepared.priority, request.order, run.id)
        heapq.heappush(self._queue, entry)
        self._dispatch()
        if request.slot is None and len(self._queue) > self._w.queue:
            self._unqueue(run.id)
            del self._requests[run.id]
            waiting = f"{len(self._queue)} requests are waiting already; the queue is full"
            raise Overloaded(waiting, self._retry_after())
        self._set_deadline(request)
        ahead = 0 if request.slot is not None else sum(other < entry for other in self._queue)
        run.put(Queued(request.submitted_at, ahead))
        return run

    def _retry_after(self) -> int:
        """Return the seconds after which a slot will be free and the queue have room, by the time that
        requests have taken so far."""
        if self._pace is None:
            return UNMEASURED_S
        return max(1, min(math.ceil(self._pace / len(self._w.slots)), LONGEST_S))

    def _set_deadline(self, request: LivingRequest) -> None:
        deadlines = [d for d in (request.prepared.deadline_s, self._w.deadline_s) if d is not None]
        if deadlines:
            seconds = min(deadlines)
            expired = DeadlineExceeded(f"the request was not finished within {seconds:g} s")
            request.timer = asyncio.get_running_loop().call_later(
                seconds, self._w.expire, request.run.id, expired
            )

    def _dispatch(self) -> None:
        """Place waiting requests in order; one that waits for a reader lets the next ones pass (S6)."""
        waiting, self._queue = self._queue, []
        while waiting:
            entry = heapq.heappop(waiting)
            request = self._requests[entry[2]]
            prepared = request.prepared
            use = prepared.cache != "off" and prepared.prompt_logprobs is None and request.plans < PLANS
            choice = self._placement.choose(prepared, use_sources=use, use_disk=not request.plans)
            if isinstance(choice, Choice):
                self._admit(request, choice)
                continue
            self._queue.append(entry)
            if choice.reader is None:
                break
            self._want(request, choice.reader, choice.cut)
        self._queue.extend(waiting)
        heapq.heapify(self._queue)

    def _want(self, request: LivingRequest, reader: int, cut: int) -> None:
        """Tell a reader, once, that the state at `cut` is waited for."""
        serving = self._placement.given(reader)
        if serving is not None and request.wants != (serving, cut):
            request.wants = (serving, cut)
            self._w.slots[reader].tell(WantCut(serving, cut))

    def _admit(self, request: LivingRequest, choice: Choice) -> None:
        prepared, placed = request.prepared, choice.candidate
        why, diverged = self._w.explain(prepared, placed.position, self._placement)
        if why is not None and not request.plans:
            self._misses[why.reason] += 1
        request.slot, request.placed_at = placed.slot, self._w.now()
        self._placement.give(placed.slot, request.run.id, prepared, placed)
        self._w.slots[placed.slot].tell(
            Admit(
                request=request.run.id,
                prepared=prepared,
                run=request.run,
                life=self._placement.sessions[placed.slot].life,
                resume=placed.position,
                source=placed.source,
                holder=placed.holder,
                wanted=choice.wanted,
                why=why,
                diverged=diverged,
                submitted_at=request.submitted_at,
            )
        )

    def _stale(self, slot: int, name: str) -> None:
        """The slot's session had changed: back to the head of the queue."""
        if self._placement.given(slot) == name:
            self._placement.take_back(slot)
        request = self._requests.get(name)
        if request is not None and request.ending is not None:
            self._end(request, request.ending.error)
            self._settle()
        elif request is not None:
            request.slot = None
            request.plans += 1
            heapq.heappush(self._queue, (-request.prepared.priority, request.order, name))
        self._dispatch()

    def _cancel(self, name: str, error: RegrowError | None) -> None:
        request = self._requests.get(name)
        if request is None:
            return
        if request.slot is None:
            self._unqueue(name)
            self._end(request, error)
            self._settle()
        else:
            request.ending = Cancel(name, error)
            self._w.slots[request.slot].post(request.ending)

    def _unqueue(self, name: str) -> None:
        self._queue = [entry for entry in self._queue if entry[2] != name]
        heapq.heapify(self._queue)

    def _end(self, request: LivingRequest, error: RegrowError | None) -> None:
        """Forget a request that no slot serves, and give it its terminal event."""
        self._forget(request)
        request.end(error, self._w.now(), self._w.exact)

    def _done(self, done: RequestDone) -> None:
        if self._placement.given(done.slot) == done.request:
            self._placement.take_back(done.slot)
        self._placement.request_done(done)
        request = self._requests.get(done.request)
        if request is not None:
            self._pace = smoothed(self._pace, self._w.now() - request.placed_at)
            self._forget(request)
        totals = self._totals
        self._totals = Totals(
            finished=totals.finished + (not done.failed),
            failed=totals.failed + done.failed,
            read=totals.read + done.read,
            reused=totals.reused + done.usage.cached,
            drawn=totals.drawn + done.usage.completion,
        )
        self._dispatch()
        self._settle()

    def _forget(self, request: LivingRequest) -> None:
        self._requests.pop(request.run.id, None)
        if request.timer is not None:
            request.timer.cancel()

    def _lost(self, name: str, reason: str) -> None:
        """A slot has crashed: what it was given ends here, since nobody else can end it. Without the cache,
        what it kept is no source any more."""
        if name == CACHE:
            self._placement.cache_lost()
        if name == DISK:
            self._placement.disk_lost()
        slot = next((i for i, ref in enumerate(self._w.slots) if ref.name == name), None)
        if slot is None:
            return
        self._placement.lose(slot)
        self._end_given(slot, (), f"slot {slot} was restarted: {reason}")

    def _found(self, slot: int, serving: str | None) -> None:
        """A slot says what it serves, to this new life; what it was given beside that is lost."""
        request = self._requests.get(serving or "")
        if request is not None:
            self._placement.give(slot, request.run.id, request.prepared, Candidate(slot, "none", 0))
        kept = (serving, self._placement.given(slot))
        self._end_given(slot, kept, "the engine actor was restarted")

    def _end_given(self, slot: int, kept: Collection[str | None], reason: str) -> None:
        for name, request in list(self._requests.items()):
            if request.slot == slot and name not in kept:
                self._end(request, ActorDown(reason))
        self._settle()

    def _when_idle(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle_waiters.append(waiter)
        self._settle()
        return waiter

    def _settle(self) -> None:
        """Answer those who wait for the last request to end."""
        if not self._requests:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle_waiters.clear()

    def check_integrity(self) -> None:
        """Assert that every living request is either queued once or served by one slot."""
        queued = sorted(entry[2] for entry in self._queue)
        waiting = sorted(name for name, r in self._requests.items() if r.slot is None)
        assert queued == waiting
        assert self._placement.serving <= set(self._requests)
