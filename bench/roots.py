"""A new chat under a system prompt that is known: what it reads, and when its first token comes.

The system prompt (about 4,000 tokens) is held by an idle slot, by a slot that is decoding, by a parked
conversation, or by nobody but the root itself; the new chat comes alone or beside two requests that decode
(the holder is one of them where it decodes). The control has its cache off. Every round has a system prompt
of its own.

The floor is reading only the new tokens, in place, once the engine is idle; cold is reading the whole prompt
of the first chat, beside nothing. Both are measured in the same round as the figure they divide; where the
cache is off there is no floor. `new` counts
the tokens that the two chats do not share; the last one of a prompt is not read but fed by the first step.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

import harness
from asking import Answered, Texts, ask, busy, decoding, lone_budget, lone_tokens
from regrow import Engine, EngineSettings, GenerateRequest
from regrow.policy.keys import common_prefix

ROOT = 4000
CONTEXT = 8192
QUESTION = 30
STREAMS = 2
CALM_S = 0.3  # before each chat: streams get what they are owed, and every one meets as cold a machine
IN_PLACE = 3  # chats that the floor is the fastest of
Holder = Literal["idle", "decoding", "parked", "gone", "cache off"]
SLOTS: Mapping[Holder, int] = {"idle": 4, "decoding": 3, "parked": 3, "gone": 3, "cache off": 3}


@dataclass(frozen=True, slots=True)
class Round:
    """The new chat; its new tokens; seconds to the first token of the first chat, and of the floor if any."""

    chat: Answered
    new: int
    cold: float
    floor: float | None


class Case:
    """One way to hold the system prompt, on an engine of its own."""

    def __init__(self, engine: Engine, texts: Texts, holder: Holder) -> None:
        self._engine, self._texts, self._holder = engine, texts, holder

    async def round(self, beside: bool) -> Round:
        """Read a new system prompt, bring about the case, open the new chat."""
        engine, system = self._engine, self._texts.of(ROOT)
        first = self._chat(system, lone_tokens(engine) if self._holder == "gone" else QUESTION)
        second = self._chat(system)
        async with AsyncExitStack() as streams:
            if self._holder == "decoding":
                cold = await streams.enter_async_context(decoding(engine, first))
            else:
                cold = (await ask(engine, first)).seconds
            if self._holder in ("parked", "gone"):
                await busy(engine, streams, STREAMS, self._texts)
                await ask(engine, self._chat(self._texts.of(QUESTION)))  # takes the only slot that is left
            if beside:
                await busy(engine, streams, STREAMS, self._texts)
            elif self._holder != "decoding":
                await streams.aclose()
            await asyncio.sleep(CALM_S)
            answered = await ask(engine, second)
        floor = await self._in_place(system) if engine.settings.cache else None
        keys = [engine.tokenizer.encode_chat(request.messages, (), {}) for request in (first, second)]
        new = len(keys[1]) - (common_prefix(*keys) if engine.settings.cache else 0)
        return Round(answered, new, cold, floor)

    async def _in_place(self, system: str) -> float:
        """Open chats until some had their system prompt in their slot; return the seconds of the fastest."""
        seconds: list[float] = []
        for _ in range(self._engine.settings.parallel + IN_PLACE):
            await asyncio.sleep(CALM_S)
            answered = await ask(self._engine, self._chat(system))
            if answered.reuse.source == "checkpoint":
                seconds.append(answered.seconds)
        return min(seconds)

    def _chat(self, system: str, tokens: int = QUESTION) -> GenerateRequest:
        chat = self._texts.chat(system, self._texts.of(tokens))
        return GenerateRequest(messages=chat, max_tokens=2, ignore_eos=True)


def row(holder: Holder, beside: bool, rounds: Sequence[Round]) -> dict[str, harness.Cell]:
    """The counts of the round that read most beyond what was new, and medians."""

    def middle(figure: Callable[[Round], float]) -> float:
        return statistics.median(figure(r) for r in rounds)

    over_floor = [r.chat.seconds / r.floor for r in rounds if r.floor]
    floors = [r.floor / r.cold for r in rounds if r.floor]
    worst = max(rounds, key=lambda r: r.chat.reuse.read - r.new)
    return {
        "holder": holder,
        "beside": STREAMS if beside else 0,
        "source": worst.chat.reuse.source,
        "prompt": worst.chat.prompt,
        "new": worst.new,
        "reused": worst.chat.reuse.reused,
        "read": worst.chat.reuse.read,
        "TTFT s": middle(lambda r: r.chat.seconds),
        "/ floor": statistics.median(over_floor) if over_floor else None,
        "floor / cold": statistics.median(floors) if floors else None,
        "/ cold": middle(lambda r: r.chat.seconds / r.cold),
    }


async def measure(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    def settings(slots: int, *, cache: bool = True, mib: int | None = None) -> EngineSettings:
        return EngineSettings(
            model=opts.model,
            exact=opts.exact,
            quant=opts.quant,
            parallel=slots,
            context=context,
            cache=cache,
            cache_mib=mib,
        )

    rows, context = [], CONTEXT
    async with Engine.open(settings(1)) as engine:
        lone, context = lone_budget(engine, ROOT), max(context, ROOT * 3 // 2 + lone_tokens(engine))
    for holder, slots in SLOTS.items():
        mib = lone if holder == "gone" else None
        async with Engine.open(settings(slots, cache=holder != "cache off", mib=mib)) as engine:
            case = Case(engine, Texts(engine, opts.seed), holder)
            for beside in (False, True):
                rounds = [await case.round(beside) for _ in range(1 if opts.quick else 5)]
                rows.append(row(holder, beside, rounds))
    return rows


def main() -> None:
    opts = harness.options("roots", __doc__ or "")
    harness.report("roots", opts, "A new chat under a known system prompt", asyncio.run(measure(opts)))


if __name__ == "__main__":
    main()
