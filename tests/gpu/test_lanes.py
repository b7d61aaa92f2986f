"""Every way to copy keeps the same promises: between the steps, and on streams, those of a GPU included."""

import math
from collections.abc import Callable

import pytest
import torch

from regrow.gpu.arena import Arenas
from regrow.gpu.copies import as_cells
from regrow.gpu.lanes import Lanes, lanes_for
from regrow.gpu.stream_lanes import StreamLanes, cuda_workers
from regrow.gpu.types import CellCopy, CellSpec, Geometry, StateSpec
from tests.gpu.kernels.on_cpu import needs_compiler
from tests.gpu.late_streams import LateStreams

CONTEXT = 300
GEOMETRY = Geometry(
    cells=(
        CellSpec(0, "k", 2, 24, torch.bfloat16),
        CellSpec(0, "v", 2, 24, torch.bfloat16),
        CellSpec(2, "k", 3, 5, torch.float32),
        CellSpec(2, "positions", 1, 1, torch.int64),
    ),
    states=(
        StateSpec(1, "conv", 0, (7, 3), torch.bfloat16),
        StateSpec(1, "recurrent", 0, (2, 16, 16), torch.float32),
        StateSpec(3, "recurrent", 0, (), torch.int64),
    ),
)


def on_streams(_: torch.device) -> Lanes:
    return StreamLanes(LateStreams(0), cuda_workers(), buffer_bytes=4096)


WAYS = [
    pytest.param((lanes_for, "cpu"), id="pieces"),
    pytest.param((on_streams, "cpu"), id="streams", marks=needs_compiler),
    pytest.param(
        (lanes_for, "cuda"),
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


class Held:
    """Arenas full of noise and the lanes over them."""

    def __init__(self, make: Callable[..., Lanes], device: torch.device) -> None:
        self.arenas = Arenas(GEOMETRY, 3, CONTEXT, device)
        self.lanes = make(device)
        streams = getattr(self.lanes, "_streams", None)
        self.late = streams if isinstance(streams, LateStreams) else None
        generator = torch.Generator().manual_seed(1)
        for arena in (*self.arenas.cells.values(), *self.arenas.rest.values()):
            arena.copy_(torch.randn(arena.shape, generator=generator) * 100)

    def compute(self, work: Callable[[], object]) -> None:
        """Give the device something to do after what it has got."""
        if self.late is None:
            work()
        else:
            self.late.give("compute", work)

    def cells(self, slot: int, a: int = 0, b: int = CONTEXT) -> list[torch.Tensor]:
        return [view.cpu().clone() for view in self.arenas.span(slot, a, b)]

    def states(self, slot: int) -> list[torch.Tensor]:
        return [view.cpu().clone() for view in self.arenas.states(slot)]


@pytest.fixture(params=WAYS)
def held(request: pytest.FixtureRequest) -> Held:
    make, device = request.param
    return Held(make, torch.device(device))


def finish(copy: CellCopy) -> None:
    while not copy.advance(math.inf):
        pass
    assert copy.ended


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("stop", [1, 37, CONTEXT])
def test_a_prefix_is_mounted_from_another_slot_and_nothing_else_changes(held: Held, stop: int) -> None:
    donor, beyond, other = held.cells(0), held.cells(1, stop), held.cells(2)
    pairs = zip(held.arenas.span(1, 0, stop), held.arenas.span(0, 0, stop), strict=True)
    finish(held.lanes.mount(pairs, anew=False))
    assert same(held.cells(1, 0, stop), held.cells(0, 0, stop))
    assert same(held.cells(0), donor)
    assert same(held.cells(1, stop), beyond)
    assert same(held.cells(2), other)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (11, 250), (0, CONTEXT)])
def test_what_is_parked_is_restored_bit_for_bit(held: Held, start: int, stop: int) -> None:
    before = held.cells(0)
    host, copy = held.lanes.park(held.arenas.span(0, start, stop))
    finish(copy)
    assert same(held.cells(0), before)
    assert same(list(host), held.cells(0, start, stop))
    beside = held.cells(2, stop), held.cells(2, 0, start)
    finish(held.lanes.restore(zip(held.arenas.span(2, start, stop), host, strict=True), anew=False))
    assert same(held.cells(2, start, stop), list(host))
    assert same(held.cells(2, stop), beside[0])
    assert same(held.cells(2, 0, start), beside[1])


def test_b1_what_is_parked_weighs_the_bytes_of_its_cells_and_owns_them(held: Held) -> None:
    host, copy = held.lanes.park(held.arenas.span(0, 3, 100))
    finish(copy)
    assert sum(tensor.nbytes for tensor in host) == 97 * GEOMETRY.bytes_per_token
    assert sum(tensor.untyped_storage().nbytes() for tensor in host) == 97 * GEOMETRY.bytes_per_token
    assert all(tensor.device.type == "cpu" for tensor in host)
    held.arenas.span(0, 0, CONTEXT)[0].zero_()
    assert not same([host[0]], [torch.zeros_like(host[0])])


def test_a_snapshot_is_of_the_moment_it_was_begun_at(held: Held) -> None:
    before = held.states(0)
    copy = held.lanes.snapshot(77, held.arenas.states(0))
    for state in held.arenas.states(0):
        held.compute(state.zero_)  # what is read next
    finish(copy)
    assert copy.snapshot is not None
    assert copy.snapshot.position == 77
    assert copy.snapshot.nbytes == GEOMETRY.bytes_per_checkpoint
    assert same(list(copy.snapshot.states), before)


def test_a_state_is_restored_bit_for_bit(held: Held) -> None:
    copy = held.lanes.snapshot(77, held.arenas.states(0))
    finish(copy)
    assert copy.snapshot is not None
    rows = as_cells(held.arenas.states(2)), as_cells(copy.snapshot.states)
    finish(held.lanes.restore(zip(*rows, strict=True), anew=True))
    assert same(held.states(2), held.states(0))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_state_that_is_not_finite_becomes_no_snapshot(held: Held, number: float) -> None:
    held.arenas.states(0)[1].view(-1)[100] = number
    copy = held.lanes.snapshot(77, held.arenas.states(0))
    finish(copy)
    assert copy.snapshot is None


def test_a_copy_of_nothing_has_ended(held: Held) -> None:
    finish(held.lanes.mount([], anew=False))
    finish(held.lanes.restore([], anew=False))
    host, copy = held.lanes.park([])
    finish(copy)
    assert host == ()
