"""The engine in a virtual world, watched: when it rests, what the actors believe is held against the device.

`House.ask` runs a request to its end, checks that its events come in the order of a life, and then that every
session is true, that the ledger is the sum of what is kept, and that nothing is left of the request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from regrow.actors.cache import CacheActor
from regrow.actors.engine import Engine
from regrow.actors.engine_actor import EngineActor, LivingRequest
from regrow.actors.events import (
    Event,
    Failed,
    Finished,
    Mounted,
    Placed,
    Queued,
    ReadDone,
    ReadProgress,
    Token,
)
from regrow.actors.messages import CacheStats, EngineStats, Prepared
from regrow.actors.placement import Placement
from regrow.actors.root import RootActor
from regrow.actors.run import Run
from regrow.actors.slot import SlotActor
from regrow.config import EngineSettings
from regrow.errors import BadRequest
from regrow.policy.directory import HolderId
from regrow.policy.keys import Keys, as_keys
from regrow.policy.plan import ChunkTable, ReadPlan, build_plan
from regrow.policy.request import Exactness, GenerateRequest
from regrow.store.files import Files
from tests.world.engine import CHUNK, engine_in, runner_in
from tests.world.fake_runner import Costs, FakeRunner, _hashes_in, hash_of
from tests.world.loop import VirtualLoop, run_world
from tests.world.tokenizer import world_tokenizer

T = TypeVar("T")
SEEDS = range(4)
SYSTEM = {"role": "system", "content": "You are one of several. " * 12}
OTHER = {"role": "system", "content": "You are someone else. " * 12}
A_MOMENT = 2.0**-20  # less than anything takes on the device; when it is over, all that could happen now has
LIFE = (Queued, Placed, Mounted, ReadProgress, ReadDone, Token, Finished | Failed)


def chat(*contents: str, system: dict[str, str] | None = SYSTEM, **options: object) -> GenerateRequest:
    """A chat in which user and assistant take turns."""
    roles = ("user", "assistant") * len(contents)
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    messages = [system, *turns] if system else turns
    return replace(GenerateRequest(messages=messages, max_tokens=6), **cast(Any, options))


def stranger(number: int, *contents: str, **options: object) -> GenerateRequest:
    """A chat under a system prompt of its own, so that it waits for nobody who reads the same (S6)."""
    content = f"You are number {number}, and nobody else. " * 8
    return chat("hello", *contents, system={"role": "system", "content": content}, **options)


def raw(ids: Sequence[int], **options: object) -> GenerateRequest:
    """A prompt of token ids, which no message mark cuts."""
    return replace(GenerateRequest(prompt=tuple(ids), max_tokens=6), **cast(Any, options))


def text(seed: int, n: int) -> list[int]:
    """Some n token ids that no other seed begins with."""
    return [seed % 256, *((seed * 31 + i * 7) % 256 for i in range(1, n))]


def keys_of(request: GenerateRequest) -> Keys:
    if request.messages:
        return world_tokenizer().encode_chat(request.messages)
    return as_keys(cast(Sequence[int], request.prompt))


def plan_of(request: GenerateRequest) -> ReadPlan:
    return build_plan(keys_of(request), ChunkTable.uniform(CHUNK), world_tokenizer().marks)


def starts(request: GenerateRequest) -> list[int]:
    """Where the assistant speaks in this prompt."""
    return [end.position for end in plan_of(request).ends if end.role == "user"]


def system_end(request: GenerateRequest) -> int:
    return next(end.position for end in plan_of(request).ends if end.role == "system")


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything a client was told of one request."""

    events: tuple[Event, ...]

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.of(Token)]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Token | Finished))

    @property
    def end(self) -> Finished | Failed:
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last

    @property
    def reason(self) -> str:
        """Why it finished, or the name of the error it failed with."""
        return self.end.reason if isinstance(self.end, Finished) else type(self.end.error).__name__

    @property
    def reused(self) -> int:
        return self.end.reuse.reused

    @property
    def read(self) -> int:
        return self.end.reuse.read


def check_life(events: Sequence[Event]) -> None:
    """The events of a life come in its order, in rising time, and only the last one is terminal."""
    phases = [next(i for i, kind in enumerate(LIFE) if isinstance(e, kind)) for e in events]
    assert phases == sorted(phases)
    assert [e.at for e in events] == sorted(e.at for e in events)
    assert phases[0] == 0
    assert phases.count(len(LIFE) - 1) == 1
    assert all(phases.count(phase) <= 1 for phase in (0, 1, 2, 4))


class House:
    """An engine, its fake device and the world they are in."""

    def __init__(self, world: VirtualLoop, engine: Engine, prefixes: dict[bytes, int] | None) -> None:
        self.world = world
        self.engine = engine
        self.crashed: set[str] = set()
        self.prefixes = (
            {} if prefixes is None else prefixes
        )  # what the fake calls each prefix that was ever submitted

    @property
    def runner(self) -> FakeRunner:
        """The device, or the one after it."""
        return cast(FakeRunner, self.engine.device_thread.loop.runner)

    @property
    def cache(self) -> CacheActor:
        return cast(CacheActor, self.engine.lives["cache"])

    @property
    def placement(self) -> Placement:
        return cast(EngineActor, self.engine.lives["engine"])._placement

    @property
    def requests(self) -> dict[str, LivingRequest]:
        return cast(EngineActor, self.engine.lives["engine"])._requests

    def slot(self, number: int) -> SlotActor:
        return cast(SlotActor, self.engine.lives[f"slot-{number}"])

    async def submit(self, request: GenerateRequest) -> Run:
        with contextlib.suppress(BadRequest):
            self._note(self.engine._prepare(request))
        return await self.engine.submit(request)

    def _note(self, prepared: Prepared) -> None:
        for prefix, cut in zip(prepared.hashes, prepared.plan.cuts, strict=True):
            if prefix not in self.prefixes:
                self.prefixes[prefix] = hash_of(prepared.keys[:cut])

    async def ask(self, request: GenerateRequest) -> Answer:
        """Run a request to its end and check that it left everything true."""
        return await self.ended(await self.submit(request))

    async def ended(self, run: Run, seen: Sequence[Event] = ()) -> Answer:
        """Wait for the end of a run of which these events were seen already."""
        answer = Answer((*seen, *[event async for event in run]))
        check_life(answer.events)
        await self.settled()
        return answer

    def leaves(self, run: Run, after_s: float) -> None:
        """Have the client of a run go away after a while."""
        self.world.call_later(after_s, lambda: self.world.create_task(run.cancel()))

    async def until(self, run: Run, kind: type[Event], nth: int = 1) -> list[Event]:
        """Wait for the nth event of this kind; the events that came are returned, the others still come."""
        seen: list[Event] = []
        async for event in run:
            seen.append(event)
            if sum(isinstance(e, kind) for e in seen) == nth:
                return seen
        raise AssertionError(f"the run ended after {seen}")

    def truth(self, request: GenerateRequest) -> list[int]:
        """What the device answers to this prompt when nothing is remembered of any other."""
        keys = keys_of(request)
        room = self.runner.context - len(keys)
        return self.runner.expected_answer(keys, request.max_tokens or room, request.sampling)

    def crash(self, name: str) -> None:
        """Give an actor a message that it does not know."""
        self.crashed.add(name)
        self.engine._system.ref(name).tell("a message that no actor knows")

    async def settled(self) -> None:
        await asyncio.sleep(A_MOMENT)
        await self.check()

    async def check(self) -> None:
        """Hold the actors' beliefs against the device and against each other."""
        for actor in self.engine.lives.values():
            actor.check_integrity()
        cache = await self.engine.cache.ask(CacheStats(), 1)
        assert sum(cache.used.values()) <= cache.peak <= cache.budget
        for number in range(len(self.engine.slots)):
            told = number in self.placement.sessions  # else a new engine does not know whether it is busy
            if told and self.placement.given(number) is None:
                self._check_session(number)
        if not self.requests:
            self._check_cache()

    def _check_session(self, number: int) -> None:
        """What an idle slot believes to hold is what its cells hold."""
        session, cells = self.slot(number).session, self.runner._slots[number]
        assert self.slot(number).idle
        assert session.length <= cells.length
        assert cells.hash_below(session.length) in (hash_of(session.keys), None)  # None: not finite
        if session.live:
            assert cells.state.position == cells.length == session.length

    def _check_cache(self) -> None:
        """While nothing is served the cache has what slots, roots and parked conversations hold, nothing is
        pinned or leased, and the engine knows of all of it."""
        shelf, parking = self.cache._shelf, self.cache._parking
        writing, coming = self.cache._behind._writing, self.cache._restoring._coming.values()
        assert shelf.leases.keys() <= {lease for one in coming for lease in one.leases.values()}
        to_be_written = writing.kept if writing is not None else {}
        assert all(not state.pins or prefix in to_be_written for prefix, state in shelf.states.items())
        for number in range(len(self.engine.slots)):
            held = {entry.entry_id for entry in self.slot(number).session.chain.entries}
            assert held == {p for p, s in shelf.states.items() if HolderId("slot", number) in s.holders}
        for prefix, state in shelf.states.items():
            assert int(state.snapshot.states[0]) == self.prefixes[prefix]
        for (_, prefix), span in shelf.spans.items():
            assert span.cells is None or _hashes_in(span.cells)[-1] in (self.prefixes[prefix], None)
        assert set(shelf.roots) == set(cast(RootActor, self.engine.lives["roots"])._roots)
        assert self.placement._directory._states == set(shelf.states)
        kept = {n for n, c in parking.conversations.items() if c.whole}
        assert set(self.placement._parked) == kept | set(self.cache._behind.records)

    async def rests(self) -> None:
        """Nothing runs any more, on the device neither."""
        await asyncio.sleep(1)  # what was given up ends with its chunk or step
        await self.check()
        counts = self.runner.counts.copy()
        await asyncio.sleep(60)
        await self.check()
        report = await self.engine.engine.ask(EngineStats(), 1)
        assert (report.waiting, report.running) == (0, 0)
        assert self.runner.counts == counts
        expected = self.crashed | ({"device"} if self.runner.faults else set())
        assert {box.name for box in self.engine._system.statistics() if box.restarts} <= expected
        assert not any(slot.copies or slot.joined for slot in self.runner._slots)
        assert all(span.cells and not span.pins for span in self.cache._shelf.spans.values())
        assert all(parked.whole for parked in self.cache._parking.conversations.values())
        assert not self.cache._shelf.guarded


@asynccontextmanager
async def house(
    world: VirtualLoop,
    *,
    slots: int = 2,
    context: int = 4096,
    hybrid: bool = True,
    exact: Exactness = "cache",
    budget: int = 1 << 20,
    costs: Costs = Costs(),  # noqa: B008  frozen
    rests: bool = True,
    files: Files | None = None,
    prefixes: dict[bytes, int] | None = None,
    **settings: object,
) -> AsyncIterator[House]:
    """Open an engine that checks itself after every message. rests: at the end nothing may run. files: of the
    disk tier. prefixes: known from other houses."""
    runner = runner_in(world, slots=slots, context=context, hybrid=hybrid, costs=costs)
    chosen = replace(EngineSettings(chunk=CHUNK, debug=True, scrub_s=0.0), **cast(Any, settings))
    async with engine_in(world, runner, chosen, exact=exact, budget=budget, files=files) as engine:
        opened = House(world, engine, prefixes)
        yield opened
        if rests:
            await opened.rests()


def in_house(
    scenario: Callable[[House], Awaitable[T]], seeds: Sequence[int] = SEEDS, **settings: Any
) -> list[T]:
    """Run a scenario in a house of its own under each seed; return what it returned."""

    async def lived(world: VirtualLoop) -> T:
        async with house(world, **settings) as opened:
            return await scenario(opened)

    return [run_world(seed, lived) for seed in seeds]
