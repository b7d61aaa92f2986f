"""What is measured of a machine on which every call takes a scripted time."""

import pytest

from regrow.gpu.chunk_times import DEPTH, REPEATS, time_chunks
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, ReadResult
from regrow.models.random_models import build_random
from regrow.policy.chunks import Timed


class Scripted(ModelRunner):
    """Reads in no time, but for what the script says of size and depth; the first time is disturbed."""

    clock = 0.0
    per_token = 2**-10
    disturbed = 8.0

    def read(self, chunk: Chunk, between: object = None) -> ReadResult:
        self.clock += len(chunk.ids) * self.per_token * (1 + chunk.start / 1024) + self.disturbed
        type(self).disturbed = 0.0
        result = super().read(chunk)
        self.reads.append((chunk.start, len(chunk.ids)))
        return result

    def reset(self) -> None:
        super().reset()
        self.reads: list[tuple[int, int]] = []


@pytest.fixture(params=["llama", "qwen3_5"])
def runner(request: pytest.FixtureRequest) -> Scripted:
    return Scripted(build_random(request.param), 2, 640, "cache")


def test_sizes_are_measured_as_far_as_they_are_of_use_and_one_chunk_deep_down(runner: Scripted) -> None:
    found = time_chunks(runner, 512, 512, 0.2, lambda: runner.clock)
    assert found == [
        Timed(0, 64, 2**-4),
        Timed(0, 128, 2**-3),
        Timed(0, 256, 2**-2),
        Timed(0, 512, 2**-1),
        Timed(576, 64, 2**-4 * (1 + 576 / 1024)),
    ]
    assert len(runner.reads) == 1 + REPEATS * len(found)
    slow = time_chunks(runner, 512, 512, 0.05, lambda: runner.clock)
    assert [t.size for t in slow if not t.depth] == [64, 128]
    assert runner.length(0) == 0


def test_no_chunk_is_larger_than_it_may_be_or_than_a_slot() -> None:
    runner = Scripted(build_random("llama"), 1, 100, "cache")
    assert [(t.depth, t.size) for t in time_chunks(runner, 512, 512, 9.0, lambda: runner.clock)] == [
        (0, 64),
        (36, 64),
    ]
    runner = Scripted(build_random("llama"), 1, 64, "cache")
    assert [(t.depth, t.size) for t in time_chunks(runner, 512, 512, 9.0, lambda: runner.clock)] == [(0, 64)]
    assert DEPTH > 64
