"""Save and restore: what the disk tier takes over plain files, and restoring over reading again.

For each length a conversation is read and written behind, the engine is stopped, and the next one goes on
with the conversation from disk; the same prompt is then read by an engine that keeps nothing. Plain is a file
of the same size in the same directory, written and synced, or read, in pieces of 16 MiB. Before anything is
read the files are dropped from the system's cache. "even at" is what the disk must give for restoring to be
as fast as reading: the record's size over the time of reading it again.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import harness
from asking import MIB, Texts, ask
from regrow import Engine, EngineSettings, GenerateRequest
from regrow.actors.disk_messages import SaveSession, WriteOut

LENGTHS = (128, 512, 2000, 6000)
QUICK = (128, 512, 2000)
CONTEXT = 8192
PIECE = 16 * MIB
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """saved and restored: bytes and seconds, as the tier counts them. from_disk and again: seconds until the
    first token. written_plain and read_plain: bytes a second."""

    tokens: int
    source: str
    reused: int
    saved: tuple[int, float]
    restored: tuple[int, float]
    from_disk: float
    again: float
    written_plain: float
    read_plain: float


def plain_write(path: Path, size: int) -> float:
    """Return bytes a second."""
    piece, begin = os.urandom(PIECE), time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, PIECE):
            file.write(piece[: min(PIECE, size - start)])
        os.fsync(file.fileno())
    return size / (time.perf_counter() - begin)


def plain_read(path: Path) -> float:
    drop(path)
    into, size, begin = bytearray(PIECE), path.stat().st_size, time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(into):
            pass
    return size / (time.perf_counter() - begin)


def drop(path: Path) -> None:
    """Have the system forget what it has read or written of a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def round_of(settings: EngineSettings, length: int, seed: int, directory: Path) -> Round:
    settings = replace(settings, cache_dir=directory / "cache")
    async with Engine.open(settings) as engine:
        texts = Texts(engine, seed)
        opening = texts.chat(texts.of(length // 2), texts.of(length // 2))
        await ask(engine, GenerateRequest(messages=opening, max_tokens=2, ignore_eos=True))
        await engine.slot(0).ask(SaveSession(), DEADLINE_S)
        await engine.cache.ask(WriteOut(), DEADLINE_S)
        first = (await engine.status()).disk
        later = [
            *opening,
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": texts.of(20)},
        ]
    for path in (directory / "cache").iterdir():
        drop(path)
    request = GenerateRequest(messages=later, max_tokens=2, ignore_eos=True)
    async with Engine.open(settings) as engine:
        answered = await ask(engine, request)
        second = (await engine.status()).disk
    async with Engine.open(replace(settings, cache=False)) as engine:
        again = await ask(engine, request)
    assert first is not None and second is not None
    size = first.counters.written_bytes
    return Round(
        tokens=answered.prompt,
        source=answered.reuse.source,
        reused=answered.reuse.reused,
        saved=(size, first.counters.written_s),
        restored=(second.counters.restored_bytes, second.counters.restored_s),
        from_disk=answered.seconds,
        again=again.seconds,
        written_plain=plain_write(directory / "plain", size),
        read_plain=plain_read(directory / "plain"),
    )


def row(rounds: Sequence[Round]) -> dict[str, harness.Cell]:
    first = rounds[0]
    size = first.saved[0]

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values)

    return {
        "tokens": first.tokens,
        "MiB": size / MIB,
        "source": first.source,
        "reused": first.reused,
        "save / plain": middle([r.saved[0] / r.saved[1] / r.written_plain for r in rounds]),
        "restore / plain": middle(
            [r.restored[0] / r.restored[1] / r.read_plain for r in rounds if r.restored[0]] or [0.0]
        ),
        "TTFT s": middle([r.from_disk for r in rounds]),
        "/ reading": middle([r.from_disk / r.again for r in rounds]),
        "even at MiB/s": middle([size / MIB / r.again for r in rounds]),
    }


async def measure(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    settings = EngineSettings(
        model=opts.model, exact=opts.exact, parallel=1, context=CONTEXT, save_after_s=0.0
    )
    rows = []
    for length in QUICK if opts.quick else LENGTHS:
        rounds = []
        for number in range(1 if opts.quick else 3):
            with tempfile.TemporaryDirectory() as directory:
                rounds.append(await round_of(settings, length, opts.seed + number, Path(directory)))
        rows.append(row(rounds))
    return rows


def main() -> None:
    opts = harness.options("disk", __doc__ or "")
    harness.report("disk", opts, "A conversation goes on after a restart", asyncio.run(measure(opts)))


if __name__ == "__main__":
    main()
