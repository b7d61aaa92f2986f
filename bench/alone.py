"""regrow's own actors without a model, a thread or a clock that matters: the cache policy alone.

The engine wires its actors as ever; only the device is made up: it has read a prompt at once, and what it
hands out weighs what it should and takes no memory. No actor here ever waits, so a message is handled by
running its handler to the end, and messages go round until nobody has any.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from regrow import EngineSettings
from regrow.actors.engine import Engine
from regrow.actors.messages import DeviceTicks, Mount, Mounted, Parked, Prepared, SaveCells, Start, Submit
from regrow.actors.runtime import Actor
from regrow.actors.served import Served
from regrow.gpu.device_loop import ChunkRead, Job, JobEnded
from regrow.gpu.types import CellSpec, Geometry, HostCells, Snapshot, StateSpec
from regrow.policy.checkpoints import checkpoint_cuts, system_end
from regrow.policy.keys import Namespace
from regrow.policy.plan import ChunkTable
from regrow.policy.request import SamplingParams, StopRules
from replay import Turn

T = TypeVar("T")
DEVICE = "device"
CHUNK = 256
PROMPT = Prepared(
    keys=np.empty(0, dtype=np.int64),
    plan=SimpleNamespace(),
    namespace=Namespace("traces"),
    hashes=(),
    wanted=(),
    protected=frozenset(),
    sampling=SamplingParams(),
    stops=StopRules(max_tokens=1),
    banned=frozenset(),
    cache="on",
    cache_salt=None,
    priority=0,
    deadline_s=None,
)


@dataclass(frozen=True, slots=True)
class Size:
    """What a model's cache weighs, in bytes; a state of 0 is a model without running state."""

    token: int
    state: int

    @property
    def geometry(self) -> Geometry:
        cells = (CellSpec(0, "k", 1, self.token, torch.uint8),)
        states = (StateSpec(0, "recurrent", 0, (self.state,), torch.uint8),) if self.state else ()
        return Geometry(cells, states)


class Mailbox:
    """The address of an actor, and the actor: stands in for `ActorRef`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.actor: Actor
        self.waiting: deque[object] = deque()

    def tell(self, message: object) -> None:
        self.waiting.append(message)

    post = tell

    async def ask(self, message: object, deadline_s: float) -> object:
        self.empty()
        return finished(self.actor.handle(message))

    def empty(self) -> bool:
        """Handle what waits; say whether there was anything."""
        worked = bool(self.waiting)
        while self.waiting:
            finished(self.actor.handle(self.waiting.popleft()))
        return worked


class Town:
    """All mailboxes: stands in for `System`."""

    def __init__(self) -> None:
        self.boxes: dict[str, Mailbox] = {}
        self.failed: Future[str] = Future()  # never done: an actor that crashes ends the bench

    def ref(self, name: str) -> Mailbox:
        return self.boxes.setdefault(name, Mailbox(name))

    def spawn(
        self, name: str, factory: Callable[[], Actor], *, mailbox: int, watchers: Sequence[str]
    ) -> None:
        if name != DEVICE:
            self.ref(name).actor = factory()

    def settle(self) -> None:
        """Handle messages until there are none."""
        while sum([box.empty() for box in self.boxes.values()]):
            pass


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("an actor waited")


def weightless(*shape: int) -> torch.Tensor:
    """Return a tensor of bytes that takes no memory."""
    return torch.empty(shape, dtype=torch.uint8, device="meta")


class Device:
    """Answers at once. `started` is the job that was begun last."""

    def __init__(self, cache: Mailbox, bytes_per_token: int) -> None:
        self._cache = cache
        self._bytes_per_token = bytes_per_token
        self.started: Job

    async def handle(self, message: object) -> object:
        match message:
            case Mount():
                return Mounted(0, 0.0)
            case SaveCells(_, name, ranges):
                cells = (HostCells(a, b, (weightless(1, b - a, self._bytes_per_token),)) for a, b in ranges)
                self._cache.tell(Parked(name, tuple(cells)))
            case Start(job):
                self.started = job
        return None


class Alone:
    """Serves turns with a cache of `budget` bytes."""

    def __init__(self, slots: int, budget: int, size: Size, settings: EngineSettings) -> None:
        self._settings, self._size, self._town = settings, size, Town()
        silent = SimpleNamespace(push=lambda token: "", flush=lambda: "")
        served = Served(
            name="traces",
            runner=SimpleNamespace(geometry=size.geometry, slots=slots, context=0),
            tokenizer=SimpleNamespace(
                detokenizer=lambda: silent,
                token_bytes=lambda token: b"",
                decode=lambda ids: "",
                vocab_size=0,
                has_template=True,
                tool_format=None,
                thinking=None,
                parallel_calls=False,
            ),
            table=ChunkTable.uniform(CHUNK),
            namespace=PROMPT.namespace,
            exact="cache",
            default_sampling=PROMPT.sampling,
            budget=budget,
        )
        threads = SimpleNamespace(drive=lambda name, work: None, linger_s=0.0)
        self.engine = Engine(settings, served, self._town, threads)
        asyncio.run(self._wire())
        self._device = Device(self.engine.cache, size.token)
        self._town.ref(DEVICE).actor = self._device
        for box in self.engine.slots:
            finished(box.actor.started())
        self._town.settle()
        self._jobs: dict[int, Job] = {}

    def begin(self, number: int, turn: Turn) -> int:
        """Serve a turn, for which a slot is free; return how many of its tokens were reused."""
        self._submit(Submit(self._prepared(turn)))
        self._town.settle()
        job = self._jobs[number] = self._device.started
        last = min(job.chunks[-1][1], turn.plan.length - 1)
        positions = sorted({*job.snapshot_at, system_end(turn.plan), last})
        self._tick(
            job,
            *(
                ChunkRead(job.slot, job.epoch, p, 0.0, self._state(p) if p in job.snapshot_at else None)
                for p in positions
                if p > job.start
            ),
        )
        return job.start

    def end(self, number: int) -> None:
        """Its answer is complete."""
        job = self._jobs.pop(number)
        self._tick(job, JobEnded(job.slot, job.epoch, "length", len(job.ids)))

    def _submit(self, submit: Submit) -> None:
        finished(self.engine.engine.ask(submit, 0.0))

    async def _wire(self) -> None:
        """Have the actors spawned, with a clock that stands still: nothing can be said of rates here."""
        asyncio.get_running_loop().time = lambda: 0.0
        self.engine._start()

    def _tick(self, job: Job, *events: ChunkRead | JobEnded) -> None:
        self.engine.slots[job.slot].tell(DeviceTicks(events))
        self._town.settle()

    def _state(self, position: int) -> Snapshot:
        return Snapshot(position, (weightless(self._size.state),))

    def _prepared(self, turn: Turn) -> Prepared:
        settings = self._settings
        cuts = checkpoint_cuts(turn.plan, settings.checkpoint_every, (), settings.checkpoints)
        return replace(
            PROMPT,
            keys=np.broadcast_to(np.int64(0), turn.plan.length),
            plan=turn.plan,
            hashes=turn.prefixes,
            wanted=tuple(cut.position for cut in cuts),
            protected=frozenset(cut.position for cut in cuts if cut.protected),
        )
