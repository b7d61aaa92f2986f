"""The order of copies on streams: whatever the lanes and their threads do first and last, a copy has what its
source held when it was begun, and steps wait for none (the device here is late on purpose)."""

import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.gpu.arena import Arenas
from regrow.gpu.copies import as_cells
from regrow.gpu.stream_lanes import BUFFERED, COPYING, FLYING, StreamLanes, batches, packed_bytes
from regrow.gpu.types import CellCopy, Snapshot, StateCopy
from tests.gpu.kernels.on_cpu import needs_compiler
from tests.gpu.late_streams import LateStreams, LateWorker
from tests.gpu.test_lanes import GEOMETRY

CONTEXT, SLOTS, BUFFER = 60, 4, 512

pytestmark = needs_compiler


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values)


class Desk:
    """A late device, and what each of its tensors would hold had everything been done at once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.streams = LateStreams(seed)
        self.workers = {lane: LateWorker() for lane in COPYING}
        self.lanes = StreamLanes(self.streams, self.workers, BUFFER)
        self.arenas, self.model = (Arenas(GEOMETRY, SLOTS, CONTEXT, torch.device("cpu")) for _ in range(2))
        self.copies: list[tuple[CellCopy, set[int]]] = []  # with the slots they touch
        self.parked: list[tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]] = []
        self.taken: list[tuple[StateCopy, list[torch.Tensor]]] = []
        for slot in range(SLOTS):
            self.compute(slot)

    def compute(self, slot: int) -> None:
        """What a chunk does: write cells and the running state."""
        mine, theirs = (
            [*arenas.span(slot, 0, CONTEXT), *arenas.states(slot)] for arenas in (self.arenas, self.model)
        )
        for tensor, copy in zip(mine, theirs, strict=True):
            copy.copy_(torch.randn(copy.shape, generator=self.numbers) * 100)
            self.streams.give("compute", partial(write, tensor, copy.clone()))

    def mount(self, source: int, slot: int) -> None:
        n = self.random.randint(1, CONTEXT)
        pairs = zip(self.arenas.span(slot, 0, n), self.arenas.span(source, 0, n), strict=True)
        self.copies.append((self.lanes.mount(pairs, anew=False), {source, slot}))
        for to, origin in zip(self.model.span(slot, 0, n), self.model.span(source, 0, n), strict=True):
            to.copy_(origin)

    def park(self, slot: int) -> None:
        a, b = sorted(self.random.sample(range(CONTEXT + 1), 2))
        host, copy = self.lanes.park(self.arenas.span(slot, a, b))
        self.copies.append((copy, {slot}))
        self.parked.append((host, [view.clone() for view in self.model.span(slot, a, b)]))

    def restore(self, slot: int) -> None:
        n = self.random.randint(1, CONTEXT)
        host = [torch.randn(view.shape).to(view.dtype) for view in self.model.span(slot, 0, n)]
        state = [torch.randn(view.shape).to(view.dtype) for view in self.model.states(slot)]
        cells = self.lanes.restore(zip(self.arenas.span(slot, 0, n), host, strict=True), anew=False)
        rows = zip(as_cells(self.arenas.states(slot)), as_cells(state), strict=True)
        self.copies += [(cells, {slot}), (self.lanes.restore(rows, anew=False), {slot})]
        for to, origin in zip(
            [*self.model.span(slot, 0, n), *self.model.states(slot)], [*host, *state], strict=True
        ):
            to.copy_(origin)

    def snapshot(self, slot: int) -> None:
        copy = self.lanes.snapshot(7, self.arenas.states(slot))
        self.taken.append((copy, [state.clone() for state in self.model.states(slot)]))

    def free(self) -> list[int]:
        """The slots that no copy touches, in any order."""
        self.copies = [(copy, slots) for copy, slots in self.copies if not copy.advance(0.0)]
        free = set(range(SLOTS)).difference(*(slots for _, slots in self.copies))
        return self.random.sample(sorted(free), len(free))

    def go_on(self) -> None:
        """Let something happen, somewhere."""
        for _ in range(self.random.randint(0, 12)):
            self.streams.turn()
        self.random.choice(list(self.workers.values())).work()

    def finish(self) -> None:
        for worker in self.workers.values():
            while worker.work():
                pass
        self.streams.finish()

    def check(self) -> None:
        assert all(copy.ended and copy.advance(0.0) for copy, _ in self.copies)
        for ours, theirs in ((self.arenas.cells, self.model.cells), (self.arenas.rest, self.model.rest)):
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)  # type: ignore[index]
        for host, wanted in self.parked:
            assert all(torch.equal(a, b) for a, b in zip(host, wanted, strict=True))
        for copy, wanted in self.taken:
            assert isinstance(copy.snapshot, Snapshot)
            assert all(torch.equal(a, b) for a, b in zip(copy.snapshot.states, wanted, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(5, 40))
def test_copies_have_what_their_source_held_in_whatever_order_the_lanes_work(seed: int, steps: int) -> None:
    desk = Desk(seed)
    for _ in range(steps):
        free = desk.free()
        what = desk.random.choice(["compute", "mount", "park", "restore", "snapshot", "snapshot", "wait"])
        if what == "mount" and len(free) >= 2:
            desk.mount(free[0], free[1])
        elif what in ("compute", "park", "restore", "snapshot") and free:
            getattr(desk, what)(free[0])
        desk.go_on()
    desk.finish()
    desk.check()


def test_a_step_waits_for_no_copy() -> None:
    desk = Desk(1)
    desk.finish()
    desk.park(0)
    desk.restore(1)
    desk.mount(2, 3)
    desk.snapshot(0)
    step = desk.streams.mark("compute")
    while desk.streams._work["compute"]:
        assert desk.streams.turn_of("compute"), "the compute stream waits for another one"
    assert step.reached
    assert not any(copy.ended for copy, _ in desk.copies)
    desk.finish()
    desk.check()


def test_page_locked_memory_is_reserved_once_and_counted() -> None:
    desk = Desk(3)
    assert desk.lanes.held == len(BUFFERED) * FLYING * BUFFER
    buffers = [buffer for lane in BUFFERED for buffer in desk.lanes._buffers[lane]]
    assert len({buffer.data_ptr() for buffer in buffers}) == len(buffers)
    assert sum(buffer.nbytes for buffer in buffers) == desk.lanes.held


def test_what_goes_wrong_on_a_lane_is_raised_where_the_copy_is_looked_after() -> None:
    desk = Desk(4)
    target, source = torch.zeros(1, 2, 3), torch.zeros(1, 2, 4)
    copy = desk.lanes.restore([(target, source)], anew=False)
    assert not copy.advance(math.inf)
    desk.finish()
    assert copy.ended
    with pytest.raises(ValueError, match="is not"):
        copy.advance(0.0)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 90), st.integers(1, 9)), max_size=5))
def test_batches_hold_every_cell_once_and_fit_into_a_buffer(shapes: list[tuple[int, int, int]]) -> None:
    sources = [torch.arange(math.prod(shape)).view(shape) for shape in shapes]
    targets = [torch.full(shape, -1) for shape in shapes]
    for batch in batches(zip(targets, sources, strict=True), 1024):
        assert packed_bytes([source for _, source in batch]) <= 1024
        for target, source in batch:
            assert (target == -1).all()
            target.copy_(source)
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
