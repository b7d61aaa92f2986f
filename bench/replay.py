"""Recorded agent traces as requests to a cache: what each prompt shares, and in which order they come.

A trace has no text, only the prompt's 64-token blocks; equal ids at equal places mean equal tokens up to
there. So a prompt is known in blocks, and every cut of its read plan is taken at the block at or below it.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from regrow.policy.plan import ASSISTANT, MessageEnd, MessageStart, ReadPlan

BLOCK = 64
ANSWER_S = 7.0  # where the trace does not say how long an answer took
USER_S = 60.0  # who takes longer than this to go on is a user, not a tool


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: when it comes and how long it is answered, in seconds; its plan, the prefix at each cut.

    known: the deepest cut that an earlier request of this trace has read.
    """

    at: float
    seconds: float
    plan: ReadPlan
    prefixes: tuple[bytes, ...]
    known: int


def turns(trace: Mapping[str, Any], chunk: int) -> list[Turn]:
    """Return the requests of a trace. Message ends are where a request's prompt ends: there an assistant
    starts, in every prompt that holds that block."""
    requests = sorted(trace["requests"], key=lambda request: request["t"])
    ids = [_ids(request) for request in requests]
    prefix_of = _prefixes(trace["id"], ids)
    ends: dict[int, MessageEnd] = {}
    if 0 < (system := (trace["tool_tokens"] + trace["system_tokens"]) // BLOCK) <= len(ids[0]):
        ends[ids[0][system - 1]] = MessageEnd(system * BLOCK, "system")
    last: dict[str, float] = {}
    for request, blocks in zip(requests, ids, strict=True):
        asked = request["t"] - last.get(request["agent"], -USER_S - 1) > USER_S
        if blocks:
            ends.setdefault(blocks[-1], MessageEnd(len(blocks) * BLOCK, "user" if asked else "tool"))
        last[request["agent"]] = request["t"] + (request["api_s"] or ANSWER_S)
    seen: set[bytes] = set()
    found = []
    for request, blocks in zip(requests, ids, strict=True):
        plan = _plan(request["in"], blocks, ends, chunk)
        prefixes = tuple(prefix_of[blocks[cut // BLOCK - 1]] for cut in plan.cuts)
        known = max((p for p, key in zip(plan.cuts, prefixes, strict=True) if key in seen), default=0)
        seen.update(prefixes)
        found.append(Turn(request["t"], request["api_s"] or ANSWER_S, plan, prefixes, known))
    return found


def _ids(request: Mapping[str, Any]) -> list[int]:
    """Return the ids of the blocks that end before the prompt's last token."""
    blocks = chain.from_iterable(range(first, first + count) for first, count in request["blocks"])
    return list(blocks)[: (request["in"] - 1) // BLOCK]


def _prefixes(trace: str, ids: Iterable[Sequence[int]]) -> Mapping[int, bytes]:
    """Return a name for each block of a trace, and so for the prefix that ends with it."""
    return {block: f"{trace}/{block}".encode() for block in set(chain.from_iterable(ids))}


def _plan(length: int, blocks: Sequence[int], ends: Mapping[int, MessageEnd], chunk: int) -> ReadPlan:
    """Return the read plan of a prompt in steps of a block."""
    here = [
        e
        for block, e in ends.items()
        if e.position <= len(blocks) * BLOCK and blocks[e.position // BLOCK - 1] == block
    ]
    here.sort(key=lambda end: end.position)
    cuts = sorted({*range(chunk, len(blocks) * BLOCK + 1, chunk), *(end.position for end in here)})
    starts = [MessageStart(e.position, "user" if e.role == "system" else ASSISTANT) for e in here]
    return ReadPlan(length, tuple(cuts), tuple(here), (MessageStart(0, "system"), *starts))


@dataclass(frozen=True, slots=True)
class Begin:
    """A request gets a slot."""

    number: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class End:
    """Its answer is complete."""

    number: int


def schedule(traces: Iterable[Sequence[Turn]], at_once: int, slots: int) -> list[Begin | End]:
    """Return in which order the requests begin and end with `at_once` conversations open over `slots` slots.

    A request that finds every slot taken waits, and what follows it in its conversation comes as much later;
    when a conversation ends, the next one opens. Nothing here depends on what is cached.
    """
    waiting = deque(traces)
    coming: list[tuple[float, int, int]] = []  # (time, conversation, turn)
    running: list[tuple[float, int, int, int]] = []  # (end, number, conversation, turn)
    queue: deque[tuple[float, int, int]] = deque()
    open_: dict[int, Sequence[Turn]] = {}
    late: dict[int, float] = {}
    events: list[Begin | End] = []
    opened = number = 0

    def open_next(now: float) -> None:
        nonlocal opened
        if waiting:
            open_[opened] = waiting.popleft()
            late[opened] = now - open_[opened][0].at
            heapq.heappush(coming, (now, opened, 0))
            opened += 1

    for _ in range(at_once):
        open_next(0.0)
    while coming or running:
        if running and (not coming or running[0][0] <= coming[0][0]):
            now, ended, conversation, index = heapq.heappop(running)
            events.append(End(ended))
            if index + 1 == len(open_[conversation]):
                del open_[conversation]
                open_next(now)
        else:
            now, conversation, index = heapq.heappop(coming)
            queue.append((now, conversation, index))
        while queue and len(running) < slots:
            came, conversation, index = queue.popleft()
            turn = open_[conversation][index]
            late[conversation] += now - came
            heapq.heappush(running, (now + turn.seconds, number, conversation, index))
            events.append(Begin(number, turn))
            number += 1
            if index + 1 < len(open_[conversation]):
                due = open_[conversation][index + 1].at + late[conversation]
                heapq.heappush(coming, (max(due, now), conversation, index + 1))
    return events
