"""Keys for the slots of the fake device, and what they hold of them."""

from collections.abc import Sequence
from itertools import pairwise

from regrow.gpu.types import Chunk, HostCells, Snapshot
from regrow.policy.keys import Keys, as_keys
from tests.world.fake_runner import FakeRunner


def keys(seed: int, n: int = 256) -> Keys:
    return as_keys([1 + seed, *range(seed, seed + n - 1)])


def hold(runner: FakeRunner, slot: int, ids: Keys) -> dict[int, Snapshot]:
    """Let `slot` hold `ids`, read in two halves; return the states at the end of both."""
    states = {}
    for start, stop in pairwise((0, len(ids) // 2, len(ids))):
        runner.read(Chunk(slot, start, ids[start:stop]))
        taken = runner.snapshot(slot).snapshot
        assert taken is not None
        states[stop] = taken
    return states


def held(runner: FakeRunner, slot: int) -> int | None:
    """The hash of the keys that `slot` holds."""
    return runner._slots[slot].hash_below(runner.length(slot))


def content(cells: Sequence[HostCells]) -> int | None:
    """The hash of the keys that host cells from 0 on are of."""
    runner = FakeRunner(slots=1, hybrid=False)
    copy = runner.load_cells(0, cells)
    while not copy.advance(1.0):
        pass
    runner.filled(0, cells[-1].stop)
    return held(runner, 0)
