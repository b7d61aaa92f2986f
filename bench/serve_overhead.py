"""What serving a token costs beside the model: from the device's thread to the bytes in the socket.

Streams run over HTTP against a server in this process; who reads them is another one. The model is a tiny one
with the tokenizer of the one that is named, and what is drawn is a real text; so it is the server that is
measured. Figures are CPU time of the event loop's thread, which runs all actors and the HTTP server, and of
all other threads but the device's, a token; and for the size of it that time over a decode step of the named
model with as many streams.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import torch
from aiohttp import web

import harness
from asking import WORDS
from follower import follow_elsewhere
from regrow import Engine, EngineSettings
from regrow.actors.served import Served
from regrow.api.app import make_app, make_runner
from regrow.api.models import served_names
from regrow.api.state import GATE
from regrow.config import ServerSettings
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, Row, StepResult
from regrow.models.load import LoadedModel, load_model
from regrow.models.random_models import random_config, random_model
from regrow.policy.keys import Namespace, as_keys
from regrow.policy.plan import ChunkTable

STREAMS = (1, 4)
TOKENS, QUICK_TOKENS = 1024, 512
STEP_S = 0.004  # what a step takes at least, so that it is no race


class Reciting(ModelRunner):
    """Runs a tiny model, and says a given text. device_s: CPU time of its thread when a step ended."""

    text: Sequence[int]
    device_s = 0.0

    def step(self, rows: Sequence[Row]) -> StepResult:
        begin = time.perf_counter()
        result = super().step(rows)
        time.sleep(max(0.0, begin + STEP_S - time.perf_counter()))
        self.device_s = time.thread_time()
        said = tuple((self.text[row.counter % len(self.text)],) for row in rows)
        return replace(result, tokens=said)


def recited(loaded: LoadedModel) -> Served:
    config = random_config("llama", "tiny")
    config.vocab_size = loaded.tokenizer.vocab_size
    module = random_model(config, torch.float32).requires_grad_(False)
    runner = Reciting(module, max(STREAMS), 2048, "cache")
    prose = ", ".join(" ".join(WORDS[i : i + 5]) for i in range(len(WORDS) - 5))
    runner.text = loaded.tokenizer.encode(prose, False, 4096).tolist()
    return Served(
        name=loaded.name,
        runner=runner,
        tokenizer=loaded.tokenizer,
        table=ChunkTable.uniform(256),
        namespace=Namespace.of("recited"),
        exact="cache",
        default_sampling=loaded.default_sampling,
        budget=0,
    )


@asynccontextmanager
async def serving(served: Served) -> AsyncIterator[str]:
    """Give the URL of a server with an engine over `served`."""
    settings = ServerSettings(port=0)
    async with Engine.open(EngineSettings(parallel=max(STREAMS)), served=served) as engine:
        app = make_app(None, settings)
        app[GATE].open(engine, served_names(engine.info, settings)[0])
        runner = make_runner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def cost(url: str, device: Reciting, streams: int, tokens: int) -> tuple[float, float]:
    """Return the microseconds a token of the event loop's thread, and of the others but the device's."""
    loop_s, all_s, device_s = time.thread_time(), time.process_time(), device.device_s
    came = await follow_elsewhere(url, streams, tokens)
    assert came == streams * tokens, f"{came} tokens came"
    loop_s = time.thread_time() - loop_s
    rest_s = time.process_time() - all_s - loop_s - (device.device_s - device_s)
    return loop_s / (streams * tokens) * 1e6, rest_s / (streams * tokens) * 1e6


def steps(loaded: LoadedModel, streams: int) -> float:
    """Return the seconds of a decode step of the model with so many streams."""
    runner = ModelRunner(loaded.module, streams, 256, "cache")
    seconds = []
    with torch.inference_mode():
        for slot in range(streams):
            runner.read(Chunk(slot, 0, as_keys([1, 2, 3])))
            runner.join(slot)
        for _ in range(16):
            rows = [Row(slot, 1, runner.length(slot), loaded.default_sampling) for slot in range(streams)]
            begin = time.perf_counter()
            runner.step(rows)
            seconds.append(time.perf_counter() - begin)
            for slot in range(streams):
                runner.commit(slot, 1)
    return statistics.median(seconds)


async def measure(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    torch.set_num_threads(1)  # threads that spin for the next product would be counted here
    loaded = load_model(opts.model)
    tokens, repeats = (QUICK_TOKENS, 3) if opts.quick else (TOKENS, 5)
    served = recited(loaded)
    rows: list[dict[str, harness.Cell]] = []
    async with serving(served) as url:
        assert isinstance(served.runner, Reciting)
        await cost(url, served.runner, 1, tokens)
        for streams in STREAMS:
            costs = [await cost(url, served.runner, streams, tokens) for _ in range(repeats)]
            loop, rest = (statistics.median(part) for part in zip(*costs, strict=True))
            step = steps(loaded, streams)
            rows.append(
                {
                    "streams": streams,
                    "tokens": tokens,
                    "loop us/token": loop,
                    "other threads us/token": rest,
                    "over a step": (loop + rest) * streams / 1e6 / step,
                }
            )
    return rows


def main() -> None:
    opts = harness.options("serve_overhead", __doc__ or "")
    rows = asyncio.run(measure(opts))
    harness.report("serve_overhead", opts, "What serving costs beside the model", rows)


if __name__ == "__main__":
    main()
