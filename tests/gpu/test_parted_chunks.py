"""Decode steps between the layers of a chunk: the same bits for what is read and for what decodes."""

import pytest
import torch

from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, Digest
from regrow.models.random_models import build_random
from tests.gpu.drive import (
    FAMILIES,
    SLOTS,
    answer,
    fresh_runner,
    plan_of,
    poison,
    prompt,
    read,
    row,
    short_of_the_last,
)

ENDS = (37, 100)
N = 131


def follow_on(runner: ModelRunner, slot: int, token: int) -> torch.Tensor:
    """Feed `token` to a joined slot; return its logits."""
    logits = runner.decode([row(runner, slot, token)])
    runner.commit(slot, 1)
    return logits[0].clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_between_its_layers_change_neither_a_chunk_nor_the_steps(family: str) -> None:
    runner = fresh_runner(family)
    read(runner, 2, prompt(N), plan_of(N, ENDS))
    wanted = answer(runner, 2, prompt(N), 2)
    runner.reset()
    poison(runner)
    read(runner, 0, prompt(50, 7), plan_of(50))
    runner.join(0)
    stepped: list[torch.Tensor] = []
    for start, stop in short_of_the_last(plan_of(N, ENDS)):
        runner.read(
            Chunk(2, start, prompt(N)[start:stop]),
            lambda: stepped.append(follow_on(runner, 0, len(stepped))),
        )
    beside = runner.digest(0)
    runner.leave(0)
    assert answer(runner, 2, prompt(N), 2).same_as(wanted)
    chunks = len(short_of_the_last(plan_of(N, ENDS)))
    assert len(stepped) >= 2 * chunks
    runner.reset()
    poison(runner)
    read(runner, 0, prompt(50, 7), plan_of(50))
    runner.join(0)
    for token, logits in enumerate(stepped):
        assert torch.equal(follow_on(runner, 0, token), logits), token
    assert runner.digest(0) == beside


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_row_may_end_between_the_layers_of_a_chunk(family: str) -> None:
    runner = fresh_runner(family)
    read(runner, 2, prompt(N), plan_of(N, ENDS))
    wanted = answer(runner, 2, prompt(N), 2)
    runner.reset()
    poison(runner)
    read(runner, 0, prompt(50, 7), plan_of(50))
    runner.join(0)
    left: list[Digest] = []

    def leave_once() -> None:
        if not left:
            follow_on(runner, 0, 5)
            runner.leave(0)
            left.append(runner.digest(0))

    for start, stop in short_of_the_last(plan_of(N, ENDS)):
        runner.read(Chunk(2, start, prompt(N)[start:stop]), leave_once)
    assert answer(runner, 2, prompt(N), 2).same_as(wanted)
    assert runner.digest(0) == left[0]


def test_experts_run_as_each_pass_needs_it() -> None:
    model = build_random("qwen3_moe")
    runner = ModelRunner(model, SLOTS, 128, "full")
    forms: list[str] = []

    def between() -> None:
        forms.append(model.config._experts_implementation)
        follow_on(runner, 0, 1)

    read(runner, 0, prompt(20), plan_of(20))
    runner.join(0)
    runner.read(Chunk(1, 0, prompt(30)), between)
    assert set(forms) == {"grouped_mm"}
