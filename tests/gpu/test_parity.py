"""Parity: in float32 the engine's logits are those of `transformers` within 1e-4, step by step."""

import pytest
import torch

from regrow.gpu.arena import Arenas
from regrow.gpu.types import Chunk
from tests.gpu.drive import FAMILIES, THOROUGH, follow, fresh_runner, plan_of, prompt, read, row, stock

STEPS = 64
TOLERANCE = 1e-4
LONG = 150  # three chunks of 64, and beyond every window and indexer budget
ENDS = (37, 147)


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_worth_comparing_with(family: str) -> None:
    for n, seed in ((LONG, 0), (87, 1), (33, 2)):
        fed, _ = stock(family, n, seed, STEPS)
        assert len(set(fed)) >= 20


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_read_in_one_chunk_alone(family: str) -> None:
    runner = fresh_runner(family)
    fed, wanted = stock(family, LONG, 0, STEPS)
    runner.read(Chunk(0, 0, prompt(LONG)[:-1]))
    assert off_by(follow(runner, 0, fed), wanted) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_read_in_chunks(family: str) -> None:
    runner = fresh_runner(family)
    fed, wanted = stock(family, LONG, 0, STEPS)
    read(runner, 3, prompt(LONG), plan_of(LONG, ENDS))
    assert off_by(follow(runner, 3, fed), wanted) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_three_rows_of_different_lengths(family: str) -> None:
    runner = fresh_runner(family)
    cases = {slot: stock(family, n, slot, STEPS) for slot, n in enumerate((LONG, 87, 33))}
    for slot, n in enumerate((LONG, 87, 33)):
        read(runner, slot, prompt(n, slot), plan_of(n))
        runner.join(slot)
    for i in range(STEPS + 1):
        logits = runner.decode([row(runner, slot, fed[i]) for slot, (fed, _) in cases.items()])
        for slot, (_, wanted) in cases.items():
            assert off_by(logits[slot], wanted[i]) < TOLERANCE
            runner.commit(slot, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_from_every_checkpoint(family: str) -> None:
    runner = fresh_runner(family)
    fed, wanted = stock(family, LONG, 0, STEPS)
    steps = STEPS if family in THOROUGH else 16
    ids, plan = prompt(LONG), plan_of(LONG, ENDS)
    kept = read(runner, 1, ids, plan)
    assert tuple(kept) == plan.cuts == (37, 64, 128, 147)
    for cut in reversed(plan.cuts):
        runner.mount(1, cut, kept[cut])
        read(runner, 1, ids, plan, cut)
        assert off_by(follow(runner, 1, fed[:steps]), wanted[:steps]) < TOLERANCE, cut
        runner.leave(1)


@pytest.mark.parametrize("left", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_with_few_tokens_left(family: str, left: int) -> None:
    runner = fresh_runner(family)
    fed, wanted = stock(family, 33, 2, STEPS)
    ids, plan = prompt(33, 2), plan_of(33, (33 - left,))
    kept = read(runner, 2, ids, plan)
    runner.mount(2, 33 - left, kept[33 - left])
    read(runner, 2, ids, plan, 33 - left)
    assert off_by(follow(runner, 2, fed[:8]), wanted[:8]) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_one_token_is_read_as_a_fresh_chunk(family: str) -> None:
    runner = fresh_runner(family)
    fed, wanted = stock(family, 1, 0, 16)
    first = runner.read(Chunk(0, 0, prompt(1), want_logits="last")).logits
    assert first is not None
    assert off_by(first, wanted[0]) < TOLERANCE
    assert off_by(follow(runner, 0, fed[1:]), wanted[1:]) < TOLERANCE


def _parts(arenas: Arenas) -> dict[str, torch.Tensor]:
    cells = {f"cells of layer {layer}, {name}": arena for (layer, name), arena in arenas.cells.items()}
    states = {
        f"{kind} state {index} of layer {layer}": arena for (layer, kind, index), arena in arenas.rest.items()
    }
    return cells | states


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_fails_when_any_one_part_is_zeroed_at_the_resume(family: str) -> None:
    runner = fresh_runner(family)
    fed, wanted = stock(family, LONG, 0, STEPS)
    ids, cut = (
        prompt(LONG),
        LONG - 1,
    )  # the last cut: a short state of a last layer is forgotten a token later
    kept = read(runner, 0, ids, plan_of(LONG, (cut,)))
    cells = [arena[0].clone() for arena in runner.arenas.cells.values()]
    parts = _parts(runner.arenas)
    assert len(parts) == len(runner.geometry.cells) + len(runner.geometry.states)
    for name, arena in parts.items():
        for view, saved in zip(runner.arenas.cells.values(), cells, strict=True):
            view[0].copy_(saved)
        runner.mount(0, cut, kept[cut])
        arena[0].zero_()
        assert off_by(follow(runner, 0, fed[:8]), wanted[:8]) > 100 * TOLERANCE, name
        runner.leave(0)


@pytest.mark.parametrize(
    ("family", "cells", "states"),
    [
        ("qwen3_5", {"k", "v"}, {("conv", 0), ("recurrent", 0)}),
        ("lfm2", {"k", "v"}, {("conv", 0)}),
        (
            "qwen4_exp",
            {"k", "v", "indexer", "positions"},
            {("conv", 0), ("conv", 1), ("conv", 2), ("recurrent", 0)},
        ),
        ("kimi_linear", {"k", "v"}, {("conv", 0), ("recurrent", 0)}),
    ],
)
def test_what_a_family_keeps(family: str, cells: set[str], states: set[tuple[str, int]]) -> None:
    geometry = fresh_runner(family).geometry
    assert {cell.name for cell in geometry.cells} == cells
    assert {(state.kind, state.index) for state in geometry.states} == states
