"""SlotActor: one slot's session and the request it serves.

A request's life here: placed -> mounting -> reading -> decoding -> done. On every exit path (done, stop
string, cancel, disconnect, error, deadline) the session is left true: its keys equal what the cells hold, its
chain holds only valid checkpoints.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import assert_never

from regrow.actors.disk_messages import (
    SaveIdle,
    SaveNow,
    SaveSession,
)
from regrow.actors.events import Mounted as MountedEvent
from regrow.actors.events import Placed, ReadDone, ReadProgress, Token
from regrow.actors.messages import (
    Admit,
    AlsoSnapshot,
    Cancel,
    DeviceTicks,
    DigestRequest,
    Distrust,
    EmptySlot,
    Evicted,
    KeepState,
    LetGo,
    Mounted,
    MountEnded,
    NowServing,
    Purge,
    RequestDone,
    ReserveStates,
    RootOffer,
    RootTouch,
    SessionChanged,
    SlotDigest,
    SlotReport,
    SlotStats,
    Stale,
    Start,
    Stop,
    WantCut,
)
from regrow.actors.mounting import SlotWiring, SourceGone, mount, park, save
from regrow.actors.runtime import Down
from regrow.actors.serving import Serving
from regrow.actors.session import Session
from regrow.errors import BadRequest, DeviceFailed, NonFiniteLogits, RegrowError, SlowConsumer
from regrow.gpu.device_loop import Broken, ChunkRead, EndReason, Job, JobEnded, TokenDrawn
from regrow.gpu.types import Digest, Snapshot
from regrow.policy.checkpoints import system_end
from regrow.policy.directory import HolderId
from regrow.policy.eviction import losses


class SlotActor:
    """Serves one request at a time in slot `slot`; `life` counts the actor's restarts (leases carry it)."""

    def __init__(self, slot: int, life: int, wiring: SlotWiring) -> None:
        self._slot = slot
        self._me = HolderId("slot", slot)
        self._life = life
        self._w = wiring
        self._session = Session()
        self._version = self._epoch = life << 32
        self._serving: Serving | None = None
        self._generation = 0  # of the device when it mounted the session

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
            self._w.device.tell(EmptySlot(self._slot))
        self._tell_session()

    async def handle(self, message: object) -> object:
        match message:
            case Admit():
                await self._admit(message)
            case DeviceTicks(events):
                for event in events:
                    await self._tick(event)
            case Cancel(request, error):
                if self._serving is not None and self._serving.admit.request == request:
                    self._halt(self._serving, "cancelled", error)
            case WantCut(request, position):
                await self._want(request, position)
            case Distrust(position, key):
                self._distrust(position, key)
            case DigestRequest():
                return await self._digest()
            case Evicted(prefixes):
                self._evicted(prefixes)
            case SaveIdle(version):
                if version == self._version:
                    await self._save()
            case SaveNow() | SaveSession():
                await self._save()
            case Down():
                self._lost(message)
            case SlotStats():
                return self._report()
            case _:
                raise TypeError(f"a slot does not know {type(message).__name__}")
        return None

    async def _admit(self, admit: Admit) -> None:
        if self._serving is not None or admit.life != self._life:
            self._w.engine.tell(Stale(self._slot, admit.request))
            return
        self._epoch += 1
        serving = Serving.of(admit, self._epoch, self._w)
        try:
            async with mount(self._w, self._slot, self._session, admit) as (mounted, copied):
                await self._mounted(serving, mounted, copied)
        except SourceGone as gone:
            if gone.touched:
                self._empty()
                self._tell_session()
            self._w.engine.tell(Stale(self._slot, admit.request))
            return
        except RegrowError as error:
            self._serving = serving
            self._fail(serving, error)
            return
        if serving.phase == "stopping":  # its reader did not even take the first events
            self._end(serving)
            return
        # the deepest first, if there is no room for all; after the mount, whose source may make room for it
        beyond = [p for p in reversed(admit.wanted) if p > admit.resume]
        await self._reserve(serving, beyond, size=self._w.geometry.bytes_per_checkpoint)
        self._start(serving)

    async def _mounted(self, serving: Serving, mounted: Mounted, copied: int) -> None:
        """Make the session that of the request, whose first keys the cells hold now, and hold its states."""
        self._serving, admit = serving, serving.admit
        admit.run.slot = self._slot
        position = admit.resume
        if admit.holder != self._me:  # other cells: what was here has gone, parked or not
            self._empty(tell_device=False)
            self._session.pure = position
        dropped, self._session.chain = self._session.chain.cut_back(position)
        self._let_go(dropped)
        self._session.serve(position, admit.prepared, admit.wanted)
        serving.reused = serving.position = position
        serving.mount_ms, self._generation = mounted.ms, mounted.generation
        self._w.engine.tell(MountEnded(self._slot, admit.request, admit.source, copied, mounted.ms))
        self._put(
            serving,
            Placed(serving.placed_at, self._slot, admit.source, position, len(admit.prepared.keys)),
        )
        self._put(serving, MountedEvent(self._w.now(), position, mounted.ms))
        self._touch_root(admit)
        await self._reserve(serving, [p for p in self._session.hashes if p <= position], size=0)  # S8

    def _start(self, serving: Serving) -> None:
        prepared = serving.admit.prepared
        job = Job(
            slot=self._slot,
            epoch=serving.epoch,
            generation=self._generation,
            ids=prepared.keys,
            start=serving.reused,
            chunks=prepared.plan.chunks_from(serving.reused, self._w.exact),
            snapshot_at=frozenset(serving.leases),
            sampling=prepared.sampling,
            stops=prepared.stops,
            banned=prepared.banned,
            mask=prepared.mask,
            prompt_logprobs=prepared.prompt_logprobs,
        )
        serving.read_began = self._w.now()
        serving.phase = "reading"
        self._w.device.tell(Start(job))
        if job.chunks:
            self._tell_session()
        else:
            self._read_done(serving)

    async def _reserve(self, serving: Serving, positions: list[int], size: int) -> None:
        """Ask for room for the states at `positions`; a state that is there already is held instead (P5)."""
        if not positions or not self._w.geometry.hybrid or serving.admit.prepared.cache == "off":
            return
        hashes, every = self._session.hashes, sorted({*self._session.chain.positions, *positions})
        saved = dict(zip(every, losses(every), strict=True))
        saved[every[-1]] = every[-1] - sum(every[-3:-2])  # a new end may take the place of the old one
        wanted = tuple((hashes[p], size, saved[p]) for p in positions)
        leases = await self._w.ask_cache(ReserveStates(self._me, wanted), ())
        held = []
        for position, lease in zip(positions, leases, strict=False):
            if lease:
                serving.leases[position] = lease
                serving.there.discard(position)
            elif lease == 0 and position <= serving.position:
                held.append(position)
            elif lease == 0:
                serving.there.add(position)
        self._add_to_chain(serving, held)

    async def _want(self, request: str, position: int) -> None:
        """Take a checkpoint at `position` too, for a request that waits for it (S6)."""
        serving = self._serving
        if serving is None or serving.admit.request != request or position <= serving.position:
            return
        if self._w.geometry.hybrid and position not in serving.leases and position not in serving.there:
            await self._reserve(serving, [position], size=self._w.geometry.bytes_per_checkpoint)
            self._w.device.tell(AlsoSnapshot(self._slot, serving.epoch, position))

    async def _tick(self, event: ChunkRead | TokenDrawn | JobEnded | Broken) -> None:
        serving = self._serving
        if serving is None or isinstance(event, Broken) or event.epoch != serving.epoch:
            return  # of a job that this slot has given up
        match event:
            case ChunkRead():
                await self._chunk_read(serving, event)
            case TokenDrawn():
                self._token(serving, event)
            case JobEnded():
                await self._job_ended(serving, event)
            case _:
                assert_never(event)

    async def _chunk_read(self, serving: Serving, chunk: ChunkRead) -> None:
        session, prepared, position = self._session, serving.admit.prepared, chunk.position
        if session.pure == serving.position:
            session.pure = prepared.plan.last_cut_at_or_below(position)
        read = position - serving.position
        serving.position = position
        session.extend(prepared.keys, position, ())
        await self._keep(serving, position, chunk.snapshot)
        if position == system_end(prepared.plan) and prepared.cache != "off":
            self._w.roots.tell(RootOffer(session.hashes[position], position))
            if self._w.root_cells == "always":
                await park(self._w, self._slot, session, position)
            await self._save()
        last = max(len(prepared.keys) - 1, 1)
        rate = read / chunk.seconds if chunk.seconds else 0.0
        eta_ms = (last - position) / rate * 1e3 if rate else 0.0
        now, told = self._w.now(), tuple(map(serving.logprob, chunk.scores))
        self._put(
            serving, ReadProgress(now, position, serving.reused, len(prepared.keys), rate, eta_ms, told)
        )
        if position >= last:
            self._read_done(serving)
        else:
            self._tell_session()

    async def _keep(self, serving: Serving, position: int, snapshot: Snapshot | None) -> None:
        """Keep the state that was taken at `position`, or the one that was there already."""
        lease = serving.leases.pop(position, None)
        if lease is None:
            if position in serving.there:
                serving.there.remove(position)
                self._add_to_chain(serving, [position])
        elif snapshot is None:
            self._w.cache.tell(LetGo(self._me, leases=(lease,)))
        else:
            keep = KeepState(lease, self._session.hashes[position], snapshot)
            if await self._w.ask_cache(keep, False):
                self._add_to_chain(serving, [position])

    def _add_to_chain(self, serving: Serving, positions: Sequence[int]) -> None:
        """Put checkpoints that the cache holds for this slot into the chain, ascending; beyond the limit the
        least recently used ones go (P5)."""
        chain = self._session.chain
        for position in positions:
            chain = chain.added(position, self._session.hashes[position], protected=True)
        protected = {*serving.admit.prepared.protected, *positions[-1:]}
        dropped, self._session.chain = chain.protecting(protected).limited(self._w.checkpoints)
        self._let_go(dropped)

    def _read_done(self, serving: Serving) -> None:
        now = self._w.now()
        serving.read_ms = (now - serving.read_began) * 1e3
        if serving.phase == "reading":
            serving.phase = "decoding"
        self._put(serving, ReadDone(now, serving.reused, serving.position - serving.reused, serving.read_ms))
        self._tell_session()

    def _token(self, serving: Serving, drawn: TokenDrawn) -> None:
        serving.answer.append(drawn.token)
        if serving.phase == "stopping":
            return  # drawn before the device saw the stop; its cell is true, its text is dropped
        text, stopped = serving.show(drawn.token)
        logprob = None if drawn.score is None else serving.logprob(drawn.score)
        self._put(serving, Token(self._w.now(), drawn.token, text, logprob))
        if stopped:
            self._halt(serving, "stop", None)

    async def _job_ended(self, serving: Serving, ended: JobEnded) -> None:
        if ended.reason == "failed":
            self._fail(serving, DeviceFailed("a step on the device failed; the device is restarted"))
            return
        if ended.reason == "non_finite":
            prepared = serving.admit.prepared
            if cuts := prepared.plan.cuts:  # before anybody can be placed on what shares them
                self._w.engine.tell(Distrust(cuts[0], prepared.hashes[0]))
            self._w.cache.tell(Purge(frozenset(prepared.hashes)))
            self._fail(serving, NonFiniteLogits("the model gave no finite logits for this request"))
            return
        keys = serving.admit.prepared.keys
        in_prompt = min(ended.length, len(keys))
        self._session.extend(keys, in_prompt, serving.answer[: ended.length - in_prompt])
        if ended.reason == "repeat":
            self._session.forget_beyond(serving.position)
        kept = serving.admit.prepared.cache == "on" and ended.length in self._session.hashes
        if kept and ended.snapshot is not None:
            await self._reserve(serving, [ended.length], self._w.geometry.bytes_per_checkpoint)
            await self._keep(serving, ended.length, ended.snapshot)
        serving.finish(ended.reason)
        if self._w.debug_digest:
            with suppress(RegrowError):  # the answer is complete, whatever becomes of the device
                digest = await self._w.device.ask(SlotDigest(self._slot), self._w.ask_deadline_s)
                serving.digest = digest.value
        self._end(serving)

    def _halt(self, serving: Serving, reason: EndReason | str, error: RegrowError | None) -> None:
        """End the job at the next chunk or step, once."""
        if serving.phase == "stopping":
            return
        serving.phase = "stopping"
        serving.reason = "stop" if reason == "stop" else "cancelled"
        serving.error = error
        self._w.device.tell(Stop(self._slot, serving.epoch))

    def _fail(self, serving: Serving, error: RegrowError) -> None:
        """End the request and empty the session: what the slot holds is in doubt."""
        serving.error = error
        self._give_back(serving)
        self._empty()
        self._end(serving)

    def _end(self, serving: Serving) -> None:
        """Tell the engine, then the client, that the request is over."""
        self._give_back(serving)
        self._serving = None
        if serving.distrusted:
            self._empty()
        self._tell_session()
        read = serving.position - serving.reused
        self._w.engine.tell(
            RequestDone(
                self._slot,
                serving.admit.request,
                serving.error is not None,
                serving.usage,
                read,
                serving.read_ms,
            )
        )
        serving.close(self._slot, self._w)

    async def _save(self) -> None:
        """Offer to the disk tier what is here: the session where it is idle, else its system prompt (D5)."""
        session, serving = self._session, self._serving
        if self._w.later is None:
            return
        if serving is None:
            upto = session.resumable(hybrid=self._w.geometry.hybrid)
        else:
            end, least = system_end(session.plan), self._w.root_min
            root = least is not None and least <= end <= session.pure
            there = not self._w.geometry.hybrid or session.chain.at(end) is not None
            upto = end if root and there and serving.admit.prepared.cache != "off" else 0
        await save(self._w, self._slot, session, upto)

    def _give_back(self, serving: Serving) -> None:
        """Let go of the states that were wanted and not come to."""
        hashes = self._session.hashes
        self._let_go(tuple(hashes[p] for p in serving.there), tuple(serving.leases.values()))
        serving.there.clear()
        serving.leases.clear()

    def _evicted(self, prefixes: frozenset[bytes]) -> None:
        """States are gone; one that has come again since is let go, so that slot and cache agree."""
        session = self._session
        session.chain = session.chain.without(prefixes)
        if self._serving is not None:
            gone = {p for p in self._serving.there if session.hashes[p] in prefixes}
            self._serving.there -= gone
        self._let_go(tuple(prefixes))

    def _distrust(self, position: int, key: bytes) -> None:
        """Forget a session that shares this cut, at once or when its request ends."""
        if self._session.hashes.get(position) != key:
            return
        if self._serving is not None:
            self._serving.distrusted = True
        else:
            self._empty()
            self._tell_session()

    def _lost(self, down: Down) -> None:
        """Another actor has crashed: without the device nothing that it mounted is true, without the cache no
        checkpoint is, and a new engine has to be told what is here."""
        if down.name == self._w.device.name:
            if down.epoch < self._generation:
                return  # what is here was mounted by a later life
            if self._serving is not None:
                self._fail(self._serving, DeviceFailed(f"the device was restarted: {down.reason}"))
                return
            self._empty()
        elif down.name == self._w.cache.name:
            kept, self._session.chain = self._session.chain.cut_back(0)
            leases = tuple(self._serving.leases.values()) if self._serving is not None else ()
            self._let_go(kept, leases)  # what the next life has granted meanwhile included
            if self._serving is not None:
                self._serving.leases.clear()
                self._serving.there.clear()
        elif down.name == self._w.engine.name:
            served = self._serving.admit.request if self._serving is not None else None
            self._w.engine.tell(NowServing(self._slot, served))
        self._tell_session()

    def _empty(self, *, tell_device: bool = True) -> None:
        dropped, _ = self._session.chain.cut_back(0)
        self._let_go(dropped)
        self._session = Session()
        if tell_device:
            self._w.cache.tell(LetGo(self._me, spans_above=0))
            self._w.device.tell(EmptySlot(self._slot))

    async def _digest(self) -> Digest:
        if self._serving is not None:
            raise BadRequest(f"slot {self._slot} is busy; its digest is taken when it is idle")
        return await self._w.device.ask(SlotDigest(self._slot), self._w.ask_deadline_s)

    def _put(self, serving: Serving, event: MountedEvent | Placed | ReadDone | ReadProgress | Token) -> None:
        if not serving.admit.run.put(event):
            error = SlowConsumer("the reader of this answer fell behind; its events were no longer kept")
            self._halt(serving, "cancelled", error)

    def _let_go(self, prefixes: tuple[bytes, ...], leases: tuple[int, ...] = ()) -> None:
        if prefixes or leases:
            self._w.cache.tell(LetGo(self._me, prefixes, leases))

    def _touch_root(self, admit: Admit) -> None:
        end = system_end(admit.prepared.plan)
        if not end or admit.resume < end:
            return
        if admit.source == "disk" and admit.prepared.cache != "off":  # as if it had been read here (T1)
            self._w.roots.tell(RootOffer(self._session.hashes[end], end))
        self._w.roots.tell(RootTouch(self._session.hashes[end]))

    def _tell_session(self) -> None:
        """Tell the engine what is here; every change is a new version."""
        self._version += 1
        session, serving = self._session, self._serving
        self._w.engine.tell(
            SessionChanged(
                slot=self._slot,
                life=self._life,
                holder=session.holder(self._slot, self._version, busy=serving is not None),
                namespace=session.namespace,
                keys=session.keys[: session.public],
                live=session.live and session.length <= session.public,
                reading=serving is not None and serving.reads,
            )
        )
        if self._w.later is not None and serving is None and session.length:
            self._w.later(self._slot, SaveIdle(self._version))

    def _report(self) -> SlotReport:
        serving = self._serving
        return SlotReport(
            slot=self._slot,
            phase=serving.phase if serving else "idle",
            request=serving.admit.request if serving else None,
            length=self._session.length + (len(serving.answer) if serving else 0),
            checkpoints=self._session.chain.positions,
            version=self._version,
            prompt=len(serving.admit.prepared.keys) if serving else 0,
            reused=serving.reused if serving else 0,
            position=serving.position if serving else 0,
            drawn=serving.shown if serving else 0,
        )

    def check_integrity(self) -> None:
        """Assert that the session is true as far as this actor can see (R4, P5)."""
        session = self._session
        assert session.pure <= session.length
        assert all(position <= session.length for position in session.chain.positions)
        assert list(session.chain.positions) == sorted(set(session.chain.positions))
