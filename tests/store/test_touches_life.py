"""C8 and the claim of it all: never a wrong "cold", whatever happens to relays, files and clocks."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from regrow.store.touches import FILE
from tests.store.relays import LIMIT, TURNS, Machine

chats = st.integers(0, len(TURNS) - 1)
two = st.integers(0, 1)
pauses = st.sampled_from([0.0, 1.0, 20.0, 31.0, 100.0, 299.0, 570.0, 600.0, 601.0, 680.0, 700.0, 5000.0])


CORRUPT = {
    "lost": None,
    "empty": b"",
    "cut off": b'{"version": 1, "boot": "b',
    "of another shape": b"[]",
    "of another version": b'{"version": 9, "boot": "b", "base": 0.0, "conversations": {}}',
    "no text": b"\xff\x00",
    "too deep": b"[" * 9000,
}


class Life(RuleBasedStateMachine):
    """Requests, pauses, and every accident, against the true time of each chat's last use."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.machine = Machine(self.directory)
        self.used: dict[int, float] = {}
        self.open: list[tuple[int, int]] = []
        self.latched: set[int] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule(relay=two, chat=chats, waits=st.booleans())
    def request(self, relay: int, chat: int, waits: bool) -> None:
        now = self.machine.true
        used = now if any(chat == other for _, other in self.open) else self.used.get(chat)
        cold, repacked = self.machine.relay(relay).request(TURNS[chat])
        if cold:
            assert used is not None
            assert now - used > LIMIT
            self.latched.add(chat)
        assert repacked or chat not in self.latched
        self.used[chat] = now
        self.open.append((relay, chat))
        if not waits:
            self.end(len(self.open) - 1)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        relay, chat = self.open.pop(which % len(self.open))
        self.machine.relay(relay).touches.ended(TURNS[chat].key)
        self.used[chat] = self.machine.true

    @rule(seconds=pauses)
    def wait(self, seconds: float) -> None:
        self.machine.wait(seconds)

    @rule(seconds=st.sampled_from([-1e6, -700.0, 700.0, 1e6]))
    def wall_clock_is_set(self, seconds: float) -> None:
        """Between a boot and the first relay in it, a clock that is early is what nothing could tell."""
        self.machine.wall_error += seconds if self.machine.known_boot else -abs(seconds)

    @rule(relay=two)
    def stop(self, relay: int) -> None:
        self._gone(relay)
        self.machine.relay(relay).touches.save()
        del self.machine.relays[relay]

    @rule(relay=two)
    def kill(self, relay: int) -> None:
        self._gone(relay)
        self.machine.relays.pop(relay, None)

    @rule(error=st.sampled_from([0.0, -700.0, -1e6]))
    def reboot(self, error: float) -> None:
        for relay in (0, 1):
            self._gone(relay)
        self.machine.reboot(min(error, self.machine.wall_error))

    @rule(kind=st.sampled_from(sorted(CORRUPT)))
    def file_is_lost_or_corrupt(self, kind: str) -> None:
        file = self.directory / FILE
        file.unlink(missing_ok=True)
        if CORRUPT[kind] is not None:
            file.write_bytes(CORRUPT[kind])
        self.latched.clear()

    @precondition(lambda self: (self.directory / FILE).exists())
    @rule(seconds=st.sampled_from([1.0, 700.0, 1e9]))
    def file_is_from_the_future(self, seconds: float) -> None:
        path = self.directory / FILE
        try:
            file = msgspec.json.decode(path.read_bytes())
            for record in file["conversations"].values():
                record["touched"] += seconds
        except (msgspec.DecodeError, RecursionError, TypeError):
            return
        path.write_bytes(msgspec.json.encode(file))

    def _gone(self, relay: int) -> None:
        """A response that is cut off with its relay had its last byte now at the latest."""
        for chat in (chat for at, chat in self.open if at == relay):
            self.used[chat] = self.machine.true
        self.open = [(at, chat) for at, chat in self.open if at != relay]


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase
