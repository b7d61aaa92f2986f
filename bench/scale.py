"""What it costs to keep many conversations: the time to place a request, to decide what goes, and the memory.

regrow's own actors serve conversations of about 100,000 keys without a model (`alone.py`), opened by one of
eight system prompts, until so many of them are parked. With all slots but one taken, then:

- place: a request is placed, source and slot, in ms: the next turn of a parked conversation (*turn*), a chat
  under a known system prompt (*chat*), a prompt that nobody knows (*new*);
- submit: a turn from its arrival to the slot, with the reason why not more is reused, in ms;
- room: deciding what goes for another conversation, once memory is full, in ms;
- bytes / ledger: what the keys and all that is known of one more conversation take, over what the ledger has
  for it (8 bytes a token); cells and states take no memory here.

Times are medians; the target is under 2 ms for a request to be placed, whatever is kept.
"""

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import harness
from alone import CHUNK, PROMPT, Alone, Size
from regrow.actors.messages import Prepared, Submit
from regrow.config import EngineSettings
from regrow.policy.keys import Keys, as_keys, prefix_hashes
from regrow.policy.plan import ASSISTANT, MessageEnd, MessageStart, ReadPlan
from replay import Turn

SIZE = Size(token=12 * (2 * 2 * 256 + 128) * 2, state=118_000_000)  # Qwen3.8-Flash-Next (trace.py)
KEYS, TURNS, ROOT, ROOTS = 100_000, 12, 8_192, 8
QUICK = ((20, 4), (200, 1), (200, 4), (200, 16))  # conversations, slots
CASES = (*QUICK, (2_000, 4))
TRACED, REPEATS = 10, 25
AMPLE = 1 << 62


@dataclass(frozen=True, slots=True)
class Prompt(Turn):
    """A turn with its keys."""

    keys: Keys


class Scaled(Alone):
    """Serves turns that have keys. placed_s: how long each took from its arrival until its slot was told."""

    placed_s: list[float]

    def _submit(self, submit: Submit) -> None:
        begin = time.perf_counter()
        super()._submit(submit)
        self.placed_s.append(time.perf_counter() - begin)

    def _prepared(self, turn: Turn) -> Prepared:
        prepared = super()._prepared(turn)
        return replace(prepared, keys=turn.keys) if isinstance(turn, Prompt) else prepared


class Talks:
    """Makes conversations: number n opens with system prompt n modulo `ROOTS`."""

    def __init__(self, keys: int, seed: int) -> None:
        self._keys = keys
        self._chance = np.random.default_rng(seed)
        self._roots = [self._said(min(ROOT, keys // 4)) for _ in range(ROOTS + 1)]

    def opening(self, number: int, *, known: bool = True) -> Prompt:
        """Return a conversation's prompt, under a system prompt of its own unless it is `known`."""
        root = self._roots[number % ROOTS] if known else self._said(len(self._roots[0]))
        ends = np.linspace(len(root), self._keys, 2 * TURNS, dtype=int).tolist()
        return self._prompt(np.concatenate([root, self._said(self._keys - len(root))]), ends)

    def next_turn(self, prompt: Prompt) -> Prompt:
        """Return a conversation's next prompt, 300 keys longer."""
        ends = [end.position for end in prompt.plan.ends]
        return self._prompt(np.concatenate([prompt.keys, self._said(300)]), [*ends, len(prompt.keys) + 299])

    def _said(self, count: int) -> Keys:
        return self._chance.integers(0, 150_000, count)

    def _prompt(self, keys: Keys, ends: list[int]) -> Prompt:
        last = len(keys) - 1
        here = [MessageEnd(end, "user" if n else "system") for n, end in enumerate(ends) if end <= last]
        cuts = sorted({*range(CHUNK, last + 1, CHUNK), *(end.position for end in here)})
        starts = (MessageStart(end.position, ASSISTANT if end.role == "user" else "user") for end in here)
        plan = ReadPlan(len(keys), tuple(cuts), tuple(here), (MessageStart(0, "system"), *starts))
        hashes = prefix_hashes(PROMPT.namespace, keys, cuts)
        return Prompt(0.0, 1.0, plan, hashes, 0, as_keys(keys))


def median_ms(work: Callable[[], object]) -> float:
    """Return how long it takes, in ms, the first time left out."""
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) * 1e3


def serve(alone: Scaled, prompt: Prompt, number: int) -> None:
    alone.begin(number, prompt)
    alone.end(number)


def memory(alone: Scaled, talks: Talks, first: int) -> float:
    """Return the bytes that conversations take on the heap over those that the ledger has for their keys."""
    ledger = alone.engine.cache.actor._shelf.ledger
    gc.collect()
    tracemalloc.start()
    before = ledger.by_kind["keys"]
    for number in range(first, first + TRACED):
        serve(alone, talks.opening(number), number)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / (ledger.by_kind["keys"] - before)


def row(conversations: int, slots: int, settings: EngineSettings, seed: int) -> dict[str, harness.Cell]:
    """Serve the conversations one by one, and then more with all slots but one taken."""
    talks, alone = Talks(KEYS, seed), Scaled(slots, AMPLE, SIZE, settings)
    alone.placed_s = []
    openings = [talks.opening(number) for number in range(REPEATS + 1)]
    for number in range(conversations + slots):
        serve(alone, openings[number] if number < len(openings) else talks.opening(number), number)
    ratio = memory(alone, talks, conversations + slots)
    for number in range(1, slots):
        alone.begin(-number, talks.opening(number))
    shelf, placement = alone.engine.cache.actor._shelf, alone.engine.engine.actor._placement
    kinds = {
        "turn": talks.next_turn(openings[0]),
        "chat": talks.opening(0),
        "new": talks.opening(0, known=False),
    }
    placed = {
        f"place {kind}": median_ms(partial(placement.choose, alone._prepared(prompt), use_sources=True))
        for kind, prompt in kinds.items()
    }
    room = median_ms(partial(shelf.decide, shelf.ledger.free + KEYS * SIZE.token, None))
    alone.placed_s.clear()
    for number, prompt in enumerate(openings):
        serve(alone, talks.next_turn(prompt), number)
    return {
        "kept": len(alone.engine.cache.actor._parking.conversations),
        "slots": slots,
        **placed,
        "submit": statistics.median(alone.placed_s) * 1e3,
        "room": room,
        "bytes / ledger": ratio,
    }


def main() -> None:
    opts = harness.options("scale", __doc__ or "", model="Qwen3.8-Flash-Next")
    settings = EngineSettings()
    rows = [row(*case, settings, opts.seed) for case in (QUICK if opts.quick else CASES)]
    harness.report("scale", opts, f"Conversations of {KEYS:,} keys; ms", rows)


if __name__ == "__main__":
    main()
