"""Copies on a GPU beside a model that decodes there. Written for one, and not run on one yet; what can be had
without it is in `test_lanes.py` and `test_stream_lanes.py`."""

import math

import pytest
import torch

from regrow.gpu.lanes import lanes_for
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import CellCopy, Chunk
from regrow.models.random_models import build_random
from tests.gpu.drive import plan_of, prompt, read, row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
N = 300
MIB = 1024 * 1024


@pytest.fixture(params=["llama", "qwen3_5"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return ModelRunner(build_random(request.param).to("cuda"), 4, 512, "cache")


def finish(copy: CellCopy) -> None:
    while not copy.advance(math.inf):
        pass


def steps(runner: ModelRunner, slot: int, n: int) -> None:
    for _ in range(n):
        runner.decode([row(runner, slot, 7)])
        runner.commit(slot, 1)


def test_a_donor_decodes_on_while_it_is_forked_and_parked_and_all_three_agree(runner: ModelRunner) -> None:
    ids = prompt(N)
    states = read(runner, 0, ids, plan_of(N))
    runner.mount(0, 256, states[256])
    wanted = runner.digest(0)
    runner.join(0)
    cells, parking = runner.save_cells(0, 0, 256)
    forking = runner.copy_cells(0, 1, 256)
    steps(runner, 0, 20)
    finish(parking)
    finish(forking)
    finish(runner.load_cells(2, [cells]))
    for slot in (1, 2):
        finish(runner.load_state(slot, states[256]))
        runner.filled(slot, 256)
        runner.mount(slot, 256, states[256])
        assert runner.digest(slot) == wanted


def test_a_snapshot_is_of_its_cut_though_the_next_chunk_follows_at_once(runner: ModelRunner) -> None:
    ids = prompt(N)
    wanted = read(runner, 0, ids, plan_of(N))
    runner.empty(0)
    taken = {}
    for a, b in plan_of(N).chunks_from(0):
        runner.read(Chunk(0, a, ids[a:b]))
        taken[b] = runner.snapshot(0)
    for position, copy in taken.items():
        finish(copy)
        assert copy.snapshot is not None
        if position in wanted:
            states = zip(copy.snapshot.states, wanted[position].states, strict=True)
            assert all(torch.equal(a, b.cpu()) for a, b in states)


def test_computing_does_not_wait_for_a_long_park() -> None:
    lanes = lanes_for(torch.device("cuda"))
    cells = torch.zeros(1, 2048, MIB, dtype=torch.uint8, device="cuda")
    _, parking = lanes.park([cells])
    one = torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
    torch.cuda.default_stream().synchronize()
    assert float(one[0, 0]) == 512
    assert not parking.ended, "2 GiB went over the bus before a small product was done"
    finish(parking)
