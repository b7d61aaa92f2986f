"""What every bench shares: its options, its table, and the JSON beside it.

A figure is a ratio of two things measured in turn in one run, or a count of tokens; absolute times on shared
machines mean little. Every table names the model, the exactness mode and the seed.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from regrow.api.logs import configure_logs

T = TypeVar("T")
Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Options:
    """quick: under 5 minutes on 2 cores. out: where the JSON goes."""

    model: str
    exact: str
    quant: str
    seed: int
    quick: bool
    out: Path
    llama_server: Path | None
    gguf: tuple[Path, ...]


def options(name: str, about: str, *, model: str = "demo") -> Options:
    """Read the command line of the bench `name`; logs are silenced up to warnings."""
    configure_logs("warning", as_json=False)
    parser = argparse.ArgumentParser(prog=f"bench/{name}.py", description=about)
    parser.add_argument("--model", default=model, help="as for `regrow serve` (default: %(default)s)")
    parser.add_argument("--exact", default="cache", choices=("full", "cache", "off"))
    parser.add_argument("--quant", default="auto", choices=("none", "int8", "int4", "auto"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--llama-server", type=Path, help="a llama-server binary to measure beside")
    parser.add_argument("--gguf", type=Path, action="append", default=[], help="weights for it")
    args = parser.parse_args()
    peer = args.llama_server, tuple(args.gguf)
    return Options(args.model, args.exact, args.quant, args.seed, args.quick, args.out, *peer)


def report(name: str, opts: Options, title: str, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Print `rows` as a table (columns as in the first row) and write them to `out`/`name`.json."""
    heading = f"{title} ({opts.model}, exact {opts.exact}, quant {opts.quant}, seed {opts.seed})"
    table = Table(title=heading, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == next(iter(rows[0])) else "right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    Console(width=100).print(table)
    opts.out.mkdir(parents=True, exist_ok=True)
    asked = {field: getattr(opts, field) for field in ("model", "exact", "quant", "seed")}
    facts = {"bench": name, **asked, "rows": list(rows)}
    path = opts.out / f"{name}.json"
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"written: {path}")


async def apart(function: Callable[..., T], *args: object) -> T:
    """Run `function` in a thread that ends with it, and with it the OpenMP threads it has started: where more
    of these live than there are cores, none spins, and what is measured beside it is slowed."""
    with ThreadPoolExecutor(max_workers=1) as once:
        return await asyncio.get_running_loop().run_in_executor(once, function, *args)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _shown(value: Cell) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
