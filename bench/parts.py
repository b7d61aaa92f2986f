"""The parts of a model that are replaced, against those of `transformers` (REGROW_STOCK) on the same weights.

First a layer of experts alone, of a large model's size, with one row and with four: `batched_mm` is the stock
form of a step, `grouped_mm` that of reading. Then a model's first layers, once with the stock parts: at
several depths, over made-up cells, a chunk is read, and a step is run with one row and with four. A figure is
the median of ratios of times of pairs, stock over replaced: how many times faster.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

import harness
from regrow.gpu.fast.experts import experts_by_row
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, Row, Snapshot
from regrow.models.random_models import parse_random, random_config, random_model
from regrow.policy.keys import as_keys
from regrow.policy.request import SamplingParams

LAYERS = 4
CHUNK = 64
IDS = as_keys([7 * i % 251 for i in range(CHUNK)])
DEPTHS = (512, 2_048, 4_096)
ROWS = (1, 4)
EXPERTS, CHOSEN, HIDDEN, WIDTH = 48, 10, 2_560, 640  # those that nobody chooses cost nothing


def ratio(stock: Callable[[], object], replaced: Callable[[], object], repeats: int) -> float:
    """Return the median of the ratios of their times, in turn."""
    replaced()
    ratios = []
    for _ in range(repeats):
        begin = time.perf_counter()
        stock()
        middle = time.perf_counter()
        replaced()
        ratios.append((middle - begin) / (time.perf_counter() - middle))
    return harness.median(ratios)


def runner_of(model: str, stock: str) -> ModelRunner:
    os.environ["REGROW_STOCK"] = stock
    config = random_config(*parse_random(model))
    config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
    config.layer_types = config.layer_types[:LAYERS]
    return ModelRunner(random_model(config, torch.bfloat16), max(ROWS), DEPTHS[-1] + CHUNK, "cache")


def alike(runners: Sequence[ModelRunner], seed: int) -> Snapshot:
    """Fill the cells of all runners with the same numbers; return a running state."""
    first = runners[0].arenas.cells
    generator = torch.Generator().manual_seed(seed)
    for (_, name), cells in first.items():
        if name == "positions":
            cells.copy_(torch.arange(cells.shape[2])[:, None])
        else:
            cells.normal_(generator=generator)
    for runner in runners[1:]:
        for cells, wanted in zip(runner.arenas.cells.values(), first.values(), strict=True):
            cells.copy_(wanted)
    runners[0].read(Chunk(0, 0, IDS))
    state = runners[0].snapshot(0).snapshot
    assert state is not None
    return state


def at(runner: ModelRunner, slot: int, depth: int, state: Snapshot) -> None:
    runner.filled(slot, depth)
    runner.mount(slot, depth, Snapshot(depth, state.states))


def chunk(runner: ModelRunner, depth: int, state: Snapshot) -> None:
    at(runner, 0, depth, state)
    runner.read(Chunk(0, depth, IDS))


def step(runner: ModelRunner, rows: int, depth: int, state: Snapshot) -> None:
    """Feed a token to each of the first `rows` slots, all at `depth`."""
    for slot in range(rows):
        at(runner, slot, depth, state)
        runner.join(slot)
    runner.decode([Row(slot, 7, depth, SamplingParams()) for slot in range(rows)])
    for slot in range(rows):
        runner.leave(slot)


@torch.inference_mode()
def parts(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    repeats = 3 if opts.quick else 7
    runners = [runner_of(opts.model, names) for names in ("indexer,experts", "")]
    state = alike(runners, opts.seed)
    rows: list[dict[str, harness.Cell]] = []
    for depth in DEPTHS:
        row: dict[str, harness.Cell] = {"cells": depth}
        row[f"chunk of {CHUNK}"] = ratio(*(partial(chunk, r, depth, state) for r in runners), repeats)
        for n in ROWS:
            row[f"step, rows: {n}"] = ratio(*(partial(step, r, n, depth, state) for r in runners), repeats)
        rows.append(row)
    return rows


@torch.inference_mode()
def experts(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    generator = torch.Generator().manual_seed(opts.seed)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    layer = SimpleNamespace(
        gate_up_proj=drawn(EXPERTS, 2 * WIDTH, HIDDEN),
        down_proj=drawn(EXPERTS, HIDDEN, WIDTH),
        num_experts=EXPERTS,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        _is_expert_parallel=False,
        _apply_gate=lambda out: torch.nn.functional.silu(out.chunk(2, -1)[0]) * out.chunk(2, -1)[1],
    )
    rows: list[dict[str, harness.Cell]] = []
    for n in ROWS:
        x, weights = drawn(n, HIDDEN), torch.full((n, CHOSEN), 1 / CHOSEN).bfloat16()
        chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(n)])
        given = (layer, x, chosen, weights)
        row: dict[str, harness.Cell] = {"rows": n}
        for name, form in (
            ("batched_mm", batched_mm_experts_forward),
            ("grouped_mm", grouped_mm_experts_forward),
        ):
            row[name] = ratio(partial(form, *given), partial(experts_by_row, *given), 5)
        rows.append(row)
    return rows


def main() -> None:
    opts = harness.options("parts", __doc__ or "", model="random:qwen4_exp:135m")
    harness.report("experts", opts, "A layer of experts: stock over replaced", experts(opts))
    harness.report("parts", opts, "Stock parts over replaced ones", parts(opts))


if __name__ == "__main__":
    main()
