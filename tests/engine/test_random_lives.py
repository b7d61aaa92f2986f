"""Random lives on real architectures: whatever was read, copied, parked, evicted or cancelled before, every
answer and every digest is that of an engine that keeps nothing (V3, mode full).

Each seed drives one engine with a small budget through chats, continuations, edits, branches, cancels, salts
and injected non-finite logits, several requests at a time. The oracle reads every prompt from 0.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from regrow.actors.engine import Engine
from regrow.actors.events import Failed, Finished, Token
from regrow.actors.messages import DigestRequest
from regrow.actors.served import Served, load_served
from regrow.config import EngineSettings
from regrow.errors import BadRequest, NonFiniteLogits
from regrow.gpu.types import Row, Runner, StepResult
from regrow.policy.request import GenerateRequest, SamplingParams
from tests.long_form import many

FAMILIES = ("qwen3_5", "qwen4_exp", "falcon_h1", "lfm2", "llama")
SEEDS = range(1, 1 + many(1, long=10))
ACTIONS = 14
SLOTS = 3
SYSTEMS = ("You answer in one word. " * 9, "You are a pirate and speak like one. " * 6)
WORDS = [
    "red",
    "green",
    "blue",
    "what",
    "where",
    "tell",
    "me",
    "more",
    "of",
    "the",
    "next",
    "one",
    "and",
    "why",
    "not",
    "another",
    "thing",
    "please",
]


class Faulty:
    """A runner whose next decode step gives one slot no finite logits, when it is told so."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.spoil: int | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def step(self, rows: Sequence[Row]) -> StepResult:
        result = self._runner.step(rows)
        if self.spoil not in [row.slot for row in rows]:
            return result
        spoiled = tuple(
            () if row.slot == self.spoil else t for row, t in zip(rows, result.tokens, strict=True)
        )
        self.spoil = None
        return replace(result, tokens=spoiled)


@dataclass(frozen=True, slots=True)
class Told:
    """What a request came to: its tokens, how it ended, and the digest of its slot where that was still
    idle."""

    tokens: tuple[int, ...]
    end: Finished | Failed
    digest: str | None


class Life:
    """One seed's conversations on an engine, and the oracle that every answer is held against."""

    def __init__(self, seed: int, engine: Engine, oracle: Engine, runner: Faulty) -> None:
        self.rng = random.Random(seed)
        self.engine, self.oracle, self.runner = engine, oracle, runner
        self.chats: list[list[dict[str, str]]] = []
        self.checked = 0
        self.reused = 0

    def words(self, n: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=n))

    def next_request(self) -> GenerateRequest:
        """A new chat, a continuation, an edit of the last question, or a branch from an older turn."""
        kind = self.rng.choice(("new", "continue", "continue", "edit", "branch"))
        if kind == "new" or not self.chats:
            messages = [{"role": "system", "content": self.rng.choice(SYSTEMS)}]
            self.chats.append(messages)
        else:
            messages = self.rng.choice(self.chats)
            if kind == "edit" and len(messages) > 1:
                messages.pop()
            elif kind == "branch" and len(messages) > 3:
                messages = messages[: self.rng.randrange(3, len(messages), 2)]
                self.chats.append(messages)
        if messages[-1]["role"] == "user":
            messages.append({"role": "assistant", "content": self.words(self.rng.randint(1, 30))})
        messages.append({"role": "user", "content": self.words(self.rng.randint(1, 40))})
        return GenerateRequest(
            messages=tuple(messages),
            max_tokens=self.rng.randint(1, 6),
            sampling=SamplingParams(temperature=self.rng.choice((0.0, 0.9)), seed=self.rng.randrange(1000)),
            cache_salt=self.rng.choice((None, None, None, "another")),
        )

    async def run(self, engine: Engine, request: GenerateRequest, cancel_after: int | None = None) -> Told:
        run = await engine.submit(request)
        tokens: list[int] = []
        seen = 0
        async for event in run:
            seen += 1
            if seen == cancel_after:
                await run.cancel()
            if isinstance(event, Token):
                tokens.append(event.id)
            last = event
        assert isinstance(last, Finished | Failed)
        try:
            digest = (
                (await engine.slot(run.slot).ask(DigestRequest(), 60)).value if run.slot is not None else None
            )
        except BadRequest:
            digest = None  # the slot has the next request already
        return Told(tuple(tokens), last, digest)

    async def checked_run(self, request: GenerateRequest) -> None:
        told = await self.run(self.engine, request)
        if isinstance(told.end, Failed):
            assert isinstance(told.end.error, NonFiniteLogits)
            told = await self.run(self.engine, request)
        truth = await self.run(self.oracle, replace(request, cache="off"))
        assert truth.end.reuse.reused == 0
        assert told.tokens == truth.tokens
        assert (
            told.end.usage.prompt == truth.end.usage.prompt == told.end.reuse.read + told.end.reuse.reused + 1
        )
        self.checked += 1
        self.reused += told.end.reuse.reused

    async def go_on(self) -> None:
        """Up to three requests at once; now and then one is cancelled, or a slot's logits are spoiled."""
        if self.rng.random() < 0.15:
            self.runner.spoil = self.rng.randrange(SLOTS)
        requests = [self.next_request() for _ in range(self.rng.randint(1, 3))]
        if self.rng.random() < 0.3:
            await self.run(self.engine, requests[0], cancel_after=self.rng.randint(1, 6))
        await asyncio.gather(*(self.checked_run(request) for request in requests))
        for actor in self.engine.lives.values():
            actor.check_integrity()

    async def check_digests(self) -> None:
        """Alone on an engine at rest: the slot's digest equals that of reading from 0."""
        request = self.next_request()
        self.runner.spoil = None
        told = await self.run(self.engine, request)
        truth = await self.run(self.oracle, replace(request, cache="off"))
        assert told.tokens == truth.tokens
        assert told.digest == truth.digest


def settings_of(family: str) -> EngineSettings:
    return EngineSettings(
        model=f"random:{family}",
        dtype="float32",
        parallel=SLOTS,
        context=2048,
        chunk=64,
        exact="full",
        debug=True,
    )


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_answer_is_that_of_an_engine_that_keeps_nothing(family: str) -> None:
    settings = settings_of(family)
    served: Served = load_served(settings, lambda text, share: None)
    fresh: Served = load_served(settings, lambda text, share: None)
    geometry = served.runner.geometry
    small = 6 * geometry.bytes_per_checkpoint + 1200 * geometry.bytes_per_token  # things must be evicted
    for seed in SEEDS:
        served.runner.reset()
        faulty = Faulty(served.runner)
        async with (
            Engine.open(settings, served=replace(served, runner=faulty, budget=small)) as engine,
            Engine.open(replace(settings, cache=False), served=replace(fresh, budget=0)) as oracle,
        ):
            life = Life(seed, engine, oracle, faulty)
            for _ in range(ACTIONS):
                await life.go_on()
            await life.check_digests()
            report, *_ = await engine.cache_report()
        assert life.reused > 0
        assert report.peak <= small
