"""Bits that differ by how a prompt arrived: none may, in exactness mode full (V3).

One prompt of several turns is answered on an engine with its cache off, alone: that is the reference. Then
it arrives in every other way: read cold, gone on with where it ended, resumed from each cut of its plan,
from another idle slot, from a donor that decodes meanwhile, from a parked copy, from a root whose
conversation is gone, after waiting for the chat that reads its system prompt; each alone and beside other
slots that decode. Compared are the digest of every part of the slot (cells of each layer, every running
state), and the tokens of the answer, drawn at temperature 1.

A cache salt of its own keeps each arrival from all others. The exit status is 1 where anything differs, or
where a way was not taken. --model takes names of models, separated by commas; `all` is every random family.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count

import harness
from asking import Answered, Texts, ask, busy, decoding, lone_budget, lone_tokens
from regrow import Engine, EngineSettings, GenerateRequest, SamplingParams
from regrow.actors.messages import DigestRequest
from regrow.gpu.types import Digest
from regrow.models.random_models import FAMILIES
from regrow.policy.checkpoints import system_end
from regrow.policy.plan import ReadPlan

QUICK = ("random:llama", "random:gemma3", "random:qwen3_5", "random:falcon_h1")
CHUNK = 64
SLOTS = 4
ANSWER = 12
SYSTEM, TURN = 5 * CHUNK, 2 * CHUNK + 20  # tokens
BESIDE = (0, 2)
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a prompt came: where its answer began, and what the slot held after it."""

    answered: Answered
    digest: Digest

    def differing(self, reference: "Arrival") -> int:
        """Return how many parts and tokens differ."""
        ours, theirs = self.digest.parts, reference.digest.parts
        parts = sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
        pairs = zip(self.answered.tokens, reference.answered.tokens, strict=False)
        missing = abs(len(self.answered.tokens) - len(reference.answered.tokens))
        return parts + sum(a != b for a, b in pairs) + missing

    @property
    def compared(self) -> int:
        return len(self.digest.parts) + len(self.answered.tokens)


class Ways:
    """The ways to arrive on one engine. streams: how many slots decode beside each arrival."""

    def __init__(
        self, engine: Engine, texts: Texts, system: str, prompt: Sequence[int], plan: ReadPlan
    ) -> None:
        self._engine, self._texts, self._system = engine, texts, system
        self._prompt, self._plan = prompt, plan
        self._salts = count()
        self.streams = 0

    async def cold(self) -> list[Arrival]:
        return [await self._arrive(self._salt())]

    async def again(self) -> list[Arrival]:
        salt = self._salt()
        await self._ask(self._prompt, salt)
        return [await self._arrive(salt)]

    async def every_cut(self) -> list[Arrival]:
        """After another prompt that shares just what is below the cut."""
        found = []
        for cut in self._plan.cuts:
            salt = self._salt()
            await self._ask(self._leaving(cut), salt)
            found.append(await self._arrive(salt, cut))
        return found

    async def idle_slot(self) -> list[Arrival]:
        salt = self._salt()
        await self._ask(self._sibling(), salt)
        return [await self._arrive(salt, self._root)]

    async def busy_donor(self) -> list[Arrival]:
        salt = self._salt()
        async with decoding(self._engine, self._request(self._sibling(), salt)):
            return [await self._arrive(salt, self._root)]

    async def parked(self) -> list[Arrival]:
        """The whole prompt, then the beginning of it."""
        found = []
        for before in (self._prompt, self._sibling()):
            salt = self._salt()
            await self._ask(before, salt)
            await self._displace()
            found.append(await self._arrive(salt))
            assert found[-1].answered.reuse.source in ("parked", "root"), found[-1].answered.reuse
        return found

    async def after_waiting(self) -> list[Arrival]:
        salt = self._salt()
        _, arrival = await asyncio.gather(self._ask(self._sibling(), salt), self._arrive(salt, self._root))
        return [arrival]

    async def root_alone(self) -> list[Arrival]:
        """On an engine with room for little more than the root (`lone_budget`)."""
        salt, first = self._salt(), self._sibling(lone_tokens(self._engine))
        await self._ask(first, salt)
        await self._displace()
        kept, *_ = await self._engine.cache_report()
        assert all(parked.tokens < len(first) - CHUNK for parked in kept.parked), kept.parked
        return [await self._arrive(salt, self._root)]

    @property
    def _root(self) -> int:
        return system_end(self._plan)

    def _salt(self) -> str:
        return str(next(self._salts))

    def _leaving(self, cut: int) -> list[int]:
        """Return a prompt that shares the first `cut` tokens and no more."""
        other = self._engine.tokenizer.encode(self._texts.of(2 * CHUNK)).tolist()
        return [*self._prompt[:cut], (self._prompt[cut] + 1) % 200, *other]

    def _sibling(self, tokens: int = 2 * CHUNK) -> list[int]:
        """Return another chat under the same system prompt."""
        messages = self._texts.chat(self._system, self._texts.of(tokens))
        return self._engine.tokenizer.encode_chat(messages, (), {}).tolist()

    def _request(self, prompt: Sequence[int], salt: str) -> GenerateRequest:
        drawn = SamplingParams(temperature=1.0, seed=1)
        return GenerateRequest(
            prompt=prompt, sampling=drawn, max_tokens=ANSWER, ignore_eos=True, cache_salt=salt
        )

    async def _ask(self, prompt: Sequence[int], salt: str) -> Answered:
        return await ask(self._engine, self._request(prompt, salt))

    async def _arrive(self, salt: str, reused: int | None = None) -> Arrival:
        """Let the prompt arrive; raises AssertionError where not just `reused` tokens of it were known."""
        async with AsyncExitStack() as streams:
            await busy(self._engine, streams, self.streams, self._texts)
            answered = await self._ask(self._prompt, salt)
            digest = await self._engine.slot(answered.slot).ask(DigestRequest(), DEADLINE_S)
        assert reused in (None, answered.reuse.reused), f"{answered.reuse} instead of {reused}"
        return Arrival(answered, digest)

    async def _displace(self) -> None:
        """Give every slot to somebody else."""
        async with AsyncExitStack() as streams:
            await busy(self._engine, streams, SLOTS, self._texts)


def row(model: str, name: str, arrivals: Sequence[Arrival], reference: Arrival) -> dict[str, harness.Cell]:
    reuses = [arrival.answered.reuse for arrival in arrivals]
    return {
        "model": model.removeprefix("random:"),
        "way": name,
        "arrivals": len(arrivals),
        "sources": ", ".join(sorted({reuse.source for reuse in reuses})),
        "reused": f"{min(r.reused for r in reuses)}-{max(r.reused for r in reuses)}",
        "compared": sum(arrival.compared for arrival in arrivals),
        "differing": sum(arrival.differing(reference) for arrival in arrivals),
    }


async def measure(model: str, opts: harness.Options) -> list[dict[str, harness.Cell]]:
    """Return a row for each way of arriving."""
    base = EngineSettings(
        model=model,
        exact="full",
        parallel=SLOTS,
        context=4096,
        chunk=CHUNK,
        checkpoint_every=CHUNK,
        checkpoints=64,
    )
    async with Engine.open(replace(base, cache=False)) as engine:
        texts = Texts(engine, opts.seed)
        system, turns = texts.of(SYSTEM), [texts.of(TURN) for _ in range(3)]
        messages = texts.chat(system, *turns)
        ids, plan = await engine.plan_of(GenerateRequest(messages=messages))
        lone = lone_budget(engine, system_end(plan))
        [reference] = await Ways(engine, texts, system, ids, plan).cold()
    rows = []
    async with Engine.open(base) as engine:
        ways = Ways(engine, texts, system, ids, plan)
        for name, way in {
            "cold": ways.cold,
            "again": ways.again,
            "every cut": ways.every_cut,
            "idle slot": ways.idle_slot,
            "busy donor": ways.busy_donor,
            "parked": ways.parked,
            "after waiting": ways.after_waiting,
        }.items():
            rows.append(row(model, name, await _alone_and_beside(ways, way), reference))
    few = replace(base, checkpoints=6, checkpoint_every=0, cache_mib=lone)
    async with Engine.open(few) as engine:
        ways = Ways(engine, texts, system, ids, plan)
        rows.append(row(model, "root alone", await _alone_and_beside(ways, ways.root_alone), reference))
    return rows


async def _alone_and_beside(ways: Ways, way: Callable[[], Awaitable[list[Arrival]]]) -> list[Arrival]:
    found = []
    for ways.streams in BESIDE:
        found += await way()
    return found


def main() -> None:
    opts = replace(harness.options("exact", __doc__ or "", model="all"), exact="full")
    every = QUICK if opts.quick else [f"random:{family}" for family in FAMILIES]
    models = every if opts.model == "all" else opts.model.split(",")
    rows = [row for model in models for row in asyncio.run(measure(model, opts))]
    harness.report("exact", opts, "Parts and tokens that differ by how a prompt arrived", rows)
    differing = sum(int(str(row["differing"])) for row in rows)
    print(f"{sum(int(str(row['compared'])) for row in rows)} compared, {differing} differ")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
