"""How long two running streams wait for their next token while something else goes on beside them.

A root of about 4,000 tokens is mounted from another slot, a conversation of that length parked, another one
brought back from host memory, a prompt of that length read, with a checkpoint now and then and (for a model
with running state) at every chunk. Calm is the same streams just before and just after, with nothing beside
them: they get longer, and slower, meanwhile.

`lost` is what the streams lost of their pace, over two seconds or as long as it took, against the mean of
what was usual before and after. Of copies only the time until the slot is mounted counts, not the reading
after it, with which the gap that the mount ended in goes on. A prompt that is read takes the streams' time by
right: as much as `--decode-share` leaves it.
"""

import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import harness
from asking import Texts, ask
from regrow import Engine, EngineSettings, GenerateRequest
from regrow.actors.events import Event, Failed, Mounted, Placed, ReadDone, Token
from regrow.actors.run import Run

LENGTH = 4000
CONTEXT = 8192
QUESTION = 20
STREAMS = 2
CALM_S = 2.0
Part = Literal["mounting", "reading"]


@dataclass
class Streams:
    """Streams that decode until they are stopped, and when each of their tokens came."""

    runs: list[Run] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)

    async def follow(self, run: Run, begun: asyncio.Event) -> None:
        times: list[float] = []
        self.runs.append(run)
        self.times.append(times)
        async for event in run:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Token):
                times.append(event.at)
                begun.set()

    def gaps(self, begin: float, end: float) -> list[float]:
        """The gaps of all streams that lie in this time, in part at least."""
        return [b - a for times in self.times for a, b in pairwise(times) if b > begin and a < end]

    def waited(self, begin: float, end: float, usual: float) -> float:
        """What the gaps of all streams took beyond what is usual, until `end`."""
        gaps = [(a, b) for times in self.times for a, b in pairwise(times) if b > begin and a < end]
        return sum(b - a - usual if b <= end else max(end - a - usual, 0.0) for a, b in gaps)

    @property
    def now(self) -> float:
        return max(times[-1] for times in self.times)


@asynccontextmanager
async def running(engine: Engine, texts: Texts) -> AsyncIterator[Streams]:
    streams = Streams()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            request = GenerateRequest(messages=texts.chat(texts.of(QUESTION), texts.of(QUESTION)))
            run, begun = (
                await engine.submit(replace(request, max_tokens=None, ignore_eos=True)),
                asyncio.Event(),
            )
            tasks.create_task(streams.follow(run, begun))
            await begun.wait()
        yield streams
        for run in streams.runs:
            await run.cancel()


async def span_of(engine: Engine, request: GenerateRequest, part: Part) -> tuple[str, float, float]:
    """Have a request answered; return its source, and when this part of it began and ended."""
    run = await engine.submit(request)
    at: dict[type[Event], float] = {}
    source = ""
    async for event in run:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Placed):
            source = event.source
        at.setdefault(type(event), event.at)
    begin, end = (Placed, Mounted) if part == "mounting" else (Mounted, ReadDone)
    return source, at[begin], at[end]


@dataclass
class Gaps:
    """Seconds between tokens in calm and beside something, and what was lost beside it, as a part."""

    calm: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)

    async def add(self, engine: Engine, streams: Streams, request: GenerateRequest, part: Part) -> None:
        begin = streams.now
        await asyncio.sleep(CALM_S)
        before = streams.gaps(begin, streams.now)
        source, begin, end = await span_of(engine, request, part)
        self.sources.add(source)
        await asyncio.sleep(2 * max(before))  # the gap that it ended in ends
        now = streams.now
        await asyncio.sleep(CALM_S)
        after = streams.gaps(now, streams.now)
        usual = (statistics.median(before) + statistics.median(after)) / 2
        waited = streams.waited(begin, end, usual) / STREAMS
        self.calm += before + after
        self.beside += streams.gaps(begin, end)
        self.lost.append(waited / max(end - begin, 2.0))

    def row(self, what: str) -> dict[str, harness.Cell]:
        return {
            "beside the streams": what,
            "source": ", ".join(sorted(self.sources)),
            "gaps": len(self.beside),
            "median / calm": statistics.median(self.beside) / statistics.median(self.calm),
            "p99 / calm": _p99(self.beside) / _p99(self.calm),
            "longest / calm": max(self.beside) / max(self.calm),
            "longest ms": max(self.beside) * 1e3,
            "calm ms": statistics.median(self.calm) * 1e3,
            "lost %": 100 * statistics.median(self.lost),
        }


def _p99(gaps: Sequence[float]) -> float:
    return sorted(gaps)[int(0.99 * (len(gaps) - 1))]


class Bench:
    """Rounds of each case. What is asked for beside the streams is not kept, so that nothing is parked for it
    but where that is the case."""

    def __init__(self, opts: harness.Options) -> None:
        self._opts = opts
        self._rounds = 1 if opts.quick else 5

    def _engine(self, slots: int, checkpoint_every: int = 16384) -> EngineSettings:
        opts = self._opts
        return EngineSettings(
            model=opts.model,
            exact=opts.exact,
            parallel=slots,
            context=CONTEXT,
            checkpoint_every=checkpoint_every,
        )

    async def mounted(self) -> list[dict[str, harness.Cell]]:
        mounted = Gaps()
        async with Engine.open(self._engine(STREAMS + 2)) as engine:
            texts = Texts(engine, self._opts.seed)
            for _ in range(self._rounds):
                system = texts.of(LENGTH)
                await ask(engine, _asked(texts.chat(system, texts.of(QUESTION))))
                async with running(engine, texts) as streams:
                    chat = _asked(texts.chat(system, texts.of(QUESTION)), keep=False)
                    await mounted.add(engine, streams, chat, "mounting")
        return [mounted.row("a root is mounted")]

    async def parked(self) -> list[dict[str, harness.Cell]]:
        parked, restored = Gaps(), Gaps()
        async with Engine.open(self._engine(STREAMS + 1)) as engine:
            texts = Texts(engine, self._opts.seed)
            for _ in range(self._rounds):
                messages = texts.chat(texts.of(QUESTION), texts.of(LENGTH))
                await ask(engine, _asked(messages))
                async with running(engine, texts) as streams:
                    other = _asked(texts.chat(texts.of(QUESTION), texts.of(QUESTION)), keep=False)
                    await parked.add(engine, streams, other, "mounting")
                    back = _asked(
                        (*messages, *texts.chat("", "", "Yes.", texts.of(QUESTION))[2:]), keep=False
                    )
                    await restored.add(engine, streams, back, "mounting")
        return [parked.row("a conversation is parked"), restored.row("it is restored")]

    async def read(self, what: str, checkpoint_every: int) -> list[dict[str, harness.Cell]]:
        read = Gaps()
        async with Engine.open(self._engine(STREAMS + 1, checkpoint_every)) as engine:
            texts = Texts(engine, self._opts.seed)
            for _ in range(self._rounds):
                async with running(engine, texts) as streams:
                    prompt = _asked(texts.chat(texts.of(QUESTION), texts.of(LENGTH)))
                    await read.add(engine, streams, prompt, "reading")
            hybrid = engine.info.hybrid
        rows = [read.row(what)]
        if hybrid and checkpoint_every > 64:
            rows += await self.read("4,000 tokens are read, a checkpoint at every cut", 64)
        return rows


def _asked(messages: tuple[dict[str, str], ...], *, keep: bool = True) -> GenerateRequest:
    return GenerateRequest(
        messages=messages, max_tokens=2, ignore_eos=True, cache="on" if keep else "read-only"
    )


async def measure(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    bench = Bench(opts)
    return [
        *await bench.mounted(),
        *await bench.parked(),
        *await bench.read("4,000 tokens are read", 16384),
    ]


def main() -> None:
    opts = harness.options("stall", __doc__ or "")
    harness.report("stall", opts, "Gaps between the tokens of two streams", asyncio.run(measure(opts)))


if __name__ == "__main__":
    main()
