"""Decoding: tokens a second with 1, 2 and 4 streams and at depth, against `transformers` and `llama-server`.

All run in turn with the same threads; a ratio is the median of the ratios of such rounds. `transformers`
generate has the same weights in the same dtype, and one stream. `llama-server` (--llama-server) gets the
demo's own file, or those given with --gguf, and as many streams; its rate is what it says itself. The last
column is how fast a stream's weights are read, over how fast memory can be read at all.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

import harness
from peer import Peer, llama_server
from regrow import Engine, EngineSettings, GenerateRequest
from regrow.actors.events import Token
from regrow.models.demo import demo_path
from regrow.models.load import load_model
from regrow.models.once import model_directory

PROMPT = 32
DEPTH = 4_097  # one more than a cut, so that a prompt that was read is not read again
CASES = ((1, PROMPT), (2, PROMPT), (4, PROMPT), (1, DEPTH), (4, DEPTH))  # streams, tokens before the first
SPARE = 64


def prompt(seed: int, length: int, stream: int = 0) -> list[int]:
    return [(seed * 31 + stream * 7 + i * i) % 200 + 20 for i in range(length)]


async def token_times(engine: Engine, ids: Sequence[int], tokens: int) -> list[float]:
    """Return when each token of one answer came, in seconds."""
    run = await engine.submit(GenerateRequest(prompt=ids, max_tokens=tokens, ignore_eos=True))
    return [event.at async for event in run if isinstance(event, Token)]


async def engine_rate(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return tokens a second over all streams, while all of them run."""
    times = await asyncio.gather(*(token_times(engine, ids, tokens) for ids in prompts))
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(begin < at <= end for t in times for at in t) / (end - begin)


@torch.inference_mode()
def generate_rate(model: torch.nn.Module, prompt: Sequence[int], tokens: int) -> float:
    """Return tokens a second of one stream of `transformers` generate, greedy; the prompt's time is taken
    off."""
    ids = torch.tensor([prompt])
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


async def peer_rate(peer: Peer, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return tokens a second over all streams, while all of them run."""
    asked = (asyncio.to_thread(peer.complete, ids, tokens, keep=True) for ids in prompts)
    return sum(timings.drawn_per_s for timings in await asyncio.gather(*asked))


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
    stock = (await harness.apart(load_model, opts.model)).module
    limit = await harness.apart(bandwidth) / sum(p.nbytes for p in stock.parameters())
    most = max(streams for streams, _ in CASES)
    context = DEPTH + most * tokens + SPARE
    settings = EngineSettings(
        model=opts.model, exact=opts.exact, quant=opts.quant, parallel=most, context=context
    )
    rows: list[dict[str, harness.Cell]] = []
    with ExitStack() as stack:
        peers = {
            file.stem: stack.enter_context(llama_server(opts.llama_server, file, context * most, most))
            for file in (opts.gguf or (demo_path(model_directory()),) if opts.llama_server else ())
        }
        async with Engine.open(settings) as engine:
            for streams, depth in CASES:
                drawn = tokens * (streams if depth == DEPTH else 1)  # they begin one after the other
                rates: dict[str, list[float]] = {}
                for repeat in range(-1, repeats):  # the first one warms up, and has the prompts read
                    prompts = [prompt(opts.seed + depth, depth, stream) for stream in range(streams)]
                    once = {"regrow": await engine_rate(engine, prompts, drawn)}
                    if depth == PROMPT:
                        once["generate"] = await harness.apart(generate_rate, stock, prompts[0], tokens)
                    for name, peer in peers.items():
                        once[name] = await peer_rate(peer, prompts, drawn)
                    if repeat >= 0 and once["regrow"] <= 0:
                        raise SystemExit("the streams did not run at once: they need more tokens")
                    for name, rate in once.items() if repeat >= 0 else ():
                        rates.setdefault(name, []).append(rate)
                cells: dict[str, harness.Cell] = {"streams": streams, "depth": depth}
                cells["tokens/s"] = harness.median(rates["regrow"])
                for name in ("generate", *peers):
                    cells[name] = harness.median(rates[name]) if name in rates else None
                    cells[f"over {name}"] = (
                        harness.median([a / b for a, b in zip(rates["regrow"], rates[name], strict=True)])
                        if name in rates
                        else None
                    )
                cells["of memory rate"] = harness.median(rates["regrow"]) / streams / limit
                rows.append(cells)
    return rows


def main() -> None:
    opts = harness.options("decode", __doc__ or "")
    title = f"Decoding against transformers generate and llama-server, quant {opts.quant}"
    harness.report("decode", opts, title, asyncio.run(measure(opts)))


if __name__ == "__main__":
    main()
