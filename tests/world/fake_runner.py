"""A scripted device: exact durations, faults on demand, and tokens that depend on every key a slot holds.

The running state is a hash of the keys below its position and the next token is drawn from that hash, so a
wrong resume, a leftover token or a skipped one changes the answer. Beyond that the fake checks every call:
what breaks the rules of `Runner` raises `Misuse`, which the code under test does not catch.
"""

import asyncio
import copy
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from regrow.gpu.copies import Taken
from regrow.gpu.logprobs import scores_of
from regrow.gpu.types import (
    CellSpec,
    Chunk,
    Digest,
    Geometry,
    HostCells,
    ReadResult,
    Row,
    Scored,
    Snapshot,
    StateSpec,
    StepResult,
)
from regrow.policy.keys import Keys
from regrow.policy.request import SamplingParams

Operation = Literal[
    "read", "step", "snapshot", "mount", "digest", "join", "leave", "empty", "reset", "copy", "load", "save"
]
LAYERS = 4  # between which others may be stepped
PIECES = 4  # a copy goes on in so many pieces
NOT_FINITE = -1  # stands for None in host cells
EMPTY = 0  # the hash of no keys
CANDIDATES = 8
END_LOGIT = 100.0  # far above every candidate: a scripted end is drawn at any temperature
GEOMETRY = Geometry(
    cells=(CellSpec(0, "k", 1, 8, torch.float32), CellSpec(0, "v", 1, 8, torch.float32)), states=()
)
HYBRID = Geometry(GEOMETRY.cells, states=(StateSpec(1, "recurrent", 0, (1,), torch.int64),))


class Misuse(BaseException):
    """The runner was used against its rules. Not an Exception: it is not to pass for a device failure."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: a chunk of n tokens from `start` on takes read + n * (token + start * depth), a copy of n
    cells n * copy."""

    read: float = 2**-4
    token: float = 2**-10
    depth: float = 0.0
    step: float = 2**-5
    snapshot: float = 0.0
    mount: float = 0.0
    copy: float = 2**-14

    def of_chunk(self, start: int, n: int) -> float:
        return self.read + n * (self.token + start * self.depth)


@dataclass(frozen=True, slots=True)
class Hang:
    """A fault: the call takes `seconds` more."""

    seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class _State:
    position: int
    hash: int | None  # None: not finite, and so is all that follows


@dataclass(slots=True)
class _Slot:
    """hashes[i] is the hash of the keys in cells [0, i]. fed: tokens of the last step, not committed yet."""

    hashes: list[int | None] = field(default_factory=list)
    length: int = 0
    state: _State = _State(0, EMPTY)
    joined: bool = False
    fed: int = 0
    torn: bool = False
    leased: int = 0
    copies: list["FakeCopy"] = field(default_factory=list)

    def hash_below(self, position: int) -> int | None:
        return self.hashes[position - 1] if position else EMPTY


def hash_of(keys: Keys) -> int:
    """Return the hash by which the fake knows these keys: its running state and its name for a prompt."""
    return functools.reduce(_mix, map(int, keys), EMPTY)


def _mix(a: int, b: int) -> int:
    packed = a.to_bytes(8, "little") + b.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class FakeRunner:
    """Implements `Runner`.

    sleep: lets virtual time pass (`VirtualLoop.sleep`). note: gets a tuple for every call that changes
    something. words: the ids that are drawn; `eos` only where `answer_length` says so. faults: (operation, n)
    -> an error that the n-th call raises, or a Hang; n counts from 1. nan_at: (slot, position) pairs; writing
    that cell makes the slot's numbers not finite from there on, once.
    """

    def __init__(
        self,
        *,
        slots: int = 4,
        context: int = 4096,
        hybrid: bool = True,
        vocab: int = 512,
        words: range | None = None,
        eos: int = 2,
        costs: Costs = Costs(),
        sleep: Callable[[float], None] = lambda _: None,
        note: Callable[[tuple[object, ...]], None] = lambda _: None,
    ) -> None:
        self.geometry = HYBRID if hybrid else GEOMETRY
        self.slots = slots
        self.context = context
        self.costs = costs
        self.faults: dict[tuple[Operation, int], Exception | Hang] = {}
        self.nan_at: set[tuple[int, int]] = set()
        self.counts: Counter[Operation] = Counter()
        self.lends: list[bool] = []  # of each fill
        self._vocab = vocab
        self._words = words or range(16, vocab)
        self._eos = eos
        self._sleep = sleep
        self._note = note
        self._ends: dict[int, int] = {}
        self._slots = [_Slot() for _ in range(slots)]

    def answer_length(self, prompt: Keys, tokens: int) -> None:
        """Script: the answer to this prompt has `tokens` tokens, then the end token is drawn."""
        self._ends[hash_of(prompt)] = tokens

    def expected_answer(self, prompt: Keys, tokens: int, sampling: SamplingParams) -> list[int]:
        """Return the first `tokens` tokens after `prompt`, whatever the slots hold; ends are not obeyed."""
        hashed = named = hash_of(prompt)
        answer: list[int] = []
        for counter in range(tokens):
            row = Row(0, 0, 0, sampling, counter)
            answer.append(self._choose(row, self._logits(hashed, named, counter)))
            hashed = _mix(hashed, answer[-1])
        return answer

    def logits_after(self, keys: Keys) -> torch.Tensor:
        """Return the logits [vocab] after these keys, whatever the slots hold; scripted ends are not in
        them."""
        return self._logits(hash_of(keys), None, drawn=0)

    def lease(self, slot: int, below: int) -> None:
        """From now on cells below this one must not be written, and the slot not be emptied."""
        self._slots[slot].leased = below

    def release(self, slot: int) -> None:
        self._slots[slot].leased = 0

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def empty(self, slot: int) -> None:
        self._require(not self._slots[slot].leased, f"slot {slot} is emptied while its cells are leased")
        self._require(not self._slots[slot].copies, f"slot {slot} is emptied while it is copied from")
        self._slots[slot] = _Slot()
        self._act("empty", slot)

    def mount(self, slot: int, position: int, state: Snapshot | None) -> None:
        held = self._at_rest("mount", slot)
        self._require(not held.torn, f"mount of slot {slot} after a failed call, without a reset")
        if position > held.length:
            raise ValueError(f"slot {slot} holds {held.length} cells, not {position}")
        below = held.hash_below(position)
        live = state is None and position == held.length == held.state.position
        if position and self.geometry.hybrid and not live:
            if state is None or state.position != position:
                raise ValueError(f"slot {slot} is given no state at {position}")
            self._require(
                below is None or int(state.states[0]) == below,  # cells that are not finite stay so
                f"the state given at {position} is not of the keys in slot {slot}",
            )
        held.state, held.length, held.fed = _State(position, below), position, 0
        self._act("mount", slot, position, cost=self.costs.mount, tears=(held,))

    def load_state(self, slot: int, state: Snapshot) -> Taken:
        """Takes no time; what is wrong with the state is told by `mount`."""
        self._at_rest("mount", slot)
        return Taken(None)

    def copy_cells(self, source: int, slot: int, stop: int, *, lend: bool = False) -> "FakeCopy":
        held = self._slots[source]
        if stop > held.length:
            raise ValueError(f"slot {source} holds {held.length} cells, not {stop}")
        into = self._claim("copy", slot)
        self.lends.append(lend)
        self._act("copy", source, slot, stop)
        return FakeCopy(self, held, 0, stop, into.hashes)

    def load_cells(self, slot: int, cells: Sequence[HostCells], *, lend: bool = False) -> "FakeCopy":
        edges = [0, *(part.stop for part in cells)]
        self._require([part.start for part in cells] == edges[:-1], f"slot {slot} is given cells with gaps")
        into = self._claim("load", slot)
        self.lends.append(lend)
        self._act("load", slot, edges[-1])
        source = _Slot(hashes=[h for part in cells for h in _hashes_in(part)], length=edges[-1])
        return FakeCopy(self, source, 0, edges[-1], into.hashes)

    def save_cells(self, slot: int, start: int, stop: int) -> tuple[HostCells, "FakeCopy"]:
        held = self._slots[slot]
        if not 0 <= start < stop <= held.length:
            raise ValueError(f"slot {slot} holds {held.length} cells, not [{start}, {stop})")
        self._act("save", slot, start, stop)
        shapes = [(cell.heads, stop - start, cell.dim) for cell in self.geometry.cells]
        host = HostCells(start, stop, tuple(torch.zeros(shape) for shape in shapes))
        return host, FakeCopy(self, held, start, stop, host)

    def filled(self, slot: int, length: int) -> None:
        held = self._at_rest("copy", slot)
        self._require(len(held.hashes) == length, f"slot {slot} got {len(held.hashes)} cells, not {length}")
        held.length, held.state = length, _State(-1, None)

    def _claim(self, operation: Operation, slot: int) -> _Slot:
        held = self._at_rest(operation, slot)
        self._require(not held.leased and not held.copies, f"slot {slot} is filled while it is copied from")
        held.hashes, held.length, held.state, held.fed = [], 0, _State(0, EMPTY), 0
        return held

    def read(self, chunk: Chunk, between: Callable[[], None] | None = None) -> ReadResult:
        slot, n = chunk.slot, len(chunk.ids)
        held = self._at_rest("read", slot)
        self._settled("read", slot)
        self._require(chunk.start == held.length, f"slot {slot} has {held.length} cells, not {chunk.start}")
        self._require(n > 0, f"read of slot {slot} without a token")
        for key in chunk.ids:
            self._write(slot, int(key))
        held.length += n
        layers = 1 if between is None else LAYERS
        cost = self.costs.of_chunk(chunk.start, n) / layers
        self._act("read", slot, chunk.start, n, cost=cost, tears=(held,))
        for _ in range(layers - 1):
            assert between is not None
            between()
            self._sleep(cost)
        match chunk.want_logits:
            case "none":
                return ReadResult()
            case "last":
                return ReadResult(self._logits(held.state.hash, held.state.hash, drawn=0))
            case "all":
                below = held.hashes[chunk.start : chunk.start + n]
                return ReadResult(torch.stack([self._logits(hashed, None, drawn=0) for hashed in below]))

    def foresee(self) -> bool:
        return False

    def snapshot(self, slot: int) -> Taken:
        return Taken(self._snapshot(slot))

    def _snapshot(self, slot: int) -> Snapshot | None:
        held = self._at_rest("snapshot", slot)
        self._settled("snapshot", slot)
        self._require(held.length > 0, f"snapshot of slot {slot}, which is empty")
        self._act("snapshot", slot, held.length, cost=self.costs.snapshot, tears=(held,))
        if not self.geometry.hybrid:
            return Snapshot(held.length, ())
        if held.state.hash is None:
            return None
        return Snapshot(held.length, (torch.tensor([held.state.hash]),))

    def join(self, slot: int) -> None:
        held = self._at_rest("join", slot)
        self._settled("join", slot)
        held.joined = True
        self._act("join", slot, tears=(held,))

    def leave(self, slot: int) -> None:
        held = self._joined("leave", slot)
        held.joined = False
        self._act("leave", slot, tears=(held,))

    def sample(self, row: Row, logits: torch.Tensor) -> int | None:
        """As a step draws; penalties are ignored."""
        self._off_the_loop("sample")
        return self._choose(row, logits) if bool(torch.isfinite(logits).all()) else None

    def step(self, rows: Sequence[Row]) -> StepResult:
        slots = sorted(row.slot for row in rows)
        joined = [slot for slot, held in enumerate(self._slots) if held.joined]
        self._require(slots == joined != [], f"step of the slots {slots} while {joined} are joined")
        for row in rows:
            length = self._joined("step", row.slot).length
            self._settled("step", row.slot)
            self._require(row.length == length, f"slot {row.slot} has {length} cells, not {row.length}")
            self._require(0 <= row.counter <= length, f"slot {row.slot} cannot have drawn {row.counter}")
        for row in rows:
            self._write(row.slot, row.token)
            self._slots[row.slot].fed = 1
        self._act("step", *slots, cost=self.costs.step, tears=[self._slots[slot] for slot in slots])
        drawn = [self._draw(row) for row in rows]
        return StepResult(tuple(tokens for tokens, _ in drawn), tuple(scored for _, scored in drawn))

    def commit(self, slot: int, n: int) -> None:
        held = self._joined("commit", slot)
        self._require(0 <= n <= held.fed, f"slot {slot} commits {n} of {held.fed} tokens")
        held.length += n
        held.fed = 0

    def digest(self, slot: int) -> Digest:
        held = self._slots[slot]
        self._settled("digest", slot)
        self._act("digest", slot)
        cells = [f"{cell.name}.{cell.layer}" for cell in self.geometry.cells]
        states = [f"{state.kind}.{state.layer}.{state.index}" for state in self.geometry.states]
        return Digest(held.length, tuple((part, f"{held.state.hash}") for part in (*cells, *states)))

    def fresh(self) -> "FakeRunner":
        """Faults and counts are those of both."""
        sibling = copy.copy(self)
        sibling._slots = [_Slot() for _ in range(self.slots)]
        return sibling

    def reset(self) -> None:
        for slot, held in enumerate(self._slots):
            self._require(not held.leased, f"slot {slot} is reset while its cells are leased")
        self._slots = [_Slot() for _ in range(self.slots)]
        self._act("reset")

    def _write(self, slot: int, key: int) -> None:
        """Put `key` into the cell where the running state stands."""
        held = self._slots[slot]
        at = held.state.position
        self._require(at < self.context, f"slot {slot} is written beyond its {self.context} cells")
        self._require(at >= held.leased, f"cell {at} of slot {slot} is leased and written")
        self._require(
            all(at >= c.stop for c in held.copies), f"cell {at} of slot {slot} is written in a copy"
        )
        after = None if held.state.hash is None else _mix(held.state.hash, key)
        if (slot, at) in self.nan_at:
            self.nan_at.remove((slot, at))
            after = None
        held.hashes[at:] = [after]
        held.state = _State(at + 1, after)

    def _draw(self, row: Row) -> tuple[tuple[int, ...], tuple[Scored, ...]]:
        hashes = self._slots[row.slot].hashes
        logits = self._logits(hashes[row.length], hashes[row.length - row.counter], row.counter)
        token = self.sample(row, logits)
        return () if token is None else (token,), scores_of(row, token, logits)

    def _choose(self, row: Row, logits: torch.Tensor) -> int:
        allowed = logits.clone()
        for token, bias in row.sampling.logit_bias.items():
            allowed[token] += bias
        allowed[list(row.banned)] = -math.inf
        if row.mask is not None:
            row.mask.apply(allowed)
        if row.sampling.temperature == 0:
            return int(allowed.argmax())
        pool = (allowed > allowed.max() - CANDIDATES).nonzero().flatten()
        return int(pool[_mix(_mix(EMPTY, row.sampling.seed), row.counter) % len(pool)])

    def _logits(self, keys: int | None, prompt: int | None, drawn: int) -> torch.Tensor:
        """Return logits [vocab]: a few words chosen by the hash of the keys, or the scripted end."""
        if keys is None:
            return torch.full((self._vocab,), math.nan)
        logits = torch.full((self._vocab,), -END_LOGIT)
        for rank in range(CANDIDATES):
            logits[self._words[_mix(keys, rank) % len(self._words)]] = rank + 1.0
        if prompt is not None and self._ends.get(prompt) == drawn:
            logits[self._eos] = END_LOGIT
        return logits

    def _act(
        self, operation: Operation, *what: object, cost: float = 0.0, tears: Sequence[_Slot] = ()
    ) -> None:
        """Count and note the call, let its time pass, and fail where the script says so: half done."""
        self._off_the_loop(operation)
        self.counts[operation] += 1
        self._note((operation, *what))
        fault = self.faults.get((operation, self.counts[operation]))
        if isinstance(fault, Hang):
            cost += fault.seconds
        if cost:
            self._sleep(cost)
        if isinstance(fault, Exception):
            for held in tears:
                held.torn = True
            raise fault

    def _at_rest(self, operation: Operation, slot: int) -> _Slot:
        held = self._slots[slot]
        self._require(not held.joined, f"{operation} of slot {slot}, whose state is in its decode row")
        return held

    def _joined(self, operation: str, slot: int) -> _Slot:
        held = self._slots[slot]
        self._require(held.joined, f"{operation} of slot {slot}, whose state is in its rest row")
        return held

    def _settled(self, operation: Operation, slot: int) -> None:
        """Check that the slot is whole: nothing torn or half fed, and the state that of the cells (R4)."""
        held = self._slots[slot]
        self._require(not held.torn, f"{operation} of slot {slot} after a failed call, without a reset")
        self._require(not held.fed, f"{operation} of slot {slot} before its last step is committed")
        self._require(
            held.state.position == held.length,
            f"{operation} of slot {slot}: its state is at {held.state.position}, its cells at {held.length}",
        )

    def _off_the_loop(self, operation: str) -> None:
        self._require(asyncio._get_running_loop() is None, f"{operation} is called in the event loop")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Misuse(what)


class FakeCopy:
    """Copies hashes in pieces, each of which takes its share of the time; implements `CellCopy`."""

    def __init__(
        self, runner: FakeRunner, source: _Slot, start: int, stop: int, into: list[int | None] | HostCells
    ) -> None:
        self.stop = stop
        self._runner, self._source, self._start, self._into = runner, source, start, into
        self._at = start
        source.copies.append(self)

    @property
    def ended(self) -> bool:
        return self._at >= self.stop

    def advance(self, seconds: float) -> bool:
        while self._at < self.stop:
            n = min(-(-(self.stop - self._start) // PIECES), self.stop - self._at)
            self._runner._sleep(n * self._runner.costs.copy)
            piece = self._source.hashes[self._at : self._at + n]
            if isinstance(self._into, HostCells):
                values = torch.tensor([NOT_FINITE if h is None else h for h in piece])
                first = self._at - self._start
                for tensor in self._into.tensors:
                    tensor.view(torch.int64)[0, first : first + n, 0] = values
            else:
                self._into.extend(piece)
            self._at += n
            seconds -= n * self._runner.costs.copy
            if seconds <= 0:
                break
        if self._at < self.stop:
            return False
        self._source.copies.remove(self)
        return True


def _hashes_in(cells: HostCells) -> list[int | None]:
    values = cells.tensors[0].view(torch.int64)[0, :, 0].tolist()
    return [None if value == NOT_FINITE else value for value in values]
