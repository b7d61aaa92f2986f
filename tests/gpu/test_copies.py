"""Copies of cells with real models: bit for bit, into a slot full of something else, from one that decodes.
All arenas hold NaN first."""

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from regrow.gpu import copies
from regrow.gpu.copies import TURN_S, PieceCopy, batches, pieces
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, HostCells, Snapshot
from regrow.gpu.verify import differing_parts
from regrow.policy.keys import Keys, as_keys
from tests.gpu.drive import DTYPES, Answer, answer, finish, fresh_runner, plan_of, poison, prompt, read, row

HYBRID, ATTENTION = "qwen3_5", "llama"
ENDS = (37, 100)
N = 131
IDS, PLAN = prompt(N), plan_of(N, ENDS)
MODELS = [pytest.param(f, d, id=f"{f}-{name}") for f in (ATTENTION, HYBRID) for name, d in DTYPES.items()]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece is a batch of its own."""
    monkeypatch.setattr(copies, "batches", lambda pieces, limit: ([piece] for piece in pieces))


def straight(runner: ModelRunner, slot: int) -> Answer:
    """The answer to `IDS` with nothing reused; all arenas are poison again afterwards."""
    read(runner, slot, IDS, PLAN)
    wanted = answer(runner, slot, IDS, 3)
    runner.reset()
    poison(runner)
    return wanted


def save(runner: ModelRunner, slot: int, *edges: int) -> list[HostCells]:
    """The cells between each two of `edges`."""
    saved = [runner.save_cells(slot, a, b) for a, b in pairwise(edges)]
    for _, copy in saved:
        finish(copy)
    return [cells for cells, _ in saved]


def resume(runner: ModelRunner, slot: int, cut: int, state: Snapshot) -> Answer:
    """Go on from the `cut` cells of `IDS` that a copy has put into `slot`."""
    runner.filled(slot, cut)
    runner.mount(slot, cut, state)
    read(runner, slot, IDS, PLAN, cut)
    return answer(runner, slot, IDS, 3)


class Decoding:
    """A slot that holds the first 100 keys of `IDS`, others after them, and decodes on."""

    def __init__(self, runner: ModelRunner, slot: int) -> None:
        self._runner, self._slot, self._token = runner, slot, 0
        ids = as_keys([*IDS[:100], *prompt(60, 9)])
        self.states = read(runner, slot, ids, plan_of(len(ids), ENDS))
        runner.join(slot)

    def step(self) -> None:
        self._token += 1
        self._runner.decode([row(self._runner, self._slot, self._token)])
        self._runner.commit(self._slot, 1)


@pytest.mark.parametrize(("family", "dtype"), MODELS)
@pytest.mark.parametrize("cut", [37, 64, 100])
def test_a_dirty_slot_goes_on_exactly_from_what_was_copied_out_of_a_decoding_one(
    family: str, dtype: torch.dtype, cut: int
) -> None:
    runner = fresh_runner(family, dtype)
    wanted = straight(runner, 3)
    donor = Decoding(runner, 1)
    runner.read(Chunk(3, 0, prompt(120, 8)))
    steps = finish(runner.copy_cells(1, 3, cut), donor.step)
    assert steps == len(runner.geometry.cells)
    runner.leave(1)
    assert resume(runner, 3, cut, donor.states[cut]).same_as(wanted)


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_a_donor_answers_as_if_nothing_had_been_copied_from_it(family: str, dtype: torch.dtype) -> None:
    runner = fresh_runner(family, dtype)
    digests = []
    for copying in (False, True):
        runner.reset()
        poison(runner)
        donor = Decoding(runner, 1)
        if copying:
            finish(runner.copy_cells(1, 3, 100), donor.step)
            _, saving = runner.save_cells(1, 37, 100)
            finish(saving, donor.step)
        else:
            for _ in range(2 * (len(runner.geometry.cells) - 1)):
                donor.step()
        digests.append(runner.digest(1))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_a_dirty_slot_goes_on_exactly_from_what_was_parked_in_host_memory(
    family: str, dtype: torch.dtype
) -> None:
    runner = fresh_runner(family, dtype)
    wanted = straight(runner, 2)
    donor = Decoding(runner, 1)
    saved = [runner.save_cells(1, a, b) for a, b in ((0, 37), (37, 100))]
    for _, copy in saved:
        finish(copy, donor.step)
    runner.empty(1)
    runner.read(Chunk(1, 0, prompt(120, 8)))
    for cut in (37, 64, 100):
        runner.empty(2)
        runner.read(Chunk(2, 0, prompt(120, cut)))
        cells = [part.upto(min(part.stop, cut)) for part, _ in saved if part.start < cut]
        finish(runner.load_cells(2, cells))
        assert resume(runner, 2, cut, donor.states[cut]).same_as(wanted), cut


@pytest.mark.parametrize("family", [ATTENTION, HYBRID])
def test_cells_survive_any_number_of_round_trips(family: str) -> None:
    runner = fresh_runner(family)
    states = read(runner, 0, IDS[:101], plan_of(101, ENDS))
    runner.mount(0, 100, states[100])
    before = runner.digest(0)
    cells = save(runner, 0, 0, 100)
    for slot in (1, 2, 3):
        finish(runner.load_cells(slot, cells))
        runner.filled(slot, 100)
        runner.mount(slot, 100, states[100])
        assert runner.digest(slot) == before
        cells = save(runner, slot, 0, 11, 64, 100)


@pytest.mark.parametrize("family", [ATTENTION, HYBRID])
def test_case_13_what_was_parked_is_not_changed_by_whoever_uses_it(family: str) -> None:
    runner = fresh_runner(family)
    states = read(runner, 0, IDS, PLAN)
    cells = save(runner, 0, 0, 64)
    before = [tensor.clone() for tensor in cells[0].tensors]
    kept = [state.clone() for state in states[64].states]
    runner.empty(0)
    for slot, others in ((0, prompt(90, 3)), (1, prompt(90, 4)), (0, IDS[64:])):
        finish(runner.load_cells(slot, cells))
        runner.filled(slot, 64)
        runner.mount(slot, 64, states[64])
        read(runner, slot, as_keys([*IDS[:64], *others]), plan_of(64 + len(others)), 64)
        assert all(torch.equal(a, b) for a, b in zip(cells[0].tensors, before, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(states[64].states, kept, strict=True))


def test_host_cells_weigh_what_the_geometry_says() -> None:
    runner = fresh_runner(HYBRID)
    read(runner, 0, IDS, PLAN)
    (cells,) = save(runner, 0, 37, 100)
    assert cells.nbytes == 63 * runner.geometry.bytes_per_token
    part = cells.upto(50)
    assert (part.start, part.stop) == (37, 50)
    assert part.nbytes == 13 * runner.geometry.bytes_per_token
    assert all(torch.equal(a, b[:, :13]) for a, b in zip(part.tensors, cells.tensors, strict=True))


@pytest.mark.parametrize("family", [ATTENTION, HYBRID])
def test_a_slot_that_is_being_filled_is_empty_and_is_not_read_before_it_is_mounted(family: str) -> None:
    runner = fresh_runner(family)
    states = read(runner, 0, IDS, PLAN)
    read(runner, 1, prompt(90), plan_of(90))
    copy = runner.copy_cells(0, 1, 100)
    assert runner.length(1) == 0
    finish(copy)
    assert runner.length(1) == 0
    runner.filled(1, 100)
    with pytest.raises(ValueError, match="lost its running state"):
        runner.read(Chunk(1, 100, IDS[100:]))
    runner.mount(1, 100, states[100])
    runner.read(Chunk(1, 100, IDS[100:]))


def test_r4_a_state_that_is_loaded_is_there_once_it_is_mounted_and_not_before() -> None:
    runner = fresh_runner(HYBRID)
    wanted = straight(runner, 3)
    states = read(runner, 0, IDS, PLAN)
    finish(runner.copy_cells(0, 1, 100))
    finish(runner.load_state(1, states[100]))
    runner.filled(1, 100)
    with pytest.raises(ValueError, match="lost its running state"):
        runner.read(Chunk(1, 100, IDS[100:]))
    assert resume(runner, 1, 100, states[100]).same_as(wanted)


def test_r4_a_state_that_was_loaded_into_a_slot_is_forgotten_with_what_else_it_held() -> None:
    runner = fresh_runner(HYBRID)
    wanted = straight(runner, 3)
    states = read(runner, 0, IDS, PLAN)
    finish(runner.copy_cells(0, 1, 100))
    finish(runner.load_state(1, states[100]))
    runner.empty(1)
    read(runner, 1, prompt(90, 3), plan_of(90))
    finish(runner.copy_cells(0, 1, 100))
    assert resume(runner, 1, 100, states[100]).same_as(wanted)


def test_s5_a_state_of_another_model_is_not_loaded() -> None:
    runner = fresh_runner(HYBRID)
    states = read(runner, 0, IDS, PLAN)
    before = runner.digest(0)
    with pytest.raises(ValueError, match="of another model"):
        runner.load_state(0, Snapshot(100, states[100].states[1:]))
    assert runner.digest(0) == before
    runner.join(0)
    with pytest.raises(ValueError, match="is joined"):
        runner.load_state(0, states[100])
    runner.leave(0)


def test_r4_filled_cells_are_not_used_without_their_running_state() -> None:
    runner = fresh_runner(HYBRID)
    states = read(runner, 0, IDS, PLAN)
    finish(runner.copy_cells(0, 1, 100))
    runner.filled(1, 100)
    for state in (None, states[64]):
        with pytest.raises(ValueError, match="no state at 100"):
            runner.mount(1, 100, state)


def test_s5_a_copy_that_cannot_be_is_refused_before_it_touches_anything() -> None:
    runner = fresh_runner(ATTENTION)
    read(runner, 0, IDS, PLAN)
    (first, second) = save(runner, 0, 0, 64, 100)
    read(runner, 1, prompt(90), plan_of(90))
    before = runner.digest(1)
    beyond = HostCells(64, runner.context + 1, ())
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: runner.copy_cells(0, 1, N + 1), "does not reach"),
        (lambda: runner.load_cells(1, [second]), "gaps"),
        (lambda: runner.load_cells(1, [first, first]), "gaps"),
        (lambda: runner.load_cells(1, [first, beyond]), "no room"),
        (lambda: runner.save_cells(1, 0, 91), "holds no cells"),
        (lambda: runner.save_cells(1, 5, 5), "holds no cells"),
        (lambda: runner.save_cells(1, -1, 5), "holds no cells"),
    ]
    for refused, reason in refusals:
        with pytest.raises(ValueError, match=reason):
            refused()
    assert runner.digest(1) == before
    runner.join(1)
    for filling in (lambda: runner.copy_cells(0, 1, 64), lambda: runner.load_cells(1, [first])):
        with pytest.raises(ValueError, match="is joined"):
            filling()
    runner.leave(1)
    assert runner.digest(1) == before


def pairs(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(1, 3, 1), torch.full((1, 3, 1), 1.0 + i)) for i in range(n)]


def copied(tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    return [torch.equal(target, source) for target, source in tensors]


def test_a_copy_goes_on_piece_by_piece_in_order() -> None:
    tensors = pairs(3)
    copy = PieceCopy(tensors, anew=True)
    assert copied(tensors) == [False, False, False]
    for n in (1, 2, 3):
        assert copy.advance(0.0) == (n == 3)
        assert copied(tensors) == [i < n for i in range(3)]


def test_a_long_span_has_more_pieces_not_longer_ones() -> None:
    target, source = torch.zeros(3, 1000, 8), torch.randn(3, 1000, 8)
    cut = list(pieces([(target, source)], limit=1000))
    assert max(piece.nbytes for piece, _ in cut) <= 1000
    assert len(cut) == 100  # cells of 96 bytes
    for piece, of in cut:
        piece.copy_(of)
    assert torch.equal(target, source)
    assert len(list(pieces([(target, source)], limit=1))) == 1000, "a cell at least"


def test_pieces_go_together_up_to_a_limit() -> None:
    tensors = pairs(7)
    alone = (torch.zeros(1, 9, 1), torch.zeros(1, 9, 1))
    batched = list(batches([*tensors[:5], alone, *tensors[5:]], limit=25))
    assert batched == [tensors[:2], tensors[2:4], tensors[4:5], [alone], tensors[5:]]
    assert list(batches([], limit=25)) == []


def test_a_copy_with_all_the_time_pauses_now_and_then_to_look_for_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(copies, "time", SimpleNamespace(perf_counter=lambda: next(clock) * TURN_S / 2))
    tensors = pairs(5)
    copy = PieceCopy(tensors, anew=True)
    assert not copy.advance(math.inf)
    assert copied(tensors) == [True, True, False, False, False]


def test_a_copy_with_time_enough_is_done_at_once_and_one_of_nothing_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    tensors = pairs(5)
    assert PieceCopy(tensors, anew=True).advance(math.inf)
    assert all(copied(tensors))
    assert PieceCopy([], anew=True).advance(0.0)


def chunks(cut: int) -> tuple[tuple[int, int], ...]:
    edges = [0, *(c for c in PLAN.cuts if c <= cut)]
    return tuple(pairwise(edges))


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_v2_what_was_mounted_equals_what_is_read_again_and_the_spare_slot_is_empty_afterwards(
    family: str, dtype: torch.dtype
) -> None:
    runner = fresh_runner(family, dtype)
    states = read(runner, 0, IDS, PLAN)
    finish(runner.copy_cells(0, 1, 100))
    runner.filled(1, 100)
    runner.mount(1, 100, states[100])
    assert differing_parts(runner, 3, 1, IDS[:100], chunks(100)) == ()
    assert runner.length(3) == 0


def spoil(runner: ModelRunner, slot: int, layer: int, name: str) -> None:
    runner.arenas.cells[layer, name][slot, 0, 50, 0] += 1


def mounted(runner: ModelRunner, keys: Keys = IDS) -> None:
    states = read(runner, 0, keys, PLAN)
    runner.mount(0, 100, states[100])


def test_v2_the_parts_that_differ_are_named() -> None:
    runner = fresh_runner(HYBRID)
    mounted(runner)
    spoil(runner, 0, 3, "v")
    runner.arenas.states(0)[1].view(-1)[3] += 1
    differing = differing_parts(runner, 3, 0, IDS[:100], chunks(100))
    assert differing == ("state.L0.recurrent0", "cells.L3.v")


def test_v2_other_keys_and_another_length_are_told() -> None:
    runner = fresh_runner(HYBRID)
    mounted(runner, as_keys([7, *IDS[1:]]))
    parts = {name for name, _ in runner.digest(0).parts}
    differing = differing_parts(runner, 3, 0, IDS[:100], chunks(100))
    assert {*differing, "state.L0.conv0"} == parts  # the first layer's convolution saw only the last keys
    assert differing_parts(runner, 3, 0, IDS[:64], chunks(64)) == ("length",)
