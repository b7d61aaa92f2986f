"""One hostile life, drawn from a seed: engines on one disk, clients, faults, and after every step the truth.

After each step what the actors believe is held against the device and against each other
(`House.check`), no request has ended twice, and every answer that has come is the one that the device gives
to its prompt alone. At the end every request has ended, nothing is pinned, leased or on its way.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

import regrow.actors.engine as engine_module
from regrow.errors import ActorDown, DeadlineExceeded, Overloaded
from regrow.policy.request import Exactness
from tests.actors.world import House, house
from tests.sim.clients import NEVER_S, Book, Crowd
from tests.sim.faults import Doom, Faults
from tests.store.disk import SimulatedDisk
from tests.world.loop import VirtualLoop, run_world

STEPS = 25
LIMITS = {"time_limit": 1e6, "step_limit": 5_000_000}
UNSURE = (ActorDown, DeadlineExceeded, Overloaded)  # an actor died while it was asked


@dataclass
class Told:
    """What a life came to. trace: time and event of each step."""

    seed: int
    requests: int = 0
    houses: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


@dataclass
class Life:
    world: VirtualLoop
    rng: Random
    told: Told
    doom: Doom = field(default_factory=Doom)
    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    prefixes: dict[bytes, int] = field(default_factory=dict)

    async def run(self, steps: int, patch: pytest.MonkeyPatch) -> None:
        settings, faulty = self.settings(), self.rng.random() < 0.85
        if self.rng.random() < 0.2:
            patch.setattr(engine_module, "MAILBOX", self.rng.choice([3, 8, 20]))
        book, crowd = Book(), None
        done = 0
        while done < steps:
            self.disk.fails.clear()  # one that cannot be read at the start is refused there
            used = self.disk  # after a power cut it is another one that is found
            async with house(self.world, prefixes=self.prefixes, files=used, **settings) as opened:
                self.doom.at.clear()
                self.doom.watching(patch, lambda: opened.engine.lives)
                opened.engine.watch(book.heard)
                crowd = Crowd(self.rng, book, opened) if crowd is None else crowd
                crowd.house = opened
                self.told.houses += 1
                faults = Faults(self.world, self.rng, self.doom)
                while done < steps:
                    done += 1
                    if not await self.step(opened, crowd, faults, faulty):
                        break
                await self.ends(opened, crowd, used)
            assert not opened.engine._requests, "the engine has forgotten to end a request"
        self.told.requests, self.told.outcomes = book.started, book.outcomes

    def settings(self) -> dict[str, Any]:
        rng = self.rng
        exact: Exactness = rng.choice(["full", "cache", "cache", "off"])
        return {
            "slots": rng.choice([1, 2, 3, 3]),
            "hybrid": rng.random() < 0.7,
            "exact": exact,
            "budget": rng.choice([0, 8_000, 60_000, 60_000, 1 << 20]),
            "root_min": 32,
            "root_cells": rng.choice(["auto", "always", "never"]),
            "checkpoints": rng.choice([1, 2, 6]),
            "checkpoint_every": rng.choice([128, 16384]),
            "queue": rng.choice([0, 3, 64]),
            "event_buffer": rng.choice([2, 60, 4096, 4096]),
            "hang_s": rng.choice([0.0, 10.0, 600.0]),
            "save_after_s": rng.choice([0.0, 1.0]),
            "rests": False,
        }

    async def step(self, opened: House, crowd: Crowd, faults: Faults, faulty: bool) -> bool:
        """Do one thing, let some time pass, and check; False where this house is to end."""
        kind = self.rng.random()
        goes_on = True
        if kind < 0.45 or not faulty:
            self.note(crowd.come())
        elif kind < 0.58:
            self.note(faults.device(opened))
        elif kind < 0.64:
            self.note(faults.numbers(opened))
        elif kind < 0.78:
            self.note(faults.kill(opened))
        elif kind < 0.9:
            self.note(faults.disk(self.disk))
        elif kind < 0.93:
            self.note("forget")
            await self.asked(opened.engine.forget())
        elif kind < 0.95:
            self.note("status")
            await self.asked(opened.engine.status())
        elif kind < 0.97:
            self.note("power cut")
            self.disk = self.disk.power_cut(Random(self.rng.random()))
            goes_on = False
        elif kind < 0.98:
            self.note("stop")
            goes_on = False
        await asyncio.sleep(self.rng.choice([0, 0.01, 0.1, 0.5, 2, 20, 61]))
        await self.check(opened, crowd)
        return goes_on and opened.engine.failed is None

    async def check(self, opened: House, crowd: Crowd) -> None:
        crowd.raise_found()
        if opened.engine.failed is None:
            await self.asked(opened.settled())

    async def asked(self, asking: Any) -> None:
        """Wait for an answer that an actor may be too dead to give."""
        try:
            await asking
        except UNSURE as error:
            self.note(f"no answer: {error}")

    async def ends(self, opened: House, crowd: Crowd, used: SimulatedDisk) -> None:
        """Stop the house in order; every request has ended then, whatever state it was in."""
        opened.runner.faults.clear()
        self.doom.at.clear()
        if self.rng.random() < 0.5 and opened.engine.failed is None:
            if crowd.at_work:
                await asyncio.wait(crowd.at_work, timeout=NEVER_S)
            await self.rests(opened, crowd, used)
        ending = asyncio.ensure_future(opened.engine.drain())
        if crowd.at_work:
            await asyncio.wait(crowd.at_work, timeout=NEVER_S)
        await ending
        crowd.raise_found()
        assert not crowd.at_work, f"{len(crowd.at_work)} clients wait for ever"

    async def rests(self, opened: House, crowd: Crowd, used: SimulatedDisk) -> None:
        """Let everything come to rest; nothing is held by anybody then."""
        if opened.engine.failed is None:
            used.note = lambda operation, size: None
            await asyncio.sleep(200 + 2 * opened.engine.settings.hang_s)  # till a device that hangs was seen
            await self.check(opened, crowd)
        if opened.engine.failed is None:
            shelf = opened.cache._shelf
            assert not shelf.guarded, "something is guarded by nobody"
            assert not any(span.pins for span in shelf.spans.values()), "something is pinned by nobody"
            assert not any(slot.copies or slot.joined for slot in opened.runner._slots), "a slot is busy"

    def note(self, what: str) -> None:
        self.told.trace.append(f"{self.world.time():10.3f}  {what}")


def live(seed: int, steps: int = STEPS) -> Told:
    """Live one life; raises what was found, with the command that replays it."""
    told = Told(seed)

    async def scenario(world: VirtualLoop) -> None:
        with pytest.MonkeyPatch.context() as patch:
            await Life(world, Random(f"life {seed}"), told).run(steps, patch)

    with capture_logs():
        try:
            run_world(seed, scenario, **LIMITS)  # type: ignore[arg-type]
        except BaseException as error:
            error.add_note("\n".join(told.trace))
            error.add_note(f"replay: python -m tests.sim --seed {seed} --steps {steps}")
            raise
    return told
