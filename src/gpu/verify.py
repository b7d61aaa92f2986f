"""Reading again what was mounted, and comparing (V2): a difference is named by its part."""

from collections.abc import Sequence

from regrow.gpu.types import Chunk, Runner
from regrow.policy.keys import Keys


def differing_parts(
    runner: Runner, spare: int, slot: int, ids: Keys, chunks: Sequence[tuple[int, int]]
) -> tuple[str, ...]:
    """Read `ids` by `chunks` from 0 in the slot `spare`; return the names of the parts of the digest in which
    `slot` differs, () where it is the same bit for bit."""
    runner.empty(spare)
    for start, stop in chunks:
        runner.read(Chunk(spare, start, ids[start:stop]))
    fresh, mounted = runner.digest(spare), runner.digest(slot)
    runner.empty(spare)
    if fresh.length != mounted.length:
        return ("length",)
    return tuple(name for (name, a), (_, b) in zip(fresh.parts, mounted.parts, strict=True) if a != b)
