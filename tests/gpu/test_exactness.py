"""Exactness in mode "full" (V1, V3 within a slot): tokens, logits and digests equal bit for bit, however a
position was reached and whatever the other slots do. All arenas hold NaN first."""

from collections.abc import Iterator

import pytest
import torch

from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, Row
from regrow.models.random_models import build_random
from regrow.policy.keys import as_keys
from tests.gpu.drive import (
    DTYPES,
    FAMILIES,
    SLOTS,
    THOROUGH,
    Answer,
    answer,
    fresh_runner,
    plan_of,
    poison,
    prompt,
    read,
    row,
)

ENDS = (37, 100)
SWEEP = tuple(edge + more for edge in (37, 64, 100, 128) for more in range(4))
BRIEF = {torch.float32: (64, 131), torch.bfloat16: (66, 129)}
MODELS = [pytest.param(f, d, id=f"{f}-{name}") for f in FAMILIES for name, d in DTYPES.items()]
FEWER = [model for model in MODELS if model.values[0] in THOROUGH or model.values[1] is torch.float32]


def straight(runner: ModelRunner, slot: int, n: int, steps: int = 3, ends: tuple[int, ...] = ENDS) -> Answer:
    """The answer to `prompt(n)` with nothing reused and nothing else going on."""
    runner.reset()
    poison(runner)
    read(runner, slot, prompt(n), plan_of(n, ends))
    return answer(runner, slot, prompt(n), steps)


class Neighbours:
    """Three slots that live on between the calls of the one under test: 0, far longer, decodes; 1 comes and
    goes; 3 reads."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        for slot, n in ((0, 300), (1, 20)):
            read(runner, slot, prompt(n, 7), plan_of(n))
        runner.join(0)
        self._to_read: Iterator[int] = iter(range(0, 240, 20))
        self._turn = 0

    def rows(self) -> list[Row]:
        """Rows 0 and, every other time, 1, for the next step; slot 3 reads on."""
        self.read_on()
        self._turn += 1
        if self._turn % 2:
            self._runner.join(1)
            return [row(self._runner, 0, self._turn), row(self._runner, 1, 2 * self._turn)]
        if self._turn > 1:
            self._runner.leave(1)
        return [row(self._runner, 0, self._turn)]

    def step(self) -> None:
        rows = self.rows()
        self._runner.decode(rows)
        for fed in rows:
            self._runner.commit(fed.slot, 1)

    def read_on(self) -> None:
        start = next(self._to_read, None)
        if start is not None:
            self._runner.read(Chunk(3, start, prompt(20, start)))


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_resuming_at_any_cut_equals_reading_straight_through(family: str, dtype: torch.dtype) -> None:
    runner = fresh_runner(family, dtype)
    for n in SWEEP if family in THOROUGH else BRIEF[dtype]:
        ids, plan = prompt(n), plan_of(n, ENDS)
        wanted = straight(runner, 2, n, steps=1)
        poison(runner)
        runner.empty(2)
        kept = read(runner, 2, ids, plan)
        assert answer(runner, 2, ids, 1).same_as(wanted), f"taking snapshots changed the answer to {n} tokens"
        for cut in reversed(plan.cuts):
            runner.mount(2, cut, kept[cut])
            assert read(runner, 2, ids, plan, cut).keys() == {c for c in plan.cuts if cut < c < n}
            assert answer(runner, 2, ids, 1).same_as(wanted), f"{n} tokens, resumed at {cut}"


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_other_slots_that_read_and_decode_change_nothing(family: str, dtype: torch.dtype) -> None:
    runner = fresh_runner(family, dtype)
    n, steps = 131, 12 if family in THOROUGH else 6
    ids, plan = prompt(n), plan_of(n, ENDS)
    wanted = straight(runner, 2, n, steps)
    runner.reset()
    poison(runner)
    neighbours = Neighbours(runner)
    kept = read(runner, 2, ids, plan, between=neighbours.step)
    assert answer(runner, 2, ids, steps, neighbours.rows).same_as(wanted)
    for cut in (37, 100):
        runner.mount(2, cut, kept[cut])
        read(runner, 2, ids, plan, cut, between=neighbours.step)
        assert answer(runner, 2, ids, steps, neighbours.rows).same_as(wanted), f"resumed at {cut}"


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_a_slot_that_went_another_way_resumes_where_it_branched(family: str, dtype: torch.dtype) -> None:
    runner = fresh_runner(family, dtype)
    ids, plan = prompt(131), plan_of(131, ENDS)
    wanted = straight(runner, 1, 131)
    runner.empty(1)
    kept = read(runner, 1, ids, plan)
    for cut in (128, 37):
        runner.mount(1, cut, kept[cut])
        runner.read(Chunk(1, cut, prompt(90, 5)))
        answer(runner, 1, prompt(5, 6), 4)
        runner.mount(1, cut, kept[cut])
        read(runner, 1, ids, plan, cut)
        assert answer(runner, 1, ids, 3).same_as(wanted), cut


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_a_dirty_slot_that_gets_cells_and_state_of_a_decoding_one_goes_on_like_it(
    family: str, dtype: torch.dtype
) -> None:
    runner = fresh_runner(family, dtype)
    ids, plan = prompt(131), plan_of(131, ENDS)
    wanted = straight(runner, 0, 131)
    runner.reset()
    poison(runner)
    donor, cut = prompt(300), 100
    donor = as_keys([*ids[:cut], *donor[cut:]])
    kept = read(runner, 1, donor, plan_of(300, ENDS))
    runner.join(1)
    runner.read(Chunk(3, 0, prompt(120, 8)))
    for source, target in zip(runner.arenas.span(1, 0, cut), runner.arenas.span(3, 0, cut), strict=True):
        target.copy_(source)
        runner.decode([row(runner, 1, 65)])
        runner.commit(1, 1)
    runner.mount(3, cut, kept[cut])
    read(runner, 3, ids, plan, cut)
    assert answer(runner, 3, ids, 3, lambda: [row(runner, 1, 66)]).same_as(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_and_reads_of_other_slots_leave_a_resting_one_as_it_was(family: str) -> None:
    runner = fresh_runner(family)
    for slot in (0, 1, 2):
        read(runner, slot, prompt(70, slot), plan_of(70))
    before = runner.digest(1)
    runner.join(0)
    runner.join(2)
    for token in range(3):
        runner.step([row(runner, slot, token) for slot in (0, 2)])
        runner.commit(0, 1)
        runner.commit(2, 1)
    runner.read(Chunk(3, 0, prompt(100)))
    assert runner.digest(1) == before


@pytest.mark.parametrize(("family", "dtype"), FEWER)
def test_slot_number_and_context_size_change_nothing(family: str, dtype: torch.dtype) -> None:
    wanted = straight(fresh_runner(family, dtype), 0, 131)
    other = ModelRunner(build_random(family, dtype=dtype), SLOTS, 333, "full")
    for slot in (1, 3):
        assert straight(other, slot, 131).same_as(wanted), slot


@pytest.mark.parametrize(("family", "dtype"), FEWER)
def test_the_number_of_threads_changes_nothing(family: str, dtype: torch.dtype) -> None:
    runner = fresh_runner(family, dtype)
    wanted = straight(runner, 2, 70, steps=1)
    torch.set_num_threads(2)
    assert straight(runner, 2, 70, steps=1).same_as(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_neighbours_mode_cache_resumes_exactly_too(family: str) -> None:
    runner = fresh_runner(family, exact="cache")
    ids, plan = prompt(131), plan_of(131, ENDS)
    wanted = straight(runner, 1, 131)
    runner.empty(1)
    kept = read(runner, 1, ids, plan)
    for cut in plan.cuts:
        runner.mount(1, cut, kept[cut])
        read(runner, 1, ids, plan, cut)
        assert answer(runner, 1, ids, 3).same_as(wanted), cut
