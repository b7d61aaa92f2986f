"""What each mode costs in speed: exactness at the default quant, and each quant at the default exactness.

One model a quant, one runner a mode, all in one thread, in turn: a decode step of 1 and of 4 rows, and a
chunk at the start of a prompt and behind 2,048 tokens. Each figure is how many times longer it takes than
in the mode that `--exact` and `--quant` name, the median of the ratios of rounds; those of that mode
itself are in ms.
"""

import statistics
import time
from collections.abc import Mapping
from typing import get_args

import numpy as np
import torch

import harness
from regrow.gpu.fast import native
from regrow.gpu.fast.prepare import Quant, prepare
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, Row
from regrow.models.load import load_model
from regrow.policy.request import Exactness, SamplingParams

SLOTS, CONTEXT = 4, 4096
DEPTH = 128  # tokens before a step
CHUNK, PAST = 256, 2048
STEPS = 8
FIRST, LAST = 20, 220  # token ids, known to every model


class Mode:
    """One runner, and what is measured of it, in seconds."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self._runner = runner
        self._ids = np.random.default_rng(seed).integers(FIRST, LAST, PAST + CHUNK)

    def measure(self) -> dict[str, float]:
        return {
            "step, 1 row": self._step(1),
            f"step, {SLOTS} rows": self._step(SLOTS),
            f"{CHUNK} at 0": self._chunk(0),
            f"{CHUNK} at {PAST:,}": self._chunk(PAST),
        }

    def _step(self, rows: int) -> float:
        runner = self._runner
        for slot in range(rows):
            runner.read(Chunk(slot, 0, self._ids[:DEPTH]))
            runner.join(slot)
        seconds = []
        for i in range(STEPS):
            given = [Row(slot, FIRST, DEPTH + i, SamplingParams()) for slot in range(rows)]
            begin = time.perf_counter()
            runner.step(given)
            seconds.append(time.perf_counter() - begin)
            for slot in range(rows):
                runner.commit(slot, 1)
        for slot in range(rows):
            runner.empty(slot)
        return statistics.median(seconds)

    def _chunk(self, start: int) -> float:
        for at in range(0, start, CHUNK):
            self._runner.read(Chunk(0, at, self._ids[at : at + CHUNK]))
        begin = time.perf_counter()
        self._runner.read(Chunk(0, start, self._ids[start : start + CHUNK]))
        seconds = time.perf_counter() - begin
        self._runner.empty(0)
        return seconds


@torch.inference_mode()
def measure(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    usual: tuple[str, str] = opts.exact, opts.quant
    wanted = [usual]
    wanted += [(exact, opts.quant) for exact in get_args(Exactness) if exact != opts.exact]
    wanted += [(opts.exact, quant) for quant in get_args(Quant) if quant != opts.quant]
    models = {}
    for quant in dict.fromkeys(quant for _, quant in wanted):
        models[quant] = load_model(opts.model)
        prepare(models[quant].module, quant, models[quant].packed)
    modes: Mapping[tuple[str, str], Mode] = {
        (exact, quant): Mode(ModelRunner(models[quant].module, SLOTS, CONTEXT, exact), opts.seed)
        for exact, quant in wanted
    }
    for mode in modes.values():
        mode.measure()  # what is chosen and given at the first use
    rounds = [{name: mode.measure() for name, mode in modes.items()} for _ in range(2 if opts.quick else 7)]

    rows: list[dict[str, harness.Cell]] = [{"exact": usual[0], "quant": usual[1]}]
    for column in rounds[0][usual]:
        rows[0][column] = 1e3 * statistics.median(taken[usual][column] for taken in rounds)
    for name in wanted[1:]:
        cells: dict[str, harness.Cell] = {"exact": name[0], "quant": name[1]}
        for column in rounds[0][usual]:
            cells[column] = statistics.median(taken[name][column] / taken[usual][column] for taken in rounds)
        rows.append(cells)
    return rows


def main() -> None:
    opts = harness.options("modes", __doc__ or "")
    title = f"What a mode costs, native kernels {native.state()}; first row in ms"
    harness.report("modes", opts, title, measure(opts))


if __name__ == "__main__":
    main()
