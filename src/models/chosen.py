"""What was measured once for a model on a machine and holds ever after: the read plan's chunks (D3).

Where a prompt is cut decides what its answer is, bit for bit, and what of the disk tier still matches. So
what `--chunk auto` has chosen is kept beside the converted models, under all that it was chosen for, and is
never measured again; whoever wants that removes the file.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import structlog

from regrow.models.once import made_once
from regrow.models.progress import Progress
from regrow.policy.chunks import ChosenChunks
from regrow.policy.keys import Namespace
from regrow.policy.plan import ChunkTable

log = structlog.get_logger(__name__)
FOLDER = "chunks"
RULE = 2  # raised when the choice is made in another way: older ones are then left alone


class Kept(msgspec.Struct, frozen=True):
    """The file's content; `model`, `machine` and `max_stall_ms` are for those who look at it."""

    model: str
    machine: str
    max_stall_ms: float
    steps: tuple[tuple[int, int], ...]
    stall: str

    @property
    def chosen(self) -> ChosenChunks:
        return ChosenChunks(ChunkTable(self.steps), self.stall)


def machine() -> str:
    """Return what the processor calls itself, and how many of its cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def chosen_once(
    folder: Path,
    model: str,
    chosen_for: tuple[object, ...],
    max_stall_ms: float,
    choose: Callable[[], ChosenChunks],
    progress: Progress,
) -> ChosenChunks:
    """Return the chunks that were chosen before for `model`, which `chosen_for` identifies, on this machine;
    else choose and keep them. Where they cannot be kept, that is logged."""
    here = machine()
    name = Namespace.of(*chosen_for, here, max_stall_ms).digest
    path = folder / FOLDER / f"{name}-v{RULE}.json"
    fresh: list[ChosenChunks] = []

    def make(part: Path) -> None:
        fresh.append(choose())
        kept = Kept(model, here, max_stall_ms, fresh[-1].table.steps, fresh[-1].stall)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")

    try:
        return _read(made_once(path, make, progress)).chosen
    except (msgspec.MsgspecError, ValueError) as error:
        log.warning("chunks measured again: what was kept cannot be read", file=str(path), error=str(error))
        path.unlink()
        return _read(made_once(path, make, progress)).chosen
    except OSError as error:
        log.warning("chunks cannot be kept; another start may choose others (--chunk)", error=str(error))
        return fresh[-1] if fresh else choose()


def all_chosen(folder: Path) -> Iterator[Kept]:
    """Yield what is kept for this machine, what was chosen last at the end."""
    here = machine()
    for path in sorted((folder / FOLDER).glob(f"*-v{RULE}.json"), key=lambda path: path.stat().st_mtime):
        try:
            kept = _read(path)
        except (msgspec.MsgspecError, ValueError):
            continue  # it will be measured again, which is logged
        if kept.machine == here:
            yield kept


def _read(path: Path) -> Kept:
    kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    ChunkTable(kept.steps)
    return kept
