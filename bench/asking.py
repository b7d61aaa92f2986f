"""Requests to an engine as a bench makes them: answered to the end, or decoding all the while."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from regrow import Engine, GenerateRequest
from regrow.actors.events import Failed, Finished, Reuse, Token
from regrow.actors.run import Run

MIB = 1024 * 1024
WORDS = ("agent", "reads", "file", "runs", "tests", "tells", "rules", "change", "breaks", "then", "which")


@dataclass(frozen=True, slots=True)
class Answered:
    """seconds: from asking until the first token came. prompt: its tokens."""

    tokens: tuple[int, ...]
    seconds: float
    slot: int
    prompt: int
    reuse: Reuse


async def ask(engine: Engine, request: GenerateRequest) -> Answered:
    """Have a request answered to its end; raises what it failed with."""
    begin = time.perf_counter()
    run = await engine.submit(request)
    seconds = None
    tokens = []
    async for event in run:
        if isinstance(event, Token):
            seconds = seconds or time.perf_counter() - begin
            tokens.append(event.id)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            assert seconds is not None and run.slot is not None
            return Answered(tuple(tokens), seconds, run.slot, event.usage.prompt, event.reuse)
    raise AssertionError("a run ends with a terminal event")


@asynccontextmanager
async def decoding(engine: Engine, request: GenerateRequest) -> AsyncIterator[float]:
    """Have a request answered all the while; give the seconds until its first token."""
    begin = time.perf_counter()
    run = await engine.submit(replace(request, max_tokens=None, ignore_eos=True))
    first: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    reader = asyncio.create_task(_follow(run, first))
    try:
        yield await first - begin
        assert not reader.done(), "the stream has ended: it was beside nothing"
    finally:
        await run.cancel()
        await reader


async def _follow(run: Run, first: "asyncio.Future[float]") -> None:
    async for event in run:
        if isinstance(event, Token) and not first.done():
            first.set_result(time.perf_counter())
        if isinstance(event, Failed) and not first.done():
            first.set_exception(event.error)


async def busy(engine: Engine, streams: AsyncExitStack, count: int, texts: "Texts") -> None:
    """Have `count` requests decode, those that do already among them."""
    while (await engine.status()).engine.running < count:
        request = GenerateRequest(messages=texts.chat(texts.of(20), texts.of(20)))
        await streams.enter_async_context(decoding(engine, request))


class Texts:
    """Texts of about as many tokens as are asked for, no two alike."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._random = random.Random(seed)
        self._words_per_token = 1000 / len(engine.tokenizer.encode(self._words(1000)))

    def of(self, tokens: int) -> str:
        return f"{self._random.randrange(10**6)} {self._words(round(tokens * self._words_per_token))}."

    @staticmethod
    def chat(system: str, *turns: str) -> tuple[dict[str, str], ...]:
        """Return the messages of a chat whose turns alternate, the user's first."""
        spoken = ({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns))
        return {"role": "system", "content": system}, *spoken

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=max(count, 1)))


def lone_tokens(engine: Engine) -> int:
    """Return how long a question must be for its chat not to fit into `lone_budget`."""
    info = engine.info
    return max(256, (8 * info.bytes_per_checkpoint + 2 * MIB) // info.bytes_per_token)


def lone_budget(engine: Engine, root: int) -> int:
    """Return MiB that hold the cells of a system prompt and the states of all slots, and not much more."""
    info = engine.info
    return -(-(int(root * 1.1) * (info.bytes_per_token + 8) + 10 * info.bytes_per_checkpoint) // MIB)
