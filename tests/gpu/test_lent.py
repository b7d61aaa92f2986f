"""Cells that are lent are as good as copied ones, whatever happens at either end before they are there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.gpu.copies import Ended
from regrow.gpu.fast.prepare import prepare
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import CellCopy, Chunk, HostCells
from regrow.models.random_models import build_random
from tests.gpu.drive import SLOTS, finish, fresh_runner, prompt, row

CONTEXT = 700  # more than a few blocks of attention
OPERATIONS = (
    "read",
    "read in parts",
    "mount",
    "mount from the host",
    "cut",
    "join",
    "step",
    "leave",
    "empty",
    "idle",
)
Operation = tuple[str, int, int, float]  # what, a slot, another, a share


@cache
def _runner(family: str, kind: str) -> ModelRunner:
    model = build_random(family, "tiny", torch.bfloat16).requires_grad_(False).eval()
    if kind == "native":
        prepare(model, "int8", {})
    return ModelRunner(model, SLOTS, CONTEXT, "cache")


def lending_runner(family: str = "llama", kind: str = "native") -> ModelRunner:
    """A runner that lends, with memory for all its slots; stock layers have the cells copied to them."""
    runner = _runner(family, kind)
    if kind == "native" and not runner._lends:
        pytest.skip("no native layer takes long chunks here")
    runner._lends = True
    runner.reset()
    for slot in range(SLOTS):
        runner._memory.given(slot, CONTEXT)
    return runner


@dataclass
class Driven:
    """A runner that is told operations; notes all logits. lend: whether mounts may lend."""

    runner: ModelRunner
    lend: bool
    joined: set[int] = field(default_factory=set)
    told: list[torch.Tensor] = field(default_factory=list)
    lent: int = 0

    def __call__(self, operation: Operation) -> None:
        what, slot, other, share = operation
        length = self.runner.length(slot)
        part = max(1, int(share * length))
        match what:
            case "step":
                self.step()
            case "idle":
                self.runner.foresee()
            case "leave" if slot in self.joined:
                self.runner.leave(slot)
                self.joined.remove(slot)
            case "empty":
                self.runner.empty(slot)
                self.joined.discard(slot)
            case "mount" if length and other != slot and other not in self.joined:
                self.mounted(other, part, self.runner.copy_cells(slot, other, part, lend=self.lend))
            case "mount from the host" if length and other not in self.joined:
                edges = sorted({0, part // 3, part // 2, part})
                cells = [self.saved(slot, a, b) for a, b in pairwise(edges)]
                self.mounted(other, part, self.runner.load_cells(other, cells, lend=self.lend))
            case "cut" if length and slot not in self.joined:
                self.runner.mount(slot, part, None)
            case "join" if length and slot not in self.joined:
                self.runner.join(slot)
                self.joined.add(slot)
            case "read" | "read in parts" if slot not in self.joined and length < CONTEXT - 60:
                n = 1 + int(share * (CONTEXT - 60 - length))
                chunk = Chunk(slot, length, prompt(n, slot), want_logits="last")
                between = self.step if what == "read in parts" else None
                logits = self.runner.read(chunk, between).logits
                assert logits is not None
                self.told.append(logits)

    def mounted(self, slot: int, length: int, copy: CellCopy) -> None:
        self.lent += isinstance(copy, Ended)
        finish(copy)
        self.runner.filled(slot, length)
        self.runner.mount(slot, length, None)

    def saved(self, slot: int, a: int, b: int) -> HostCells:
        cells, copy = self.runner.save_cells(slot, a, b)
        finish(copy)
        return cells

    def step(self) -> None:
        full = {slot for slot in self.joined if self.runner.length(slot) >= CONTEXT}
        if self.joined and not full:
            self.told.append(self.runner.decode([row(self.runner, slot, 7) for slot in sorted(self.joined)]))
            for slot in self.joined:
                self.runner.commit(slot, 1)


def outcome(
    runner: ModelRunner, lend: bool, operations: Sequence[Operation]
) -> tuple[list[torch.Tensor], list[str], int]:
    with torch.inference_mode():
        driven = Driven(runner, lend)
        for operation in operations:
            driven(operation)
        digests = [runner.digest(slot).value for slot in range(SLOTS)]
    return driven.told, digests, driven.lent


SLOT = st.integers(0, SLOTS - 1)
OPERATION = st.tuples(st.sampled_from(OPERATIONS), SLOT, SLOT, st.floats(0.0, 1.0))
BEGIN: list[Operation] = [("read", 0, 0, 0.9), ("read", 1, 0, 0.4)]


@pytest.mark.parametrize(("family", "kind"), [("llama", "native"), ("mistral", "native"), ("llama", "stock")])
@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATION, max_size=16))
def test_whatever_happens_the_bits_are_those_of_copies(
    family: str, kind: str, operations: list[Operation]
) -> None:
    told, digests, _ = outcome(lending_runner(family, kind), False, BEGIN + operations)
    found, lent, _ = outcome(lending_runner(family, kind), True, BEGIN + operations)
    assert lent == digests
    assert all(torch.equal(a, b) for a, b in zip(found, told, strict=True))


LENT: Operation = ("mount", 0, 2, 0.8)
BEFORE: dict[str, list[Operation]] = {
    "nothing": [],
    "the lender is emptied and read anew": [("empty", 0, 0, 0), ("read", 0, 0, 0.5)],
    "the lender is cut and reads on": [("cut", 0, 0, 0.3), ("read", 0, 0, 0.5)],
    "the lender is cut and decodes": [("cut", 0, 0, 0.3), ("join", 0, 0, 0), ("step", 0, 0, 0)],
    "the lender is filled from elsewhere": [("mount", 1, 0, 1.0), ("read", 0, 0, 0.2)],
    "the lender is filled from the host": [("mount from the host", 1, 0, 1.0)],
    "a lender of little is filled with more": [
        ("mount", 0, 3, 0.2),
        ("mount", 1, 0, 1.0),
        ("read", 0, 0, 0.2),
        ("read", 3, 0, 0.1),
    ],
    "it is lent on": [("mount", 2, 3, 0.7), ("read", 3, 0, 0.2)],
    "it is saved": [("mount from the host", 2, 3, 0.7), ("read", 3, 0, 0.2)],
    "it is cut": [("cut", 2, 0, 0.5)],
    "it decodes": [("join", 2, 0, 0), ("step", 2, 0, 0), ("leave", 2, 0, 0)],
    "it is filled again": [("mount", 1, 2, 0.5)],
    "there is nothing else to do": [("idle", 0, 0, 0)] * 40,
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("how", ["mount", "mount from the host"])
@pytest.mark.parametrize("kind", ["native", "stock"])
def test_before_the_slot_reads(kind: str, how: str, before: str) -> None:
    operations = [*BEGIN, (how, *LENT[1:]), *BEFORE[before], ("read in parts", 2, 0, 0.2)]
    told, digests, none = outcome(lending_runner("llama", kind), False, operations)
    found, lent, some = outcome(lending_runner("llama", kind), True, operations)
    assert none == 0 < some
    assert lent == digests
    assert all(torch.equal(a, b) for a, b in zip(found, told, strict=True))


def holding(runner: ModelRunner) -> list[HostCells]:
    """Let slot 0 hold 300 cells; return a copy of them."""
    runner.read(Chunk(0, 0, prompt(300)))
    cells, copy = runner.save_cells(0, 0, 300)
    finish(copy)
    return [cells]


@torch.inference_mode()
def test_a_slot_that_was_never_used_and_one_that_does_not_read_next_get_a_copy() -> None:
    runner = lending_runner()
    cells = holding(runner)
    runner._memory._cells[1] = 299
    ways: list[Callable[[int, bool], object]] = [
        lambda slot, lend: runner.copy_cells(0, slot, 300, lend=lend),
        lambda slot, lend: runner.load_cells(slot, cells, lend=lend),
    ]
    for way in ways:
        assert not isinstance(way(1, True), Ended)
        assert not isinstance(way(2, False), Ended)
        assert isinstance(way(2, True), Ended)


@torch.inference_mode()
def test_an_idle_device_copies_what_is_lent() -> None:
    runner = lending_runner()
    runner.copy_cells(holding(runner)[0].start, 1, 300, lend=True)
    runner.filled(1, 300)
    while runner.foresee():
        pass
    assert not runner._lent
    pairs = zip(runner.arenas.span(0, 0, 300), runner.arenas.span(1, 0, 300), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@torch.inference_mode()
@pytest.mark.parametrize("read", [False, True])
def test_what_was_lent_is_let_go_once_it_is_read_or_the_slot_is_emptied(read: bool) -> None:
    runner = lending_runner()
    runner.load_cells(1, holding(runner), lend=True)
    if read:
        runner.filled(1, 300)
        runner.mount(1, 300, None)
        runner.read(Chunk(1, 300, prompt(3)))
    else:
        runner.empty(1)
    assert not runner._lent


def test_models_whose_layers_cannot_pass_cells_on_do_not_lend() -> None:
    assert not fresh_runner("qwen3_5")._lends
    assert not fresh_runner("llama", torch.bfloat16)._lends
