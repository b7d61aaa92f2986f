"""The cache policy alone on recorded agent traces: how much of what could be reused is reused.

regrow's own actors serve the traces without a model (`alone.py`), beside three simpler caches
(`baselines.py`), all with four slots and the same bytes. The figure is the hit rate over the ideal: every
cut of the read plan that was ever read is there. `closes` is the part of the way from the best of the three
to the ideal that regrow goes.

Memory is given as the part of what the open conversations weigh: so many times the cells and six states of
a median conversation at its end. The four slots' own cells come on top. Options beside the shared ones:
--traces PATH, --half tune|report (which half of the traces, drawn by the seed), --sample N (of that half).
"""

import argparse
import gc
import gzip
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import harness
from alone import CHUNK, Alone, Size
from baselines import Baseline, Name
from regrow.config import EngineSettings
from replay import Begin, End, Turn, schedule, turns

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces" / "agent_traces.jsonl.gz"
SLOTS = 4
AT_ONCE = (1, 2, 4, 8, 16, 32)
QUICK_AT_ONCE = (1, 8, 32)
MEMORY = {"ample": None, "1/2": 1 / 2, "1/4": 1 / 4, "1/10": 1 / 10}
QUICK_MEMORY = ("ample", "1/4", "1/10")
BASELINES: tuple[Name, ...] = ("whole", "newest", "slots")
SIZES = {
    # 48 layers: 36 with a recurrent state of 48 x 128 x 128 floats, 118.0 MB with the convolutions; 12 with
    # attention: keys and values of 2 heads x 256 and one indexer key of 128, in bfloat16
    "Qwen3.8-Flash-Next": Size(token=12 * (2 * 2 * 256 + 128) * 2, state=118_000_000),
    # 36 layers with keys and values of 8 heads x 128 in bfloat16
    "Qwen3-8B": Size(token=36 * 2 * 8 * 128 * 2, state=0),
}


class Cache(Protocol):
    def begin(self, number: int, turn: Turn) -> int: ...

    def end(self, number: int) -> None: ...


def reused(cache: Cache, events: Sequence[Begin | End]) -> int:
    """Return how many prompt tokens the cache saved from reading."""
    total = 0
    for event in events:
        if isinstance(event, Begin):
            saved = cache.begin(event.number, event.turn)
            assert saved <= event.turn.known, "reused what nobody has read"
            total += saved
        else:
            cache.end(event.number)
    return total


def weight(traces: Sequence[Sequence[Turn]], size: Size, states: int) -> int:
    """Return the bytes of a median conversation at its end."""
    ends = [max(turn.plan.length for turn in trace) for trace in traces]
    return int(statistics.median(ends)) * size.token + states * size.state


def row(
    events: Sequence[Begin | End],
    at_once: int,
    memory: str,
    budget: int,
    size: Size,
    settings: EngineSettings,
) -> dict[str, harness.Cell]:
    """Serve the events with every cache; the hit rates are parts of the ideal."""
    begun = [event.turn for event in events if isinstance(event, Begin)]
    ideal = sum(turn.known for turn in begun)
    limits = settings.checkpoints, settings.checkpoint_every
    rates = {name: reused(Baseline(name, SLOTS, budget, size, *limits), events) / ideal for name in BASELINES}
    ours = reused(Alone(SLOTS, budget, size, settings), events) / ideal
    best = max(rates.values())
    return {
        "at once": at_once,
        "memory": memory,
        "MiB": budget >> 20 if MEMORY[memory] else None,
        "ideal hit rate": ideal / sum(turn.plan.length for turn in begun),
        "regrow / ideal": ours,
        **rates,
        "closes": (ours - best) / (1 - best) if best < 1 else None,
    }


def sample(path: Path, half: str, count: int | None, seed: int, chunk: int) -> list[list[Turn]]:
    """Return `count` traces of one half of the file, None for all."""
    with gzip.open(path, "rt") as file:
        lines = file.readlines()
    random.Random(seed).shuffle(lines)
    return [turns(json.loads(line), chunk) for line in lines[half == "report" :: 2][:count]]


def arguments() -> argparse.Namespace:
    """Take the options that only this bench has from the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--half", choices=("tune", "report"), default="report")
    parser.add_argument("--sample", type=int, help="how many of them; without it 20 with --quick, else all")
    mine, sys.argv[1:] = parser.parse_known_args()
    return mine


def main() -> None:
    mine = arguments()
    opts = harness.options("trace", __doc__ or "", model=next(iter(SIZES)))
    if not mine.traces.exists():
        print(f"skipped: there are no traces at {mine.traces}; name them with --traces")
        return
    size, settings = SIZES[opts.model], EngineSettings()
    traces = sample(mine.traces, mine.half, mine.sample or (20 if opts.quick else None), opts.seed, CHUNK)
    gc.freeze()  # they are many, and stay
    each = weight(traces, size, settings.checkpoints)
    rows = []
    for at_once in QUICK_AT_ONCE if opts.quick else AT_ONCE:
        events = schedule(traces, at_once, SLOTS)
        for memory in QUICK_MEMORY if opts.quick else MEMORY:
            share = MEMORY[memory]
            budget = 1 << 62 if share is None else int(share * at_once * each)
            rows.append(row(events, at_once, memory, budget, size, settings))
    harness.report("trace", opts, f"Reuse over the ideal, {len(traces)} traces ({mine.half} half)", rows)


if __name__ == "__main__":
    main()
