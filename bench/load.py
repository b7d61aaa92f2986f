"""A real server under a crowd: nothing is lost, nothing comes twice, and no client's manners harm another's.

Clients with think times hold conversations of a few turns; a tenth of the requests is cancelled while it
streams, a tenth disconnects before anything came, a tenth is larger than the context. Each token comes with
its log-probability, so that what is streamed can be counted against the usage; afterwards some prompts are
asked again, alone and with the cache off, and their answers compared word for word (so the mode is full).
Options beside the shared ones: --requests N, --clients N, --minutes M (a soak: until then, however many).
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import harness
from asking import WORDS
from regrow.api.client import Server, Unanswered, chunks_of

CONTEXT = 4096
OPTIONS = ("--port", "0", "--parallel", "4", "--ctx", str(CONTEXT), "--queue", "256", "--cache-mib", "64")
SYSTEMS = 4
TURNS = 4
PROVOKED = 0.1  # of the requests, of each kind
AGAIN, AGAIN_QUICK = 40, 10
Messages = list[dict[str, str]]


@dataclass
class Answer:
    """tokens: how many came; counted: how many the server says it drew."""

    messages: Messages
    max_tokens: int
    text: str = ""
    tokens: int = 0
    counted: int = -1
    asked_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)


@dataclass
class Crowd:
    server: Server
    think_s: float
    ends: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def client(
        self, rng: random.Random, left: "itertools.count[int]", limit: int, until: float
    ) -> None:
        """Hold one conversation after the other until there are enough requests, or it is late enough."""
        messages: Messages = []
        while next(left) < limit or time.monotonic() < until:
            if not messages or len(messages) > 2 * TURNS:
                system = f"You are agent {rng.randrange(SYSTEMS)}. " * 12
                messages = [{"role": "system", "content": system}]
            asked = [*messages, {"role": "user", "content": _prose(rng, 20)}]
            answer = await self.request(asked, rng)
            if answer is not None:
                messages = [*asked, {"role": "assistant", "content": answer.text}]
            await asyncio.sleep(rng.expovariate(1 / self.think_s))

    async def request(self, messages: Messages, rng: random.Random) -> Answer | None:
        """Make one request, a good one or one that is to fail; return its answer where it has one."""
        kind = rng.choices(
            ["answered", "cancelled", "disconnected", "oversized"], [1 - 3 * PROVOKED, *[PROVOKED] * 3]
        )[0]
        answer = Answer(messages, rng.randint(4, 24), asked_at=time.monotonic())
        try:
            match kind:
                case "disconnected":
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(rng.random() * 0.3):
                            await self.follow(answer)
                case "oversized":
                    await self.refused(answer)
                case _:
                    await self.follow(answer, after=rng.randint(1, 5) if kind == "cancelled" else None)
        except Unanswered as error:
            kind = "failed"
            self.wrong.append(str(error))
        self.ends[kind] += 1
        if kind != "answered":
            return None
        if not answer.tokens == answer.counted <= answer.max_tokens:
            self.wrong.append(f"{answer.tokens} tokens came of {answer.counted}")
        self.answers.append(answer)
        return answer

    async def follow(self, answer: Answer, after: int | None = None, **more: object) -> None:
        """Read a stream to its end, or leave it after so many chunks."""
        body: dict[str, object] = {
            "model": (await self.server.model())["id"],
            "messages": answer.messages,
            "max_tokens": answer.max_tokens,
            "temperature": 0,
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        async with self.server.answered("POST", "/v1/chat/completions", body) as response:
            async for chunk in chunks_of(response):
                if "error" in chunk:
                    raise Unanswered(str(chunk["error"]))
                if chunk.get("usage"):
                    answer.counted = chunk["usage"]["completion_tokens"]
                for choice in chunk["choices"]:
                    scored = len((choice.get("logprobs") or {}).get("content") or ())
                    answer.text += choice["delta"].get("content") or ""
                    answer.tokens += scored
                    answer.arrivals += [time.monotonic()] * bool(scored)
                if after is not None and len(answer.arrivals) >= after:
                    return

    async def refused(self, answer: Answer) -> None:
        """Ask with a prompt larger than the context: that is refused, with both numbers."""
        answer.messages = [{"role": "user", "content": "word " * CONTEXT}]
        try:
            await self.follow(answer)
        except Unanswered as error:
            if f"{CONTEXT} tokens" not in str(error):
                raise
        else:
            self.wrong.append("a prompt larger than the context was answered")

    async def again(self, count: int, rng: random.Random) -> int:
        """Ask some prompts again, alone and with the cache off; return how many answers differ."""
        differing = 0
        for first in rng.sample(self.answers, min(count, len(self.answers))):
            second = Answer(first.messages, first.max_tokens)
            await self.follow(second, regrow={"cache": "off"})
            differing += (first.text, first.tokens) != (second.text, second.tokens)
        return differing


def _prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


@contextlib.asynccontextmanager
async def serving(model: str) -> AsyncIterator[tuple[Server, int]]:
    """Serve a model in the strictest mode; give its server and the id of its process."""
    command = [sys.executable, "-m", "regrow", "serve", model, "--exact", "full", "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(*command, *OPTIONS, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b"Serving "):
                yield Server(line.decode().split()[-1]), process.pid
                return
        raise SystemExit("the server did not start")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def held_by(pid: int) -> tuple[int, int, float]:
    """Return threads, open files and resident MiB of a process."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return len(os.listdir(process / "task")), len(os.listdir(process / "fd")), mib  # noqa: PTH208


async def load(
    model: str, seed: int, clients: int, requests: int, seconds: float, again: int
) -> dict[str, harness.Cell]:
    """Run the crowd; return one row of figures."""
    async with serving(model) as (server, pid):
        crowd = Crowd(server, 0.3)
        rngs = [random.Random(f"{seed} {n}") for n in range(clients)]

        async def live(limit: int, until: float) -> None:
            left = itertools.count()
            await asyncio.gather(*(crowd.client(rng, left, limit, until) for rng in rngs))

        await live(clients, 0.0)  # every client once: what grows on first use has grown
        threads, files, first_mib = held_by(pid)
        resident = [first_mib]
        for _ in range(2):
            await live((requests - clients) // 2, time.monotonic() + seconds / 2)
            resident.append(held_by(pid)[2])
        differing = await crowd.again(again, random.Random(seed))
        after = held_by(pid)
    first = sorted(a.arrivals[0] - a.asked_at for a in crowd.answers if a.arrivals)
    gaps = sorted(b - a for answer in crowd.answers for a, b in pairwise(answer.arrivals))
    for wrong in crowd.wrong[:5]:
        print(f"wrong: {wrong}", file=sys.stderr)
    return {
        "requests": sum(crowd.ends.values()),
        "errors": len(crowd.wrong),
        "differing": differing,
        "answered": crowd.ends["answered"],
        "cancelled": crowd.ends["cancelled"],
        "left": crowd.ends["disconnected"],
        "oversized": crowd.ends["oversized"],
        "first token p50, s": quantile(first, 0.5),
        "first token p99, s": quantile(first, 0.99),
        "gap p50, s": quantile(gaps, 0.5),
        "gap p99, s": quantile(gaps, 0.99),
        "threads more": after[0] - threads,
        "files more": after[1] - files,
        "MiB at first": resident[0],
        "MiB half way": resident[1],
        "MiB at the end": resident[2],
    }


def quantile(values: Sequence[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def arguments() -> argparse.Namespace:
    """Take the options that only this bench has from the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=0.0)
    mine, sys.argv[1:] = parser.parse_known_args()
    return mine


def main() -> None:
    mine = arguments()
    opts = harness.options("load", __doc__ or "", model="random:qwen3_5")
    again = AGAIN_QUICK if opts.quick else AGAIN
    figures = asyncio.run(load(opts.model, opts.seed, mine.clients, mine.requests, mine.minutes * 60, again))
    rows = [{"figure": figure, "value": value} for figure, value in figures.items()]
    harness.report("load", dataclasses.replace(opts, exact="full"), f"{mine.clients} clients", rows)
    if figures["errors"] or figures["differing"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
