"""A machine with relays on one data directory: true time, a wall clock that anybody may set, crashes."""

from dataclasses import dataclass, field
from pathlib import Path

from regrow.policy.cold_prefix import RULES, Book, Turn, is_cold, settle, turn_of
from regrow.store.clock import SteadyClock
from regrow.store.touches import Touches
from tests.policy.prompts import chat

LIMIT = 600.0
TURNS = [turn_of(chat(13, seed=seed, lines=44), "You are an agent. " * 600) for seed in range(3)]


@dataclass
class Machine:
    """Time passes for all; `wall_error` is what the wall clock is ahead of true time."""

    directory: Path
    true: float = 1_000_000.0
    booted: float = 999_000.0
    boot: str = "boot 0"
    wall_error: float = 0.0
    known_boot: bool = True
    relays: dict[int, "OneRelay"] = field(default_factory=dict)

    def clock(self) -> SteadyClock:
        booted = self.booted
        wall = self.true + self.wall_error
        return SteadyClock(self.boot, wall - (self.true - booted), lambda: self.true - booted)

    def relay(self, number: int = 0) -> "OneRelay":
        if number not in self.relays:
            self.relays[number] = OneRelay(Touches(self.directory, self.clock()))
            self.known_boot = True
        return self.relays[number]

    def wait(self, seconds: float) -> None:
        """Let time pass; the last save of each relay is up to 29 s old afterwards."""
        self.true += max(0.0, seconds - 29)
        if seconds > 29:
            for relay in self.relays.values():
                relay.touches.save()
        self.true += min(seconds, 29)

    def reboot(self, wall_error: float) -> None:
        self.relays.clear()
        self.wall_error = wall_error
        self.true += 20
        self.booted = self.true
        self.boot += "'"
        self.known_boot = False


@dataclass
class OneRelay:
    touches: Touches

    def request(self, turn: Turn) -> tuple[bool, bool]:
        """Decide on a turn; returns whether it is cold, and whether it is repacked."""

        def step(book: Book, now: float) -> tuple[tuple[bool, bool], Book]:
            cold = is_cold(book, turn, now, RULES)
            repack, book = settle(book, turn, cold, now)
            return (cold, repack), book

        return self.touches.decide(turn.key, step)

    def turn(self, turn: Turn) -> tuple[bool, bool]:
        """The same with the whole response."""
        answer = self.request(turn)
        self.touches.ended(turn.key)
        return answer
