"""`regrow bench --url`: how any OpenAI-compatible server answers a few agents at once.

Each client holds a conversation of its own under one long system prompt that nobody has used before, and
sends all of it again every turn, as agents do; the clients of one turn ask at the same time. What the server
says of cached tokens is taken from its usage. Times are those at which text arrives, reasoning included.
"""

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from regrow.api.client import Server, Unanswered, chunks_of

SYSTEM_WORDS, USER_WORDS = 1000, 40
TEXT = (
    "the file holds a parser that reads one line and returns a list of tokens for each rule of the grammar"
    " and the tests fail when an empty line follows a comment so check the loop and run them again"
)
HEADS = ("turn", "prompt", "cached", "first text, s", "worst", "gap, ms", "worst", "tokens/s", "failed")


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked: so many clients at once, turns each, tokens an answer. model: "" is the first one."""

    clients: int
    turns: int
    tokens: int
    model: str = ""


@dataclass(slots=True)
class Answered:
    """One answer; times in seconds by the clock. Counts are None where the server does not tell them."""

    asked_at: float
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    prompt: int | None = None
    cached: int | None = None
    drawn: int | None = None
    error: str | None = None


async def measure(
    server: Server, load: Load, clock: Callable[[], float] = time.monotonic
) -> list[list[Answered]]:
    """Return the answers of each turn; raises Unanswered where the server cannot be reached at all."""
    model = load.model or str((await server.model())["id"])
    rng = random.Random(0)
    system = f"Session {secrets.token_hex(8)}. You are a coding agent. {_prose(rng, SYSTEM_WORDS)}"
    histories = [[{"role": "system", "content": system}] for _ in range(load.clients)]

    async def ask(history: list[dict[str, str]]) -> Answered:
        history.append({"role": "user", "content": _prose(rng, USER_WORDS)})
        answer = Answered(clock())
        body: dict[str, object] = {"model": model, "messages": history, "max_tokens": load.tokens}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        try:
            await _follow(server, {**body, **stream}, answer, clock)
        except Unanswered as error:
            answer.error = str(error)
        history.append({"role": "assistant", "content": answer.text})
        return answer

    return [list(await asyncio.gather(*map(ask, histories))) for _ in range(load.turns)]


async def _follow(
    server: Server, body: dict[str, object], answer: Answered, clock: Callable[[], float]
) -> None:
    async with server.answered("POST", "/v1/chat/completions", body) as response:
        async for chunk in chunks_of(response):
            if error := chunk.get("error"):
                raise Unanswered(str(error.get("message")))
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                answer.text += delta.get("content") or ""
                if delta.get("content") or delta.get("reasoning_content"):
                    answer.arrivals.append(clock())
            if usage := chunk.get("usage"):
                answer.prompt, answer.drawn = usage.get("prompt_tokens"), usage.get("completion_tokens")
                answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def rows(turns: Sequence[Sequence[Answered]]) -> list[tuple[str, ...]]:
    """Return a row of the table for each turn: medians over its clients, and the worst."""
    return [_row(number, answers) for number, answers in enumerate(turns, 1)]


def _row(number: int, answers: Sequence[Answered]) -> tuple[str, ...]:
    good = [answer for answer in answers if answer.error is None]
    firsts = [answer.arrivals[0] - answer.asked_at for answer in good if answer.arrivals]
    gaps = [(b - a) * 1e3 for answer in good for a, b in pairwise(answer.arrivals)]
    rates = [
        (answer.drawn - 1) / (answer.arrivals[-1] - answer.arrivals[0])
        for answer in good
        if answer.drawn and len(answer.arrivals) > 1
    ]
    return (
        str(number),
        _median([answer.prompt for answer in good if answer.prompt is not None], "{:.0f}"),
        _median([answer.cached for answer in good if answer.cached is not None], "{:.0f}"),
        _median(firsts, "{:.2f}"),
        _worst(firsts, "{:.2f}"),
        _median(gaps, "{:.0f}"),
        _worst(gaps, "{:.0f}"),
        _median(rates, "{:.1f}"),
        str(len(answers) - len(good)),
    )


def _median(values: Sequence[float], shown: str) -> str:
    return shown.format(statistics.median(values)) if values else "-"


def _worst(values: Sequence[float], shown: str) -> str:
    return shown.format(max(values)) if values else "-"


def _prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(TEXT.split(), k=words)) + "."


def show(url: str, key: str | None, load: Load) -> bool:
    """Measure a server, print the table, and say whether every answer came."""
    turns = asyncio.run(measure(Server(url, key), load))
    table = Table(title=f"{load.clients} clients at once, {url}", title_justify="left", box=None)
    for head in HEADS:
        table.add_column(head, justify="right")
    for row in rows(turns):
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    console.print(table)
    errors = {answer.error for answers in turns for answer in answers if answer.error is not None}
    for error in sorted(errors):
        console.print(f"failed: {error}")
    return not errors
