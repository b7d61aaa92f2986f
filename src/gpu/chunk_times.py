"""How long chunks take on this machine: read into a slot whose cells hold nothing that matters."""

from collections.abc import Callable

import torch

from regrow.gpu.types import Chunk, Runner, Snapshot
from regrow.policy.chunks import STEP, Timed
from regrow.policy.keys import as_keys

DEPTH = 4096  # at most, of the chunk that tells what depth costs
REPEATS = 3
ENOUGH = 2  # times the time aimed at: larger chunks need no measuring


def time_chunks(
    runner: Runner, most: int, vocab: int, most_s: float, now: Callable[[], float]
) -> list[Timed]:
    """Return what chunks of up to `most` tokens took, the least of a few times: sizes at depth 0, as far as
    they are of use, and the smallest one deep down. Leaves slot 0 empty.

    vocab: how many token ids there are. most_s: seconds that a chunk should take. now: a clock in seconds.
    """

    most = min(most, runner.context)

    def timed(depth: int, size: int) -> Timed:
        return Timed(depth, size, min(_seconds(runner, depth, size, vocab, now) for _ in range(REPEATS)))

    with torch.inference_mode():
        _seconds(runner, 0, STEP, vocab, now)  # the first one makes what all others use
        found = [timed(0, STEP)]
        while found[-1].seconds < most_s * ENOUGH and (size := found[-1].size * 2) <= most:
            found.append(timed(0, size))
        if runner.context > STEP:
            found.append(timed(min(DEPTH, runner.context - STEP), STEP))
        runner.empty(0)
    return found


def _seconds(runner: Runner, depth: int, size: int, vocab: int, now: Callable[[], float]) -> float:
    runner.empty(0)
    if depth:
        zeros = tuple(torch.zeros(s.shape, dtype=s.dtype) for s in runner.geometry.states)
        runner.filled(0, depth)
        runner.mount(0, depth, Snapshot(depth, zeros))
    ids = as_keys([i * 7919 % vocab for i in range(size)])
    begin = now()
    runner.read(Chunk(0, depth, ids))
    return now() - begin
