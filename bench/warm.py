"""What a resumed request costs beyond reading its new tokens: preparing it, placing it, mounting, every hop.

An idle engine, a conversation of about 4,000 tokens. `turn` goes on with it, in place; `chat` opens another
one under its system prompt in a slot of its own, so that its cells are copied. Fixed is the time to the first
token without what the device took to read the new tokens, which gives that token; it is told over one decode
step, with the parts of it that can be told apart: `prepare` (render, tokenise, plan) and `mount`. The control
has met none of the messages before, so that all of them are tokenised.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import harness
from asking import Texts, ask
from regrow import Engine, EngineSettings, GenerateRequest

ROOT = 4000
CONTEXT = 8192
QUESTION = 30
ANSWER = {"role": "assistant", "content": "Yes."}


@dataclass(frozen=True, slots=True)
class Warm:
    """Seconds: to the first token, of reading in it, of a step after it, of preparing and of mounting."""

    reused: int
    read: int
    first: float
    device: float
    step: float
    prepare: float
    mount: float

    @property
    def fixed(self) -> float:
        return self.first - self.device


async def warm(engine: Engine, request: GenerateRequest, another: GenerateRequest, *, met: bool) -> Warm:
    """Ask; prepare `another`, which has a question of its own, to see what that takes."""
    if not met:
        engine.tokenizer.forget()
    begin = time.perf_counter()
    await engine.plan_of(another)
    prepare = time.perf_counter() - begin
    before = (await engine.status()).device.counters
    if not met:
        engine.tokenizer.forget()
    answered = await ask(engine, request)
    after = (await engine.status()).device.counters
    step = (after.step_s - before.step_s) / (after.steps - before.steps)
    device = after.read_s - before.read_s
    reuse = answered.reuse
    return Warm(reuse.reused, reuse.read, answered.seconds, device, step, prepare, reuse.mount_ms / 1e3)


def row(kind: str, met: bool, rounds: Sequence[Warm]) -> dict[str, harness.Cell]:
    def over_step(name: str) -> float:
        return statistics.median(getattr(r, name) / r.step for r in rounds)

    return {
        "resumed": kind,
        "messages": "met" if met else "not met",
        "reused": rounds[0].reused,
        "read": rounds[0].read,
        "prepare / step": over_step("prepare"),
        "mount / step": over_step("mount"),
        "fixed / step": over_step("fixed"),
        "TTFT / device": statistics.median(r.first / r.device for r in rounds),
    }


async def measure(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    rows = []
    for kind, slots in (("turn", 1), ("chat", 2)):
        settings = EngineSettings(
            model=opts.model, exact=opts.exact, parallel=slots, context=CONTEXT, checkpoints=32
        )
        async with Engine.open(settings) as engine:
            texts = Texts(engine, opts.seed)
            system = texts.of(ROOT)
            messages = texts.chat(system, texts.of(QUESTION))
            await ask(engine, _asking(messages, 2))
            for met in (False, True):
                rounds = []
                for _ in range(5 if opts.quick else 15):
                    history = (*messages, ANSWER) if kind == "turn" else messages[:1]
                    asked, another = (
                        (*history, {"role": "user", "content": texts.of(QUESTION)}) for _ in range(2)
                    )
                    messages = asked
                    requests = (_asking(chat, 4) for chat in (asked, another))
                    rounds.append(await warm(engine, *requests, met=met))
                rows.append(row(kind, met, rounds))
    return rows


def _asking(messages: Sequence[Mapping[str, str]], tokens: int) -> GenerateRequest:
    return GenerateRequest(messages=tuple(messages), max_tokens=tokens, ignore_eos=True)


def main() -> None:
    opts = harness.options("warm", __doc__ or "")
    harness.report("warm", opts, "A resumed request on an idle engine", asyncio.run(measure(opts)))


if __name__ == "__main__":
    main()
