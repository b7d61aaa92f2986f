"""Clients of a simulated life: patient ones, and those that leave, flood, ask too much or stop reading."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from regrow.actors.events import Event, Failed, Finished
from regrow.actors.run import Run
from regrow.errors import (
    ActorDown,
    BadRequest,
    DeadlineExceeded,
    DeviceFailed,
    Draining,
    NonFiniteLogits,
    Overloaded,
    SlowConsumer,
)
from regrow.policy.request import GenerateRequest
from tests.actors.test_random import Client
from tests.actors.world import Answer, House, check_life, raw, text

REFUSED = (ActorDown, BadRequest, DeadlineExceeded, Draining, Overloaded)
FAILED = (ActorDown, DeadlineExceeded, DeviceFailed, Draining, NonFiniteLogits, Overloaded, SlowConsumer)
NEVER_S = 40_000.0  # nothing that a client waits for takes so long


@dataclass
class Book:
    """What became of every request: `ends` counts the terminal events of each run."""

    ends: Counter[str] = field(default_factory=Counter)
    started: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def heard(self, run: str, event: Event) -> None:
        if isinstance(event, Finished | Failed):
            self.ends[run] += 1
            assert self.ends[run] == 1, f"{run} has ended twice"


@dataclass
class Crowd:
    """All clients of a life, over all its houses. `at_work`: their tasks."""

    rng: Random
    book: Book
    house: House
    at_work: set["asyncio.Task[None]"] = field(default_factory=set)
    chats: list[Client] = field(default_factory=list)
    found: list[BaseException] = field(default_factory=list)

    def come(self) -> str:
        """A client or a flood of them acts."""
        if not self.chats or self.rng.random() < 0.3:
            self.chats.append(Client(self.house, Random(self.rng.random())))
        client = self.rng.choice(self.chats)
        client.house = self.house
        request = client.request()
        kind = self.rng.choice(["reads", "reads", "reads", "leaves", "stops", "floods", "too much"])
        if kind == "too much":
            request = raw(text(self.rng.randrange(9), self.house.runner.context + self.rng.randint(-3, 9)))
        for _ in range(self.rng.randint(3, 9) if kind == "floods" else 1):
            talk = client if kind == "reads" else None
            task = asyncio.ensure_future(self.live(request, kind, Random(self.rng.random()), talk))
            self.at_work.add(task)
            task.add_done_callback(self.done)
        return f"client {kind}: {len(request.messages or request.prompt or ())}"

    def done(self, task: "asyncio.Task[None]") -> None:
        self.at_work.discard(task)
        if (error := task.exception()) is not None:
            self.found.append(error)

    def raise_found(self) -> None:
        """Raise what a client has found wrong."""
        if self.found:
            raise self.found[0]

    async def live(self, request: GenerateRequest, kind: str, rng: Random, talk: Client | None) -> None:
        """Live one request to its end, and hold it against what the device says to the prompt alone."""
        self.book.started += 1
        house = self.house
        try:
            if kind == "leaves" and rng.random() < 0.3:  # while it is submitted
                async with asyncio.timeout(rng.choice([0.0, 0.001, 0.2])):
                    run = await house.submit(request)
            else:
                run = await house.submit(request)
        except (*REFUSED, TimeoutError) as error:
            self.book.outcomes[f"refused: {type(error).__name__}"] += 1
            return
        if kind == "leaves":
            leaving = asyncio.ensure_future(leave(run, rng.random() * 2))
        if kind == "stops":
            await asyncio.sleep(rng.choice([5, 200, 2000]))
        answer = await read(run)
        if kind == "leaves":
            await leaving
        self.check(house, request, answer)
        if talk is not None:
            talk.contents += [answer.text or "-", f"{rng.randrange(4)}, please"]

    def check(self, house: House, request: GenerateRequest, answer: Answer) -> None:
        check_life(answer.events)
        expected = house.truth(request)
        assert answer.tokens == expected[: len(answer.tokens)], "an answer differs from the oracle's"
        assert answer.tokens == expected or answer.reason != "length", "an answer is not complete"
        if isinstance(answer.end, Failed):
            assert isinstance(answer.end.error, FAILED), f"failed with {answer.end.error!r}"
        self.book.outcomes[answer.reason] += 1


async def leave(run: Run, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await run.cancel()


async def read(run: Run) -> Answer:
    """Read a run to its end; a run that never ends is an error."""
    async with asyncio.timeout(NEVER_S):
        return Answer(tuple([event async for event in run]))
