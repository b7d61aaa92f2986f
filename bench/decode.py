"""Decoding: tokens a second with 1, 2 and 4 streams, against `transformers` generate on the same weights.

Both run in turn in one process with the same dtype and threads; a ratio is the median of the ratios of such
pairs. The last column is how fast a stream's weights are read, over how fast memory can be read at all.
"""

import asyncio
import time
from collections.abc import Sequence

import torch

import harness
from regrow import Engine, EngineSettings, GenerateRequest
from regrow.actors.events import Token
from regrow.models.load import load_model

PROMPT = 32
STREAMS = (1, 2, 4)


def prompt(seed: int, stream: int = 0) -> list[int]:
    return [(seed * 31 + stream * 7 + i) % 200 + 20 for i in range(PROMPT)]


async def token_times(engine: Engine, ids: Sequence[int], tokens: int) -> list[float]:
    """Return when each token of one answer came, in seconds."""
    run = await engine.submit(GenerateRequest(prompt=ids, max_tokens=tokens, ignore_eos=True, cache="off"))
    return [event.at async for event in run if isinstance(event, Token)]


async def engine_rate(engine: Engine, streams: int, tokens: int, seed: int) -> float:
    """Return tokens a second over all streams, while all of them run."""
    asked = (token_times(engine, prompt(seed, s), tokens) for s in range(streams))
    times = await asyncio.gather(*asked)
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(begin < at <= end for t in times for at in t) / (end - begin)


@torch.inference_mode()
def generate_rate(model: torch.nn.Module, tokens: int, seed: int) -> float:
    """Return tokens a second of one stream of `transformers` generate, greedy; the prompt's time is taken
    off."""
    ids = torch.tensor([prompt(seed)])
    options = {
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(ids),
    }
    spent = []
    for n in (1, tokens):
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=n, min_new_tokens=n, **options)
        spent.append(time.perf_counter() - begin)
    return (tokens - 1) / (spent[1] - spent[0])


def bandwidth() -> float:
    """Return bytes a second at which this process reads memory: the sum of a large tensor, best of three."""
    block = torch.ones(64 * 1024 * 1024)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - begin))
    return best


async def measure(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    tokens, repeats = (32, 3) if opts.quick else (96, 5)
    peer = load_model(opts.model).module
    weight_bytes = sum(p.nbytes for p in peer.parameters())
    limit = bandwidth() / weight_bytes
    settings = EngineSettings(model=opts.model, exact=opts.exact, parallel=max(STREAMS), context=1024)
    rows: list[dict[str, harness.Cell]] = []
    async with Engine.open(settings) as engine:
        await engine_rate(engine, 1, 8, 0)
        for streams in STREAMS:
            ours, theirs = [], []
            for repeat in range(repeats):
                ours.append(await engine_rate(engine, streams, tokens, opts.seed + repeat))
                theirs.append(await asyncio.to_thread(generate_rate, peer, tokens, opts.seed + repeat))
            rows.append(
                {
                    "streams": streams,
                    "tokens/s": harness.median(ours),
                    "generate, 1 stream": harness.median(theirs),
                    "ratio": harness.median([a / b for a, b in zip(ours, theirs, strict=True)]),
                    "of memory rate": harness.median(ours) / streams / limit,
                }
            )
    return rows


def main() -> None:
    opts = harness.options("decode", __doc__ or "")
    harness.report("decode", opts, "Decoding against transformers generate", asyncio.run(measure(opts)))


if __name__ == "__main__":
    main()
