"""A recorded trace through the relay, in virtual time, against the same trace without it.

The whole of the relay but its sockets takes part: bodies in bytes are read, decided on, rewritten and billed
by the fake provider; the ends of responses are told at their times. Until the first body is changed both
worlds are the same, and are billed once.
"""

import heapq
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from regrow.api.relay import decide
from regrow.api.relay.counts import Counts
from regrow.api.relay.decide import Decider
from regrow.api.relay.prices import Prices, Tokens
from regrow.policy import cold_prefix
from regrow.policy.cold_prefix import RULES, Book, Latch, Rules, Turn, latches_of, settle
from regrow.policy.history import KEPT
from regrow.store.originals import Originals
from regrow.store.touches import Touches
from tests.api.relay.provider import Bill, Cache
from tests.api.relay.traces import Recorded, requests_of
from tests.policy.prompts import numbered
from tests.store.relays import Machine

START = 1_000_000.0


@dataclass(frozen=True)
class Replayed:
    """Costs in tokens of fresh input. changed: requests that were sent shortened."""

    trace: str
    without: float
    relayed: float
    requests: int
    cold: int
    changed: int

    @property
    def harmed(self) -> bool:
        return self.relayed > self.without * (1 + 1e-9)


@dataclass(frozen=True)
class Variant:
    """The rules as they are, or without one of them."""

    rules: Rules = RULES
    without: Callable[[], AbstractContextManager[object]] = nullcontext


@contextmanager
def no_latch() -> Iterator[None]:
    """C5 left out: only the cold turn itself is sent shortened."""

    def forgetful(book: Book, turn: Turn, cold: bool, now: float) -> tuple[bool, Book]:
        return settle({key: replace(one, latches=()) for key, one in book.items()}, turn, cold, now)

    with patch.object(cold_prefix, "settle", forgetful):
        yield


@contextmanager
def moving() -> Iterator[None]:
    """C10's fixed staircase left out: the boundary goes with every turn of a latched chat."""

    def restless(book: Book, turn: Turn, cold: bool, now: float) -> tuple[bool, Book]:
        known = book.get(turn.key or "")
        held = bool(known and latches_of(known.latches, turn))
        return settle(book, turn, cold or held, now)

    following = patch.object(cold_prefix, "boundary_of", lambda count: max(0, count - KEPT))
    with patch.object(cold_prefix, "settle", restless), following:
        yield


def whole_latch() -> AbstractContextManager[object]:
    """C3 with a latch over all messages of the cold turn, its last ones included."""

    def over_all(turn: Turn, start: int, boundary: int, now: float) -> Latch:
        digest = cold_prefix._hash(turn.digests)
        return Latch(start, boundary, len(turn.digests), digest, now)

    return patch.object(cold_prefix, "_latch", over_all)


VARIANTS = {
    "the rules": Variant(),
    "no latch": Variant(without=no_latch),
    "latch over all messages": Variant(without=whole_latch),
    "no margin": Variant(Rules(margin=1.0, least_idle_s=0.0)),
    "no floor": Variant(Rules(least_tokens=0)),
    "moving boundary": Variant(without=moving),
}


def replay_trace(trace: dict, variant: str = "the rules", ttl: str = "5m", drawn: bool = True) -> Replayed:
    """Replay a trace before a provider whose entries live for up to twice their TTL, or always for twice."""
    return replay(trace["id"], requests_of(trace, ttl), variant, drawn)


def replay(
    name: str, requests: Iterator[Recorded], variant: str = "the rules", drawn: bool = True
) -> Replayed:
    chosen = VARIANTS[variant]
    with chosen.without():
        return _replay(name, requests, chosen.rules, Cache(lingering=1.0, drawn=drawn))


def _replay(name: str, requests: Iterator[Recorded], rules: Rules, alone: Cache) -> Replayed:
    machine = Machine(Path("/nowhere"))
    clock, counts = machine.clock(), Counts()
    touches = Touches(None, clock)
    decider = Decider(touches, Originals(None), Prices(), counts, clock.now, repack_cold=True, rules=rules)
    behind: Cache | None = None
    without = relayed = 0.0
    changed = number = 0
    open_until: list[tuple[float, int, decide.Considered, Bill]] = []
    for number, request in enumerate(requests, 1):
        while open_until and open_until[0][0] <= request.at:
            _end(machine, decider, *heapq.heappop(open_until))
        machine.true = START + request.at
        considered = decider.consider("anthropic", request.body)
        changed += considered.changed
        if considered.changed and behind is None:
            behind = alone.copy()
        bill = paid = alone.bill(request.body, request.at, request.ended)
        if behind is not None:
            paid = behind.bill(considered.body, request.at, request.ended)
        without += bill.cost
        relayed += paid.cost
        heapq.heappush(open_until, (request.ended, number, considered, paid))
    decisions = counts.numbers()["decisions"]
    return Replayed(name, without, relayed, number, int(decisions.get("cold", 0)), changed)


def _end(
    machine: Machine, decider: Decider, at: float, _: int, considered: decide.Considered, bill: Bill
) -> None:
    machine.true = START + at
    decider.finished(considered, Tokens(bill.fresh, bill.read, bill.written_5m, bill.written_1h))


def small_chats() -> Iterator[Recorded]:
    """Made-up chats whose prefix is just what a provider caches: they read one file, rest, and go on."""
    at = 0.0
    for number in range(5):
        messages: list[dict] = [{"role": "user", "content": f"Task {number}"}]
        for turn in range(1, 30):
            at += 700.0 if turn == 16 else 10.0
            result = {
                "type": "tool_result",
                "tool_use_id": "1",
                "content": "ok" if turn > 1 else numbered(42),
            }
            messages += [{"role": "assistant", "content": "Go on."}, {"role": "user", "content": [result]}]
            marked = {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]}
            body = {"model": "m", "system": "Be brief. " * 190, "messages": [*messages[:-1], marked]}
            yield Recorded(at, at + 2.0, json.dumps(body).encode())
