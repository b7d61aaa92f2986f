"""Reading: tokens a second of prompts of several lengths, against `transformers` and `llama-server`.

The prompt is new each time, and every engine reads it in turn; a ratio is the median of the ratios of such
pairs. Ours is the time to the first token, all actors included; that of `transformers` is
one forward pass of the same weights and dtype with the logits of the last token; that of `llama-server`
(--llama-server) what it says itself. It gets the demo's own file, or those given with --gguf.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

import harness
from peer import llama_server
from regrow import Engine, EngineSettings, GenerateRequest
from regrow.actors.events import Token
from regrow.models.demo import demo_path
from regrow.models.load import load_model
from regrow.models.once import model_directory

LENGTHS = (128, 512, 2_048, 4_096, 8_192)
WARMED = 512  # a pass before those that count, up to this length
LEFT = 8  # cells of the context for the answer
FIRST, LAST = 20, 220  # token ids, known to every model


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST, LAST) for _ in range(length)]


async def engine_rate(engine: Engine, ids: Sequence[int]) -> float:
    begin = time.perf_counter()
    run = await engine.submit(GenerateRequest(prompt=ids, max_tokens=1, ignore_eos=True, cache="off"))
    [first] = [event.at async for event in run if isinstance(event, Token)]
    return len(ids) / (first - begin)


@torch.inference_mode()
def stock_rate(model: torch.nn.Module, ids: Sequence[int]) -> float:
    tokens = torch.tensor([ids])
    begin = time.perf_counter()
    model(tokens, use_cache=True, logits_to_keep=1)
    return len(ids) / (time.perf_counter() - begin)


def row(length: int, rates: Mapping[str, Sequence[float]]) -> dict[str, harness.Cell]:
    ours = rates["regrow"]
    cells: dict[str, harness.Cell] = {"tokens": length, "tokens/s": harness.median(ours)}
    for name, theirs in rates.items():
        if name != "regrow":
            cells[name] = harness.median(theirs)
            cells[f"over {name}"] = harness.median([a / b for a, b in zip(ours, theirs, strict=True)])
    return cells


async def measure(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    lengths, repeats = (LENGTHS[:3], 2) if opts.quick else (LENGTHS, 5)
    rng = random.Random(opts.seed)
    files: Sequence[Path] = ()
    if opts.llama_server is not None:
        files = opts.gguf or (demo_path(model_directory()),)
    loaded = await harness.apart(load_model, opts.model)
    context = min(max(lengths), loaded.context)
    settings = EngineSettings(
        model=opts.model, exact=opts.exact, quant=opts.quant, parallel=1, context=context
    )
    rows = []
    with ExitStack() as stack:
        peers = {
            file.stem: stack.enter_context(llama_server(opts.llama_server, file, context))
            for file in files
            if opts.llama_server is not None
        }
        async with Engine.open(settings) as engine:
            for length in (min(length, context - LEFT) for length in lengths):
                rates: dict[str, list[float]] = {name: [] for name in ("regrow", "transformers", *peers)}
                for repeat in range(-1 if length <= WARMED else 0, repeats):
                    ids = prompt(rng, length)
                    once = {
                        "regrow": await engine_rate(engine, ids),
                        "transformers": await harness.apart(stock_rate, loaded.module, ids),
                    }
                    for name, peer in peers.items():
                        once[name] = (await asyncio.to_thread(peer.complete, ids, 1)).read_per_s
                    if repeat >= 0:  # the first one warms up
                        for name, rate in once.items():
                            rates[name].append(rate)
                rows.append(row(length, rates))
    return rows


def main() -> None:
    opts = harness.options("read", __doc__ or "")
    harness.report("read", opts, "Reading against transformers and llama-server", asyncio.run(measure(opts)))


if __name__ == "__main__":
    main()
