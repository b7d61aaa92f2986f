"""EngineActor: the admission queue, placement from the directory, and the count of what was served.

Requests wait in a bounded queue, higher priority first, then in order of arrival. The directory knows which
slot can resume where; it is fed by `SessionChanged` tells, and a placement names the version it was made for.
"""

import asyncio
import heapq
import itertools
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from regrow.actors.events import Divergence, Failed, Finished, Queued, Reuse, Usage
from regrow.actors.messages import (
    Admit,
    Cancel,
    CutOff,
    Distrust,
    Drain,
    EngineReport,
    EngineStats,
    NowServing,
    Prepared,
    RequestDone,
    SessionChanged,
    Stale,
    Submit,
    Totals,
)
from regrow.actors.run import Run
from regrow.actors.runtime import ActorRef, Down
from regrow.errors import ActorDown, DeadlineExceeded, Draining, Overloaded, RegrowError
from regrow.policy.checkpoints import system_end
from regrow.policy.directory import Directory, Holder, HolderId, Match
from regrow.policy.keys import common_prefix
from regrow.policy.place import Candidate, Rates, place
from regrow.policy.request import Exactness
from regrow.policy.resume import resume_point

RATES = Rates(read=1.0)  # nothing is copied yet, so only the order of the costs counts
PLANS = 3  # a placement that came too late is made again this often, then the prompt is read from 0


@dataclass(frozen=True, slots=True)
class EngineWiring:
    """slots: by number. cancel and expire: tell this actor to end a request. now: the clock in seconds.

    explain: says why not more could be reused, given the chosen position and every known session (E1).
    """

    slots: Sequence[ActorRef]
    cancel: Callable[[str], None]
    expire: Callable[[str, RegrowError], None]
    now: Callable[[], float]
    explain: Callable[[Prepared, int, Sequence[SessionChanged]], tuple[str | None, Divergence | None]]
    exact: Exactness
    queue: int
    event_buffer: int


@dataclass(slots=True)
class LivingRequest:
    """A request that is queued (`slot` None) or being served. cancelled: it is to end, with `error`."""

    run: Run
    prepared: Prepared
    submitted_at: float
    order: int
    slot: int | None = None
    plans: int = 0
    cancelled: bool = False
    error: RegrowError | None = None
    timer: asyncio.TimerHandle | None = None


class EngineActor:
    """`requests` is the registry of all living requests; it outlives a crash of this actor, so that the next
    one can end what was queued."""

    def __init__(self, wiring: EngineWiring, requests: dict[str, LivingRequest]) -> None:
        self._w = wiring
        self._requests = requests
        self._queue: list[tuple[int, int, str]] = []
        self._directory = Directory()
        self._sessions: dict[int, SessionChanged] = {}
        self._serving: dict[int, str] = {}
        self._stamps = itertools.count(1)
        self._orders = itertools.count()
        self._totals = Totals()
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
                self._sessions[message.slot] = message
                self._note(message.slot)
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
                    running=len(self._serving),
                    draining=self._draining,
                    totals=self._totals,
                )
            case _:
                raise TypeError(f"the engine does not know {type(message).__name__}")
        return None

    def _submit(self, prepared: Prepared) -> Run:
        if self._draining:
            raise Draining("the engine is shutting down")
        if len(self._queue) >= self._w.queue:
            raise Overloaded(f"{len(self._queue)} requests are waiting already; the queue is full", 5)
        run = Run(f"req-{secrets.token_hex(8)}", self._w.event_buffer, self._w.cancel)
        order = next(self._orders)
        request = LivingRequest(run, prepared, self._w.now(), order)
        self._requests[run.id] = request
        if prepared.deadline_s is not None:
            expired = DeadlineExceeded(f"the request was not finished within {prepared.deadline_s:g} s")
            request.timer = asyncio.get_running_loop().call_later(
                prepared.deadline_s, self._w.expire, run.id, expired
            )
        heapq.heappush(self._queue, (-prepared.priority, order, run.id))
        ahead = sum(entry < (-prepared.priority, order, run.id) for entry in self._queue)
        run.put(Queued(request.submitted_at, ahead))
        self._dispatch()
        return run

    def _note(self, slot: int) -> None:
        """Bring the directory up to date with a slot's session and with what it was given to do."""
        session = self._sessions.get(slot)
        if session is None:
            self._directory.remove(HolderId("slot", slot))
            return
        busy = session.holder.busy or slot in self._serving
        self._directory.update(replace(session.holder, used=next(self._stamps), busy=busy))

    def _dispatch(self) -> None:
        """Place waiting requests while a slot is idle."""
        while self._queue:
            request = self._requests[self._queue[0][2]]
            placed = self._place(request)
            if placed is None:
                return
            heapq.heappop(self._queue)
            self._admit(request, placed)

    def _place(self, request: LivingRequest) -> Candidate | None:
        """Choose slot and source from the directory (S0 to S2), or with the cache off a slot alone (S9)."""
        prepared = request.prepared
        known = [self._directory.get(HolderId("slot", slot)) for slot in sorted(self._sessions)]
        slots = [holder for holder in known if holder is not None]
        use = prepared.cache != "off" and request.plans < PLANS
        matches = self._matches(prepared, slots) if use else ()
        return place(len(prepared.keys), system_end(prepared.plan), slots, matches, RATES)

    def _matches(self, prepared: Prepared, slots: Sequence[Holder]) -> Sequence[Match]:
        cuts = tuple(zip(prepared.plan.cuts, prepared.hashes, strict=True))
        matches = self._directory.lookup(cuts, self._w.exact)
        if self._w.exact != "off":
            return matches
        found = {match.holder.id: match for match in matches}
        for holder in slots:
            deeper = self._off_plan(prepared, holder)
            match = found.get(holder.id, Match(holder, 0, 0, shared=False))
            if deeper > match.position:
                found[holder.id] = replace(match, position=deeper, known=max(deeper, match.known))
        return tuple(found.values())

    def _off_plan(self, prepared: Prepared, holder: Holder) -> int:
        """Return where a slot can be resumed in mode "off", which is not bound to the plan's cuts (R1)."""
        session = self._sessions[int(holder.id.key)]
        if session.namespace != prepared.namespace:
            return 0
        shared = common_prefix(prepared.keys, session.keys)
        live_end = holder.length if session.live else None
        return resume_point(prepared.plan, shared, holder.pure_length, holder.states, "off", live_end)

    def _admit(self, request: LivingRequest, placed: Candidate) -> None:
        prepared = request.prepared
        why, diverged = self._w.explain(prepared, placed.position, tuple(self._sessions.values()))
        request.slot = placed.slot
        self._serving[placed.slot] = request.run.id
        self._note(placed.slot)
        self._w.slots[placed.slot].tell(
            Admit(
                request=request.run.id,
                prepared=prepared,
                run=request.run,
                version=placed.version,
                resume=placed.position,
                source=placed.source,
                why=why,
                diverged=diverged,
                submitted_at=request.submitted_at,
            )
        )

    def _stale(self, slot: int, name: str) -> None:
        """The slot's session had changed: back to the head of the queue, unless a cancel came in between."""
        if self._serving.get(slot) == name:
            del self._serving[slot]
            self._note(slot)
        request = self._requests.get(name)
        if request is not None:
            request.slot = None
            request.plans += 1
            heapq.heappush(self._queue, (-request.prepared.priority, request.order, name))
            if request.cancelled:
                self._cancel(name, request.error)
        self._dispatch()

    def _cancel(self, name: str, error: RegrowError | None) -> None:
        request = self._requests.get(name)
        if request is None:
            return
        if request.slot is None:
            self._queue = [entry for entry in self._queue if entry[2] != name]
            heapq.heapify(self._queue)
            self._end(request, error)
            self._settle()
        else:
            request.cancelled, request.error = True, error
            self._w.slots[request.slot].tell(Cancel(name, error))

    def _end(self, request: LivingRequest, error: RegrowError | None) -> None:
        """Forget a request that no slot serves, and give it its terminal event."""
        self._forget(request)
        if request.run.ended:
            return
        now = self._w.now()
        usage = Usage(len(request.prepared.keys), 0, 0)
        waited = (now - request.submitted_at) * 1e3
        reuse = Reuse("none", None, 0, 0, waited, 0.0, 0.0, self._w.exact)
        if error is None:
            request.run.end(Finished(now, "cancelled", "", usage, reuse))
        else:
            request.run.end(Failed(now, error, usage, reuse))

    def _done(self, done: RequestDone) -> None:
        if self._serving.get(done.slot) == done.request:
            del self._serving[done.slot]
            self._note(done.slot)
        request = self._requests.get(done.request)
        if request is not None:
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
        """A slot has crashed: what it was given ends here, since nobody else can end it."""
        slot = next((i for i, ref in enumerate(self._w.slots) if ref.name == name), None)
        if slot is None:
            return
        self._serving.pop(slot, None)
        self._sessions.pop(slot, None)
        self._note(slot)
        self._end_given(slot, (), f"slot {slot} was restarted: {reason}")

    def _found(self, slot: int, serving: str | None) -> None:
        """A slot says what it serves, to this new life; what it was given beside that is lost."""
        if serving in self._requests:
            self._serving[slot] = serving
        self._end_given(slot, (serving, self._serving.get(slot)), "the engine actor was restarted")

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
        assert set(self._serving.values()) <= set(self._requests)
