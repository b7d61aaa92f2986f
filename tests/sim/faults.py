"""What can go wrong in a simulated life, each at a moment that the seed draws."""

import errno
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import get_args

import pytest
import torch

import regrow.actors.engine as engine_module
from regrow.actors.checked import Checked, Sound
from tests.actors.world import House
from tests.store.disk import SimulatedDisk
from tests.world.fake_runner import Hang, Operation
from tests.world.loop import VirtualLoop

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
ERRORS = (
    lambda: OSError("the bus fell off"),
    lambda: torch.OutOfMemoryError("out of memory"),
    lambda: RuntimeError("an illegal address"),
)
SLOW_S = (0.5, 3.0, 30.0)
ACTORS = ("engine", "cache", "roots", "device", "slot-0", "slot-1", "slot-2", "disk")
DISK_OPERATIONS = ("create", "write", "read", "rename", "unlink", "touch", "sync", "sync names")


class Struck(Exception):
    """What kills an actor here."""


@dataclass
class Doom:
    """Kills actors: `at` names the messages that are left to each, and whether the last is handled first."""

    at: dict[str, tuple[int, bool]] = field(default_factory=dict)

    def strikes(self, name: str, *, handled: bool) -> None:
        left, after = self.at.get(name, (-1, False))
        if left < 0 or (handled and not after):
            return
        if left or handled is not after:
            if handled is after:
                self.at[name] = (left - 1, after)
            return
        del self.at[name]
        raise Struck(f"{name} dies {'after' if after else 'before'} a message")

    def watching(self, patch: pytest.MonkeyPatch, lives: Callable[[], dict[str, Sound]]) -> None:
        """Have the actors of every engine that opens now die where this says so."""

        class Mortal(Checked):
            async def handle(mortal, message: object) -> object:  # noqa: N805
                name = next((n for n, actor in lives().items() if actor is mortal._actor), "")
                self.strikes(name, handled=False)
                result = await super().handle(message)
                self.strikes(name, handled=True)
                return result

        patch.setattr(engine_module, "Checked", Mortal)


@dataclass
class Faults:
    """Chooses a fault and makes it happen; each returns what was done, for the trace."""

    world: VirtualLoop
    rng: Random
    doom: Doom

    def device(self, house: House) -> str:
        """One of the next calls of an operation fails, or takes long."""
        operation, runner = self.rng.choice(OPERATIONS), house.runner
        slow = (*SLOW_S, *([math.inf] * (house.engine.settings.hang_s > 0)))  # some limit ends what hangs
        fault = Hang(self.rng.choice(slow)) if self.rng.random() < 0.4 else self.rng.choice(ERRORS)()
        runner.faults[operation, runner.counts[operation] + self.rng.randint(1, 4)] = fault
        return f"{operation} will give {fault!r}"

    def numbers(self, house: House) -> str:
        """Some cell will hold no finite numbers."""
        runner = house.runner
        slot = self.rng.randrange(runner.slots)
        at = (slot, runner._slots[slot].length + self.rng.randint(0, 120))
        runner.nan_at.add(at)
        return f"{at} will not be finite"

    def kill(self, house: House) -> str:
        """An actor dies before or after one of its next messages."""
        name = self.rng.choice(ACTORS)
        if name == "device":
            house.crash(name)
        else:
            self.doom.at[name] = (self.rng.randint(0, 12), self.rng.random() < 0.5)
        return f"{name} will die"

    def disk(self, disk: SimulatedDisk) -> str:
        """The disk refuses an operation, becomes slow, lies, rots, or is well again."""
        match self.rng.randrange(6):
            case 0:
                operation = self.rng.choice(DISK_OPERATIONS)
                disk.fails[operation] = self.rng.choice([errno.ENOSPC, errno.EIO, errno.EROFS])
                return f"disk: {operation} fails with {disk.fails[operation]}"
            case 1:
                seconds = self.rng.choice(SLOW_S)
                disk.note = lambda operation, size: self.world.sleep(seconds * (size > 1000))
                return f"disk: {seconds} s each"
            case 2:
                disk.lies = True
                return "disk: lies"
            case 3:
                disk.capacity = sum(len(content.data) for content in disk.names.values())
                return "disk: full"
            case 4 if disk.names:
                name = self.rng.choice(sorted(disk.names))
                content = disk.names[name]
                at = self.rng.randrange(max(len(content.data), 1))
                content.data[at : at + 1] = bytes(b ^ 16 for b in content.data[at : at + 1])
                return f"disk: {name} rots at {at}"
        disk.fails.clear()
        disk.lies, disk.capacity, disk.note = False, 1 << 40, lambda operation, size: None
        return "disk: well"
