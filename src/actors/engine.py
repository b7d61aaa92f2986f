"""Engine: the actor system with a model, opened and closed as one (`async with Engine.open(settings)`).

This is the actor API. Everything the server does is reachable here without HTTP; the runner, the tokenizer
and the threads can be handed in, so that tests run the whole engine above the device in virtual time.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import structlog

from regrow.actors.cache import CacheActor
from regrow.actors.checked import Checked, Sound
from regrow.actors.device import DeviceActor, Outbox
from regrow.actors.device_thread import DeviceThread
from regrow.actors.disk_loop import RecordReport
from regrow.actors.disk_messages import DiskContents, DiskReport, DiskStats
from regrow.actors.disk_tier import DiskTier
from regrow.actors.engine_actor import EngineActor, EngineWiring, LivingRequest
from regrow.actors.events import Event
from regrow.actors.explain import Explainer
from regrow.actors.known_cold import ColdBook, Considered, KnownCold, RepackReport
from regrow.actors.messages import (
    CacheReport,
    CacheStats,
    Cancel,
    CutOff,
    DeviceReport,
    DeviceStats,
    Drain,
    EngineReport,
    EngineStats,
    Forget,
    Holds,
    RootReport,
    RootStats,
    SlotReport,
    SlotStats,
    Submit,
)
from regrow.actors.mounting import SlotWiring
from regrow.actors.prepare import Preparer
from regrow.actors.root import RootActor
from regrow.actors.run import Run
from regrow.actors.runtime import Actor, ActorRef, MailboxStats, System
from regrow.actors.scrub import scrub
from regrow.actors.served import ModelInfo, Served, load_served
from regrow.actors.slot import SlotActor
from regrow.actors.threads import DriverHandle, RealThreads, Threads
from regrow.config import EngineSettings
from regrow.errors import ActorDown, BadRequest, DeadlineExceeded, Draining
from regrow.gpu.device_loop import DeviceLoop
from regrow.models.constrain import Grammars
from regrow.models.progress import stoppable
from regrow.policy.plan import ReadPlan
from regrow.policy.request import GenerateRequest, JsonAnswer
from regrow.store.clock import SteadyClock, system_clock
from regrow.store.files import Files

log = structlog.get_logger(__name__)
MAILBOX = 4096
Watcher = Callable[[str, Event], None]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What every actor reports, in one value."""

    ready: bool
    model: ModelInfo
    engine: EngineReport
    slots: tuple[SlotReport, ...]
    cache: CacheReport
    roots: tuple[RootReport, ...]
    device: DeviceReport
    mailboxes: tuple[MailboxStats, ...]
    repack: RepackReport | None = None
    disk: DiskReport | None = None


class Engine:
    """The running system. `engine`, `cache`, `roots`, `device` and `slot(i)` are actor references.

    lives: the present life of each actor by name, to look at; one speaks to them through their references.
    """

    def __init__(
        self,
        settings: EngineSettings,
        served: Served,
        system: System,
        threads: Threads,
        book: ColdBook | None = None,
        tier: DiskTier | None = None,
    ) -> None:
        self.settings = settings
        self._served = served
        self._system = system
        self._threads = threads
        self._tier = tier
        self.tokenizer = served.tokenizer
        self._closing = False
        self.lives: dict[str, Sound] = {}
        self._requests: dict[str, LivingRequest] = {}
        self._watchers: list[Watcher] = []
        self._giving_up: asyncio.Task[None] | None = None
        self._grammars = Grammars(served.tokenizer)
        self._prepare = Preparer(
            tokenizer=served.tokenizer,
            table=served.table,
            namespace=served.namespace,
            context=served.runner.context,
            checkpoints=settings.checkpoints,
            cache=settings.cache,
            checkpoint_every=settings.checkpoint_every,
            grammars=self._grammars,
        )
        beyond_root = self._prepare.beyond_root
        self._known_cold = None if book is None else KnownCold(book, threads, beyond_root, self._holds)
        self.info = ModelInfo.of(served)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        settings: EngineSettings,
        *,
        served: Served | None = None,
        threads: Threads | None = None,
        progress: Callable[[str, float | None], None] = lambda text, share: None,
        clock: SteadyClock | None = None,
        files: Files | None = None,
    ) -> AsyncIterator["Engine"]:
        """Load the model, start the actors, and stop everything at the end of the block.

        served: a runner to use instead of loading `settings.model`. progress: told what is being done and
        how much of it (0..1) while loading. clock: for idle times. files: the disk tier's, in place of
        `settings.cache_dir`. Raises ModelRefused or BadConfig. Cancelled, it ends with the step it is in.
        """
        threads = threads or RealThreads()
        book: ColdBook | None = None
        tier: DiskTier | None = None
        try:
            if served is None:
                with stoppable(progress) as telling:
                    served = await threads.run(functools.partial(load_served, settings, telling))
            if settings.repack_cold:
                opening = functools.partial(
                    ColdBook.open, settings, served.namespace, clock or system_clock()
                )
                book = await threads.run(opening)
            tier = await threads.run(functools.partial(DiskTier.open, settings, served, files))
            async with System() as system:
                engine = cls(settings, served, system, threads, book, tier)
                drivers = engine._start()
                idle = functools.partial(operator.not_, engine._requests)
                scrubbing = asyncio.create_task(scrub(engine.cache, threads, idle, settings.scrub_s))
                try:
                    yield engine
                finally:
                    scrubbing.cancel()
                    engine._closing = True
                    await engine._cut_off()
                    if tier is not None:
                        await tier.write_out(engine.slots, engine.cache)
                    await engine.device_thread.stop()
                    for driver in drivers:
                        await driver.stop()
                    engine._grammars.close()
            if engine._giving_up is not None:
                await engine._giving_up
            engine._end_left("the engine has stopped")
        finally:
            if book is not None:
                await threads.run(book.close)
            if tier is not None:
                await threads.run(tier.close)
            await threads.close()

    def _start(self) -> list[DriverHandle]:
        """Spawn the actors and put the device loop, and the disk's, on threads of their own."""
        settings, served, system = self.settings, self._served, self._system
        now = asyncio.get_running_loop().time
        names = [f"slot-{i}" for i in range(served.runner.slots - settings.verify)]
        self.device, self.disk, self.cache, self.roots, self.engine = (
            system.ref(name) for name in ("device", "disk", "cache", "roots", "engine")
        )
        self.slots = tuple(system.ref(name) for name in names)
        outbox = Outbox(self._threads, lambda slot, ticks: self.slots[slot].post(ticks), self.device.post)
        make = functools.partial(
            DeviceLoop,
            decode_share=settings.decode_share,
            now=now,
            deliver=outbox.deliver,
            max_stall_s=settings.max_stall_ms / 1e3,
            linger_s=self._threads.linger_s,
        )
        self.device_thread = DeviceThread(served.runner, make, self._threads, settings.hang_s)
        geometry = served.runner.geometry
        slot_wiring = SlotWiring(
            engine=self.engine,
            roots=self.roots,
            cache=self.cache,
            device=self.device,
            geometry=geometry,
            detokenizer=served.tokenizer.detokenizer,
            spell=served.tokenizer.token_bytes,
            now=now,
            exact=served.exact,
            checkpoints=settings.checkpoints,
            verify=settings.verify,
            debug_digest=settings.debug_digest,
            root_cells=settings.root_cells,
            ask_deadline_s=settings.ask_deadline_s,
            later=None if self._tier is None else self._save_later,
            root_min=settings.root_min if settings.roots else None,
        )
        engine_wiring = EngineWiring(
            slots=self.slots,
            cancel=lambda request: self.engine.post(Cancel(request)),
            expire=lambda request, error: self.engine.post(Cancel(request, error)),
            now=now,
            explain=Explainer(served.tokenizer, served.exact, served.table.largest),
            queue=settings.queue,
            event_buffer=settings.event_buffer,
            exact=served.exact,
            hybrid=geometry.hybrid,
            bytes_per_token=geometry.bytes_per_token,
            bytes_per_state=geometry.bytes_per_checkpoint,
            chunk=served.table.largest,
            watch=self._watched,
            deadline_s=settings.deadline,
        )
        restarts = {name: itertools.count() for name in [*names, "cache"]}
        generations = itertools.count()
        kept = settings.roots if settings.cache else 0
        system.failed.add_done_callback(self._failed)

        def spawn(name: str, factory: Callable[[], Sound], watchers: Sequence[str] = ()) -> None:
            def live() -> Actor:
                self.lives[name] = actor = factory()
                return Checked(actor) if settings.debug else actor

            system.spawn(name, live, mailbox=MAILBOX, watchers=tuple(watchers))

        system.spawn(
            "device",
            lambda: DeviceActor(
                self.device_thread,
                generations,
                self._threads,
                now,
                self.cache.post,
                self.device.post,
            ),
            mailbox=MAILBOX,
            watchers=(*names, "engine", "cache"),
        )

        def post(to: str, message: object) -> None:
            system.ref(to).post(message)

        drivers, disk = [], [] if self._tier is None else ["disk"]
        if self._tier is not None:
            records, actor = self._tier.wire(served, self._threads, post, now)
            spawn("disk", actor, ["cache", "engine"])
            drivers.append(self._threads.drive("disk", records))
        spawn(
            "cache",
            lambda: CacheActor(
                served.budget,
                geometry.bytes_per_token,
                next(restarts["cache"]),
                settings.root_cells != "never",
                post,  # what has gone is gone: a full mailbox is no reason not to be told
                now,
                geometry.bytes_per_checkpoint,
                self._tier is not None,
            ),
            [*names, "roots", "engine", *disk],
        )
        spawn("roots", lambda: RootActor(kept, settings.root_min, self.cache, now), ["cache"])
        for i, name in enumerate(names):
            spawn(name, functools.partial(self._slot, i, restarts[name], slot_wiring), ["engine", "cache"])
        spawn("engine", lambda: EngineActor(engine_wiring, self._requests), [*names, "cache", *disk])
        self.device_thread.start()
        return drivers

    @staticmethod
    def _slot(slot: int, lives: "itertools.count[int]", wiring: SlotWiring) -> SlotActor:
        return SlotActor(slot, next(lives), wiring)

    async def submit(self, request: GenerateRequest) -> Run:
        """Queue a request and return its run.

        Raises BadRequest (naming the field), ContextLengthExceeded, Overloaded (with a time worth waiting),
        Draining, or ActorDown once the actor system has given up.
        """
        if self._closing:
            raise Draining("the engine is shutting down")
        if self._known_cold is None:
            return await self._submit(Considered(request))
        considered = await self._known_cold.consider(request)
        ended = functools.partial(self._known_cold.ended, considered.key)
        try:
            run = await self._submit(considered)
        except BaseException:
            ended()
            raise
        run.when_ended(ended)
        return run

    async def _submit(self, considered: Considered) -> Run:
        if len(self._requests) < self.settings.parallel:  # so that it may find a slot at once
            self.device_thread.loop.expect()
        prepared = await self._threads.run(lambda: self._prepare(considered.request))
        submit = Submit(dataclasses.replace(prepared, repacked=considered.repacked))
        asked = asyncio.ensure_future(self.engine.ask(submit, self.settings.ask_deadline_s))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._abandon)
            raise

    async def _holds(self, prefixes: frozenset[bytes]) -> bool:
        """Say whether any of these prefixes may be held: what leaves a slot is with the cache before the
        engine is told, and what leaves that with the disk, so they are asked in this order."""
        message, deadline = Holds(prefixes), self.settings.ask_deadline_s
        tiers = [self.engine, self.cache, *([] if self._tier is None else [self.disk])]
        for tier in tiers:
            if await tier.ask(message, deadline):
                return True
        return False

    async def conforms(self, answer: JsonAnswer, text: str) -> bool:
        """Whether the text of an answer is what it had to be."""
        return await self._threads.run(lambda: self._grammars.conforms(answer, text))

    def _abandon(self, asked: asyncio.Future[Run]) -> None:
        """The client has gone while its request was submitted."""
        if not asked.cancelled() and asked.exception() is None:
            self.engine.post(Cancel(asked.result().id))

    async def cache_report(self) -> tuple[CacheReport, tuple[RootReport, ...], tuple[RecordReport, ...]]:
        """Return what is kept: bytes by kind and parked conversations, roots, records on disk."""
        deadline = self.settings.ask_deadline_s
        cache = await self.cache.ask(CacheStats(), deadline)
        roots = tuple(await self.roots.ask(RootStats(), deadline))
        return cache, roots, () if self._tier is None else await self.disk.ask(DiskContents(), deadline)

    async def forget(self, root: str | None = None) -> int:
        """Drop one root, or everything that is kept and not in use; return how many things went.

        Raises BadRequest where `root` is no root's id.
        """
        try:
            prefix = None if root is None else bytes.fromhex(root)
        except ValueError:
            raise BadRequest(f"{root!r} is not the id of a root", param="root") from None
        if prefix is None:
            self.tokenizer.forget()
        return await self.cache.ask(Forget(prefix), self.settings.ask_deadline_s)

    async def original(self, name: str) -> str | None:
        """Return a text that was left out of a conversation, by the name that stands for it there."""
        book = self._known_cold
        return None if book is None else await self._threads.run(lambda: book.original(name))

    async def plan_of(self, request: GenerateRequest) -> tuple[list[int], ReadPlan]:
        """Return the tokens of a prompt, and where its reading would be cut; raises BadRequest."""

        def plan() -> tuple[list[int], ReadPlan]:
            keys, cuts = self._prepare.plan_of(request)
            return keys.tolist(), cuts

        return await self._threads.run(plan)

    async def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; raises BadRequest for what is no id."""
        return await self._threads.run(lambda: self._prepare.text_of(tokens))

    async def render(self, request: GenerateRequest) -> str:
        """Return the text of a chat's prompt; raises BadRequest naming the field."""
        chat = request.messages, request.tools, request.template_options
        return await self._threads.run(lambda: self.tokenizer.render(*chat))

    def watch(self, watcher: Watcher) -> None:
        """Have every event of every run told to `watcher` when it happens, with the id of the run. It is
        called in the event loop: it must be quick and must not raise."""
        self._watchers.append(watcher)

    def _watched(self, run: str, event: Event) -> None:
        for watcher in self._watchers:
            watcher(run, event)

    def slot(self, number: int) -> ActorRef:
        return self.slots[number]

    @property
    def ready(self) -> bool:
        """Whether new requests are taken."""
        return not self._closing and not self.failed

    async def given_up(self) -> str:
        """Wait until the actor system has given up, and return why."""
        return await asyncio.shield(self._system.failed)

    @property
    def failed(self) -> str | None:
        """Why the actor system has given up, once it has."""
        failed = self._system.failed
        return failed.result() if failed.done() and not failed.cancelled() else None

    async def status(self) -> EngineStatus:
        """Ask every actor what it is doing."""
        deadline = self.settings.ask_deadline_s
        return EngineStatus(
            ready=self.ready,
            model=self.info,
            engine=await self.engine.ask(EngineStats(), deadline),
            slots=tuple([await slot.ask(SlotStats(), deadline) for slot in self.slots]),
            cache=await self.cache.ask(CacheStats(), deadline),
            roots=tuple(await self.roots.ask(RootStats(), deadline)),
            device=await self.device.ask(DeviceStats(), deadline),
            mailboxes=self._system.statistics(),
            repack=None if self._known_cold is None else self._known_cold.report(),
            disk=None if self._tier is None else await self.disk.ask(DiskStats(), deadline),
        )

    async def drain(self) -> None:
        """Take no new work; return when the last request has ended, or was ended after `drain_s` seconds."""
        self._closing = True
        with contextlib.suppress(DeadlineExceeded, ActorDown):
            await self.engine.ask(Drain(), self.settings.drain_s, urgent=True)
            return
        await self._cut_off()

    def _failed(self, failed: asyncio.Future[str]) -> None:
        if not failed.cancelled():
            self._giving_up = asyncio.create_task(self._give_up(failed.result()))

    async def _give_up(self, reason: str) -> None:
        """The actor system has given up: stop the rest of it, and leave no client waiting."""
        await self._system.stop()
        self._end_left(reason)

    def _end_left(self, reason: str) -> None:
        """End the requests that no actor is there to end any more."""
        now = asyncio.get_running_loop().time()
        while self._requests:
            _, request = self._requests.popitem()
            request.end(ActorDown(reason), now, self.info.exact)

    def _save_later(self, slot: int, message: object) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self.settings.save_after_s, self.slots[slot].post, message)

    async def _cut_off(self) -> None:
        """End every request now."""
        self._closing = True
        with contextlib.suppress(DeadlineExceeded, ActorDown):
            await self.engine.ask(CutOff(), self.settings.ask_deadline_s, urgent=True)
