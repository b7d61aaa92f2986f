"""Records of made-up conversations: each tensor's bytes depend on all the keys up to its end, so that what is
read can be held against the keys."""

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
import xxhash

from regrow.policy.keys import Namespace, as_keys, prefix_hashes
from regrow.store.files import Bytes
from regrow.store.record import RecordKind, Tensor
from regrow.store.records import NewRecord, PartKey, Records, Stored

SPACE = Namespace("made up")
ROOT, TURN = 64, 32
HEADS, DIM, STATE = 2, 4, 100
IDENTITY = "this model"


def bytes_of(name: str, prefix: bytes, n: int) -> Bytes:
    seed = xxhash.xxh3_64_intdigest(name.encode() + prefix)
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def tensors_of(part: PartKey) -> list[Tensor]:
    start, stop, prefix = part
    if start == stop:
        return [Tensor("L1.recurrent0", "F32", (STATE // 4,), bytes_of("state", prefix, STATE))]
    shape = (HEADS, stop - start, DIM)
    n = HEADS * (stop - start) * DIM * 2
    return [Tensor(f"L0.{name}", "BF16", shape, bytes_of(name, prefix, n)) for name in ("k", "v")]


def talk(
    root: int,
    turns: Sequence[int] = (),
    *,
    kind: RecordKind | None = None,
    given: Collection[str] = ("cells", "states"),
    namespace: Namespace = SPACE,
) -> NewRecord:
    """A conversation with a system prompt of its own number and a turn for each number, a span and a state at
    each end. given: what of it is in memory, to be written."""
    keys = as_keys([root] * ROOT + [1000 + turn for turn in turns for _ in range(TURN)])
    positions = range(ROOT, len(keys) + 1, TURN)
    cuts = tuple(zip(positions, prefix_hashes(namespace, keys, positions), strict=True))
    edges = [0, *positions]
    spans = tuple(
        (start, stop, prefix) for (start, stop), (_, prefix) in zip(pairwise(edges), cuts, strict=True)
    )
    states = [(position, position, prefix) for position, prefix in cuts]
    parts = [*(spans if "cells" in given else ()), *(states if "states" in given else ())]
    return NewRecord(
        kind=kind or ("chat" if turns else "root"),
        namespace=namespace.digest,
        keys=keys,
        cuts=cuts,
        pure_length=len(keys),
        last_start=len(keys),
        spans=spans,
        states=cuts,
        tensors={part: tensors_of(part) for part in parts},
    )


def write(records: Records, new: NewRecord) -> None:
    for _ in records.write(new):
        pass


def parts_of(stored: Stored) -> list[PartKey]:
    return [(p.start, p.stop, p.prefix) for p in (*stored.header.spans, *stored.header.states)]


def is_true(records: Records, stored: Stored) -> bool:
    """Read all of a record: say whether each tensor is the one that belongs to its keys."""
    read = records.read(stored.name, parts_of(stored))
    for part, tensors in read.items():
        for got, true in zip(tensors, tensors_of(part), strict=True):
            if (got.name, got.dtype, got.shape) != (true.name, true.dtype, true.shape):
                return False
            if not np.array_equal(got.data, true.data):
                return False
    return True


def ends(records: Records) -> set[tuple[int, bytes]]:
    """Where the records that can be used end."""
    return {stored.header.cuts[-1] for stored in records.live().values()}
