"""Exactness in mode "full" holds with prepared weights: alone, beside others, resumed, and mounted elsewhere,
the same bits (V3)."""

from functools import cache

import pytest
import torch

from regrow.config import Quant
from regrow.gpu.fast.prepare import prepare
from regrow.gpu.runner import ModelRunner
from regrow.models.random_models import build_random
from tests.gpu.drive import SLOTS, THOROUGH, answer, plan_of, poison, prompt, read
from tests.gpu.test_exactness import ENDS, Neighbours, straight

QUANTS: tuple[Quant, ...] = ("none", "int8", "int4")
N, STEPS = 131, 6


@cache
def prepared_runner(family: str, quant: Quant, dtype: torch.dtype) -> ModelRunner:
    model = build_random(family, dtype=dtype)
    prepare(model, quant, {})
    return ModelRunner(model, SLOTS, 512, "full")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", THOROUGH)
def test_alone_beside_others_resumed_and_mounted_elsewhere_are_the_same_bits(
    family: str, quant: Quant, dtype: torch.dtype
) -> None:
    runner = prepared_runner(family, quant, dtype)
    ids, plan = prompt(N), plan_of(N, ENDS)
    wanted = straight(runner, 2, N, STEPS)
    runner.reset()
    poison(runner)
    neighbours = Neighbours(runner)
    kept = read(runner, 2, ids, plan, between=neighbours.step)
    assert answer(runner, 2, ids, STEPS, neighbours.rows).same_as(wanted), "beside others"
    for cut in (37, 100):
        runner.mount(2, cut, kept[cut])
        read(runner, 2, ids, plan, cut)
        assert answer(runner, 2, ids, STEPS, neighbours.rows).same_as(wanted), f"resumed at {cut}"
    runner.leave(0)
    runner.empty(0)
    for source, target in zip(runner.arenas.span(2, 0, 100), runner.arenas.span(0, 0, 100), strict=True):
        target.copy_(source)
    runner.filled(0, 100)
    runner.mount(0, 100, kept[100])
    read(runner, 0, ids, plan, 100)
    assert answer(runner, 0, ids, STEPS).same_as(wanted), "mounted elsewhere"
