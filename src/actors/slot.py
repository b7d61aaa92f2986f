"""SlotActor: one slot's session and the request it serves.

A request's life here: placed -> mounting -> reading -> decoding -> done. On every exit path (done, stop
string, cancel, disconnect, error, deadline) the session is left true: its keys equal what the cells hold, its
chain holds only valid checkpoints.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar, assert_never

import structlog

from regrow.actors.events import (
    Failed,
    Finished,
    FinishReason,
    Placed,
    ReadDone,
    ReadProgress,
    Reuse,
    Token,
    Usage,
)
from regrow.actors.events import (
    Mounted as MountedEvent,
)
from regrow.actors.messages import (
    Admit,
    Cancel,
    DeviceTicks,
    DigestRequest,
    Drop,
    Evicted,
    Keep,
    Mount,
    Pin,
    RequestDone,
    Reserve,
    RootOffer,
    RootTouch,
    SessionChanged,
    SlotDigest,
    SlotReport,
    SlotStats,
    Stale,
    Start,
    Stop,
    Unpin,
)
from regrow.actors.runtime import ActorRef, Ask, Down
from regrow.actors.session import Session
from regrow.errors import BadRequest, DeviceFailed, NonFiniteLogits, RegrowError, SlowConsumer
from regrow.gpu.device_loop import Broken, ChunkRead, EndReason, Job, JobEnded, TokenDrawn
from regrow.gpu.types import Digest, Geometry, Snapshot
from regrow.models.detokenize import Detokenizer
from regrow.policy.checkpoints import last_start, system_end
from regrow.policy.directory import Holder, HolderId
from regrow.policy.request import Exactness
from regrow.policy.stops import StopMatcher

log = structlog.get_logger(__name__)
T = TypeVar("T")
Phase = Literal["mounting", "reading", "decoding", "stopping"]
KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class SlotWiring:
    """What a slot is given: who to speak to, the model's geometry, and the settings it needs.

    detokenizer makes a fresh one for each answer. now is the engine clock in seconds.
    """

    engine: ActorRef
    roots: ActorRef
    cache: ActorRef
    device: ActorRef
    geometry: Geometry
    detokenizer: Callable[[], Detokenizer]
    now: Callable[[], float]
    exact: Exactness
    checkpoints: int
    ask_deadline_s: float


@dataclass(slots=True)
class _Serving:
    """The request in progress."""

    admit: Admit
    epoch: int
    text: Detokenizer
    stops: StopMatcher
    placed_at: float
    phase: Phase = "mounting"
    reused: int = 0
    position: int = 0
    mount_ms: float = 0.0
    read_began: float = 0.0
    read_ms: float = 0.0
    leases: dict[int, int] = field(default_factory=dict)
    answer: list[int] = field(default_factory=list)
    shown: int = 0
    reason: FinishReason | None = None
    error: RegrowError | None = None
    tail: str = ""


class SlotActor:
    """Serves one request at a time in slot `slot`; `life` counts the actor's restarts (leases carry it)."""

    def __init__(self, slot: int, life: int, wiring: SlotWiring) -> None:
        self._slot = slot
        self._life = life
        self._w = wiring
        self._session = Session()
        self._version = self._epoch = life << 32
        self._serving: _Serving | None = None

    @property
    def session(self) -> Session:
        """What the slot holds: to look at."""
        return self._session

    @property
    def idle(self) -> bool:
        return self._serving is None

    async def started(self) -> None:
        if self._life:  # an earlier life may have left a job on the device
            self._w.device.tell(Stop(self._slot, None))
        self._tell_session(busy=False)

    async def handle(self, message: object) -> object:
        match message:
            case Admit():
                await self._admit(message)
            case DeviceTicks(events):
                for event in events:
                    self._tick(event)
            case Cancel(request, error):
                if self._serving is not None and self._serving.admit.request == request:
                    self._halt(self._serving, "cancelled", error)
            case DigestRequest():
                return await self._digest()
            case Evicted(ids):
                self._session.chain = self._session.chain.without(ids)
                self._tell_session(busy=self._serving is not None)
            case Down(name, _, reason):
                self._lost(name, reason)
            case SlotStats():
                return self._report()
            case _:
                raise TypeError(f"a slot does not know {type(message).__name__}")
        return None

    async def _admit(self, admit: Admit) -> None:
        if self._serving is not None or admit.version != self._version:
            self._w.engine.tell(Stale(self._slot, admit.request))
            return
        prepared = admit.prepared
        self._epoch += 1
        serving = _Serving(
            admit, self._epoch, self._w.detokenizer(), StopMatcher(prepared.stops.strings), self._w.now()
        )
        self._serving = serving
        admit.run.slot = self._slot
        try:
            generation = await self._mount(serving)
        except RegrowError as error:
            self._fail(serving, error)
            return
        await self._reserve(serving)
        self._put(serving, MountedEvent(self._w.now(), serving.reused, serving.mount_ms))
        job = Job(
            slot=self._slot,
            epoch=serving.epoch,
            generation=generation,
            ids=prepared.keys,
            start=serving.reused,
            chunks=prepared.plan.chunks_from(serving.reused, self._w.exact),
            snapshot_at=frozenset(serving.leases),
            sampling=prepared.sampling,
            stops=prepared.stops,
            banned=prepared.banned,
            mask=prepared.mask,
        )
        serving.read_began = self._w.now()
        serving.phase = "reading"
        self._w.device.tell(Start(job))
        if not job.chunks:
            self._read_done(serving)

    async def _mount(self, serving: _Serving) -> int:
        """Make the slot hold the prompt's first keys (R1, R4); falls back to the next lower checkpoint where
        one is gone. Returns the device's generation."""
        prepared = serving.admit.prepared
        position, state, pinned = serving.admit.resume, None, None
        while position and self._w.geometry.hybrid:
            if self._session.live and position == self._session.length:
                break
            entry = self._session.chain.at(position)
            if entry is not None:
                state = await self._ask_cache(Pin(entry.entry_id), None)
                if state is not None:
                    pinned = entry.entry_id
                    break
            lower = [p for p in self._session.chain.positions if p < position]
            position = max((p for p in lower if prepared.plan.is_cut(p)), default=0)
        self._put(
            serving,
            Placed(
                serving.placed_at,
                self._slot,
                serving.admit.source if position else "none",
                position,
                len(prepared.keys),
            ),
        )
        try:
            mounted = await self._w.device.ask(Mount(self._slot, position, state), self._w.ask_deadline_s)
        finally:
            if pinned is not None:
                self._w.cache.tell(Unpin(pinned))
        dropped, self._session.chain = self._session.chain.cut_back(position)
        self._drop(dropped)
        self._session.cut_back(position, prepared)
        serving.reused = serving.position = position
        serving.mount_ms = mounted.ms
        if position:
            self._session.chain = self._session.chain.touched(position)
            self._touch_root(position)
        return mounted.generation

    async def _reserve(self, serving: _Serving) -> None:
        """Ask for room for the wanted checkpoints beyond what is held; what is refused is not taken."""
        prepared = serving.admit.prepared
        wanted = [p for p in prepared.wanted if p > serving.reused]
        if not wanted or not self._w.geometry.hybrid:
            return
        sizes = tuple(self._w.geometry.bytes_per_checkpoint + KEY_BYTES * p for p in wanted)
        leases = await self._ask_cache(Reserve(f"slot-{self._slot}", self._life, "checkpoint", sizes), ())
        serving.leases = dict(zip(wanted, leases, strict=False))

    async def _ask_cache(self, message: Ask[T], otherwise: T) -> T:
        """Ask the cache; a crash of it costs what it kept, never a running request."""
        try:
            return await self._w.cache.ask(message, self._w.ask_deadline_s)
        except RegrowError:
            return otherwise

    def _tick(self, event: ChunkRead | TokenDrawn | JobEnded | Broken) -> None:
        serving = self._serving
        if serving is None or isinstance(event, Broken) or event.epoch != serving.epoch:
            return  # of a job that this slot has given up
        match event:
            case ChunkRead(position=position, seconds=seconds, snapshot=snapshot):
                self._chunk_read(serving, position, seconds, snapshot)
            case TokenDrawn(token=token):
                self._token(serving, token)
            case JobEnded(reason=reason, length=length):
                self._job_ended(serving, reason, length)
            case _:
                assert_never(event)

    def _chunk_read(
        self, serving: _Serving, position: int, seconds: float, snapshot: Snapshot | None
    ) -> None:
        session, prepared = self._session, serving.admit.prepared
        if session.pure == serving.position:
            session.pure = position
        read = position - serving.position
        serving.position = position
        session.extend(prepared.keys, position, ())
        lease = serving.leases.pop(position, None)
        if lease is not None and snapshot is None:
            self._drop((lease,))
        elif lease is not None and snapshot is not None:
            self._keep(serving, lease, snapshot)
        last = prepared.plan.chunks_from(0)[-1][1]
        rate = read / seconds if seconds else 0.0
        eta_ms = (last - position) / rate * 1e3 if rate else 0.0
        now = self._w.now()
        self._put(serving, ReadProgress(now, position, serving.reused, len(prepared.keys), rate, eta_ms))
        if position >= last:
            self._read_done(serving)

    def _keep(self, serving: _Serving, lease: int, snapshot: Snapshot) -> None:
        """Put a checkpoint into the chain; beyond the limit the least recently used one goes (P5)."""
        prepared = serving.admit.prepared
        position = snapshot.position
        self._w.cache.tell(Keep(lease, prepared.namespace, snapshot, position))
        chain = self._session.chain.added(position, lease, protected=True).protecting(prepared.protected)
        dropped, self._session.chain = chain.limited(self._w.checkpoints)
        self._drop(dropped)
        if position == system_end(prepared.plan):
            key = self._session.hashes[position]
            self._w.roots.tell(RootOffer(prepared.namespace, key, position, lease, self._slot))

    def _read_done(self, serving: _Serving) -> None:
        now = self._w.now()
        serving.read_ms = (now - serving.read_began) * 1e3
        if serving.phase == "reading":
            serving.phase = "decoding"
        self._put(serving, ReadDone(now, serving.reused, serving.position - serving.reused, serving.read_ms))
        self._tell_session(busy=True)

    def _token(self, serving: _Serving, token: int) -> None:
        serving.answer.append(token)
        if serving.phase == "stopping":
            return  # drawn before the device saw the stop; its cell is true, its text is dropped
        serving.shown += 1
        text, stopped = serving.stops.feed(serving.text.push(token))
        self._put(serving, Token(self._w.now(), token, text))
        if stopped:
            self._halt(serving, "stop", None)

    def _job_ended(self, serving: _Serving, reason: EndReason, length: int) -> None:
        prepared = serving.admit.prepared
        if reason == "failed":
            self._fail(serving, DeviceFailed("a step on the device failed; the device is restarted"))
            return
        if reason == "non_finite":
            self._fail(serving, NonFiniteLogits("the model gave no finite logits for this request"))
            return
        in_prompt = min(length, len(prepared.keys))
        self._session.extend(prepared.keys, in_prompt, serving.answer[: length - in_prompt])
        if serving.reason is None:
            serving.reason = "stop" if reason == "stop" else "length"
            text, stopped = serving.stops.feed(serving.text.flush())
            serving.tail = text + ("" if stopped else serving.stops.flush())
            if stopped:
                serving.reason = "stop"
        self._end(serving)

    def _halt(self, serving: _Serving, reason: FinishReason, error: RegrowError | None) -> None:
        """End the job at the next chunk or step, once."""
        if serving.phase == "stopping":
            return
        serving.phase = "stopping"
        serving.reason, serving.error = reason, error
        self._w.device.tell(Stop(self._slot, serving.epoch))

    def _fail(self, serving: _Serving, error: RegrowError) -> None:
        """End the request and empty the session: what the slot holds is in doubt."""
        serving.error = error
        self._empty()
        self._end(serving)

    def _end(self, serving: _Serving) -> None:
        self._drop(tuple(serving.leases.values()))
        self._serving = None
        self._tell_session(busy=False)
        admit = serving.admit
        read = serving.position - serving.reused
        usage = Usage(len(admit.prepared.keys), serving.shown, serving.reused)
        self._w.engine.tell(RequestDone(self._slot, admit.request, serving.error is not None, usage, read))
        reuse = Reuse(
            source=admit.source if serving.reused else "none",
            slot=self._slot,
            reused=serving.reused,
            read=read,
            queue_ms=(serving.placed_at - admit.submitted_at) * 1e3,
            mount_ms=serving.mount_ms,
            read_ms=serving.read_ms,
            exact=self._w.exact,
            why=admit.why,
            diverged=admit.diverged,
        )
        now = self._w.now()
        log.info(
            "request",
            request=admit.request,
            slot=self._slot,
            ended=type(serving.error).__name__ if serving.error else serving.reason,
            prompt=usage.prompt,
            answer=usage.completion,
            total_ms=round((now - admit.submitted_at) * 1e3),
            **{k: getattr(reuse, k) for k in ("source", "reused", "read", "exact", "why")},
            queue_ms=round(reuse.queue_ms, 1),
            mount_ms=round(reuse.mount_ms, 1),
            read_ms=round(reuse.read_ms, 1),
        )
        if serving.error is not None:
            admit.run.end(Failed(now, serving.error, usage, reuse))
        else:
            admit.run.end(Finished(now, serving.reason or "stop", serving.tail, usage, reuse))

    def _lost(self, name: str, reason: str) -> None:
        """Another actor has crashed: without the device nothing in the slot is true, without the cache no
        checkpoint is."""
        if name == self._w.device.name:
            if self._serving is not None:
                self._fail(self._serving, DeviceFailed(f"the device was restarted: {reason}"))
            else:
                self._empty()
                self._tell_session(busy=False)
        elif name == self._w.cache.name:
            self._drop_all()  # what the next life has granted meanwhile included
            self._tell_session(busy=self._serving is not None)

    def _empty(self) -> None:
        self._drop_all()
        self._session = Session()

    def _drop_all(self) -> None:
        """Give back every checkpoint and lease."""
        dropped, self._session.chain = self._session.chain.cut_back(0)
        if self._serving is not None:
            dropped += tuple(self._serving.leases.values())
            self._serving.leases.clear()
        self._drop(dropped)

    def _report(self) -> SlotReport:
        serving = self._serving
        return SlotReport(
            slot=self._slot,
            phase=serving.phase if serving else "idle",
            request=serving.admit.request if serving else None,
            length=self._session.length + (len(serving.answer) if serving else 0),
            checkpoints=self._session.chain.positions,
            version=self._version,
        )

    def check_integrity(self) -> None:
        """Assert that the session is true as far as this actor can see (R4, P5)."""
        session = self._session
        assert session.pure <= session.length
        assert all(position <= session.length for position in session.chain.positions)
        assert list(session.chain.positions) == sorted(set(session.chain.positions))

    async def _digest(self) -> Digest:
        if self._serving is not None:
            raise BadRequest(f"slot {self._slot} is busy; its digest is taken when it is idle")
        return await self._w.device.ask(SlotDigest(self._slot), self._w.ask_deadline_s)

    def _put(self, serving: _Serving, event: MountedEvent | Placed | ReadDone | ReadProgress | Token) -> None:
        if not serving.admit.run.put(event):
            error = SlowConsumer("the reader of this answer fell behind; its events were no longer kept")
            self._halt(serving, "cancelled", error)

    def _drop(self, ids: tuple[int, ...]) -> None:
        if ids:
            self._w.cache.tell(Drop(ids))
            self._w.roots.tell(Evicted(frozenset(ids)))

    def _touch_root(self, position: int) -> None:
        assert self._serving is not None
        prepared = self._serving.admit.prepared
        end = system_end(prepared.plan)
        if end and position >= end:
            self._w.roots.tell(RootTouch(self._session.hashes[end]))

    def _tell_session(self, *, busy: bool) -> None:
        """Tell the engine what can be resumed here; every change is a new version."""
        self._version += 1
        session, hybrid = self._session, self._w.geometry.hybrid
        holder = Holder(
            id=HolderId("slot", self._slot),
            length=session.length,
            cuts=tuple((cut, session.hashes[cut]) for cut in session.plan.cuts if cut <= session.length),
            states=frozenset(session.chain.positions) if hybrid else None,
            pure_length=session.pure,
            last_start=last_start(session.plan),
            used=self._version,
            busy=busy,
            version=self._version,
        )
        self._w.engine.tell(SessionChanged(self._slot, holder, session.namespace, session.keys, session.live))
