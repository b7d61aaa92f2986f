"""Chats come, go on, are edited, cancelled and cut off at random, with and without faults.

Every answer is the one that the device gives to the prompt alone, every request ends once, nothing is left.
"""

import asyncio
from dataclasses import dataclass, field
from random import Random

import pytest

from regrow.policy.request import CacheUse, Exactness, GenerateRequest, SamplingParams
from tests.actors.world import Answer, House, chat, in_house
from tests.world.fake_runner import Operation

CLIENTS = 4
TURNS = 5
ACTORS = ("engine", "cache", "roots", "device", "slot-0", "slot-1", "slot-2")
OPERATIONS: tuple[Operation, ...] = ("read", "step", "snapshot", "mount", "join", "leave")
ENDS = ("length", "cancelled", "DeadlineExceeded")
FAILURES = ("DeviceFailed", "ActorDown", "NonFiniteLogits")


@dataclass
class Client:
    """One person with one chat at a time."""

    house: House
    rng: Random
    contents: list[str] = field(default_factory=list)
    system: int = 0

    def request(self) -> GenerateRequest:
        rng = self.rng
        if not self.contents or rng.random() < 0.3:
            self.system = rng.randrange(3)
            self.contents = [f"{rng.randrange(4)} " * rng.choice([1, 10, 60])]
        elif len(self.contents) > 2 and rng.random() < 0.3:
            del self.contents[-2:]
            self.contents[-1] = f"no, {rng.randrange(4)}"
        uses: list[CacheUse] = ["on", "on", "on", "on", "on", "off", "read-only"]
        content = f"You are number {self.system}. " * (4 + 6 * self.system)
        return chat(
            *self.contents,
            system={"role": "system", "content": content},
            max_tokens=rng.choice([1, 2, 5, 20]),
            cache=rng.choice(uses),
            cache_salt=rng.choice([None, None, None, "salt"]),
            priority=rng.randrange(2),
            sampling=SamplingParams(temperature=rng.randrange(2), seed=rng.randrange(5)),
            deadline_s=rng.choice([None, None, None, 0.7]),
        )

    async def turn(self) -> Answer:
        request = self.request()
        run = await self.house.submit(request)
        if self.rng.random() < 0.25:
            self.house.leaves(run, self.rng.random() * 2)
        answer = await self.house.ended(run)
        expected = self.house.truth(request)
        assert answer.tokens == expected[: len(answer.tokens)]
        assert answer.tokens == expected or answer.reason != "length"
        self.contents += [answer.text, f"{self.rng.randrange(4)}, please"]
        return answer

    async def lives(self, ends: tuple[str, ...]) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(self.rng.random())
            assert (await self.turn()).reason in ends


async def crowd(house: House, *ends: str) -> None:
    rng = house.world.rng
    await asyncio.gather(*(Client(house, Random(rng.random())).lives(ends) for _ in range(CLIENTS)))


@pytest.mark.parametrize("exact", ["full", "cache", "off"])
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
@pytest.mark.parametrize("budget", [0, 8_000, 60_000, 1 << 20])
def test_every_answer_is_that_of_the_prompt_alone(exact: Exactness, hybrid: bool, budget: int) -> None:
    async def scenario(house: House) -> None:
        await crowd(house, *ENDS)

    in_house(
        scenario,
        range(4),
        slots=3,
        exact=exact,
        hybrid=hybrid,
        budget=budget,
        root_min=32,
        checkpoint_every=128,
    )


@pytest.mark.parametrize("seed", range(20))
def test_with_faults_too(seed: int) -> None:
    async def scenario(house: House) -> None:
        rng = house.world.rng
        for _ in range(2):
            house.runner.faults[rng.choice(OPERATIONS), rng.randrange(1, 60)] = OSError("the bus fell off")
        for _ in range(2):
            house.runner.nan_at.add((rng.randrange(3), rng.randrange(400)))
        for name in rng.sample(ACTORS, 3):
            house.world.call_later(rng.random() * 10, house.crash, name)
        await crowd(house, *ENDS, *FAILURES)
        await asyncio.sleep(10)  # until the last crash

    kept = (6, 1, 2)[seed % 3]
    in_house(scenario, [seed], slots=3, budget=60_000, root_min=32, checkpoint_every=128, checkpoints=kept)
