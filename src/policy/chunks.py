"""How many tokens a chunk holds at each depth: as many as are read within the time running streams may wait.

A chunk of n tokens takes at depth d what it takes at depth 0, and the same again for each of the n * d pairs
of a token and a cell before the chunk: so a few chunks at depth 0 and one far down tell all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from regrow.policy.plan import ChunkTable

STEP = 64  # chunk sizes are multiples of it (P1)
USUAL = 256  # tokens of a chunk where no size keeps the time
MARGIN = 0.9  # of the time that is aimed at
NOT_MEASURED = "not measured"
HELD = "a chunk keeps it"


@dataclass(frozen=True, slots=True)
class Timed:
    """A chunk of `size` tokens took `seconds`, with `depth` cells before it."""

    depth: int
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChosenChunks:
    """stall: in words, whether a chunk takes no longer than it may."""

    table: ChunkTable
    stall: str


def choose_chunks(timed: Sequence[Timed], most_s: float, context: int) -> ChosenChunks:
    """Return the table whose chunks take at most `most_s`, each as large as was measured and fits, for depths
    below `context`. From where none fits on, running rows are stepped between the layers of any chunk, so
    small ones would only read slower: there they are `USUAL`.

    timed: sizes at depth 0, the smallest one `STEP`, and chunks that lie deeper, of sizes that were measured
    at depth 0 too; without one, depth costs nothing. Sizes between two that were measured lie on a line.
    """
    flat = {t.size: t.seconds for t in timed if not t.depth}
    pairs = ((t.seconds - flat[t.size]) / (t.size * t.depth) for t in timed if t.depth)
    per_pair = max(pairs, default=0.0)
    sizes = range(STEP, max(flat) + 1, STEP)
    deepest = {size: _deepest(_between(flat, size), size, per_pair, most_s * MARGIN) for size in sizes}
    steps: list[tuple[int, int]] = []
    position = 0
    for size in reversed(sizes):
        end = deepest[size]
        if end is None or end >= position:
            steps.append((position, size))
            if end is None or end >= context:
                return ChosenChunks(ChunkTable(tuple(steps)), HELD)
            position = end // STEP * STEP + STEP
    steps.append((position, USUAL))
    over = f"from token {position:,} on a chunk takes longer; running streams are stepped between its layers"
    return ChosenChunks(ChunkTable(tuple(steps)), over)


def _deepest(flat_s: float, size: int, per_pair: float, most_s: float) -> int | None:
    """Return the depth down to which a chunk is fast enough: below 0 where it is nowhere, None where it is
    everywhere."""
    if flat_s > most_s:
        return -1
    return None if per_pair <= 0 else int((most_s - flat_s) / (size * per_pair))


def _between(flat: dict[int, float], size: int) -> float:
    """Return the seconds of a chunk at depth 0 on the line between the measured ones around it."""
    below, above = max(s for s in flat if s <= size), min(s for s in flat if s >= size)
    share = (size - below) / (above - below) if above > below else 0.0
    return flat[below] + share * (flat[above] - flat[below])
