"""How the tests drive a runner: prompts, poisoned arenas, reading by a plan, greedy answers, stock logits."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache

from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import CellCopy, Chunk, Digest, Row, Snapshot
from regrow.models import random_configs
from regrow.models.random_models import build_random
from regrow.policy.keys import Keys, as_keys
from regrow.policy.plan import ChunkTable, ReadPlan
from regrow.policy.request import Exactness, SamplingParams

FAMILIES = tuple(random_configs.FAMILIES)
THOROUGH = ("llama", "qwen3_5")  # pure attention and a hybrid, whose sweeps are the widest
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GREEDY = SamplingParams()
SLOTS = 4


def prompt(n: int, seed: int = 0) -> Keys:
    return as_keys(
        torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(1000 * seed + n)).numpy()
    )


def plan_of(n: int, ends: Iterable[int] = ()) -> ReadPlan:
    """A plan of chunks of 64 with message ends at `ends`."""
    cuts = {*ChunkTable.uniform(64).grid(n), *ends}
    return ReadPlan(n, tuple(sorted(cut for cut in cuts if 0 < cut < n)))


@cache
def _runner(family: str, dtype: torch.dtype, exact: Exactness) -> ModelRunner:
    return ModelRunner(build_random(family, dtype=dtype), SLOTS, 512, exact)


def fresh_runner(family: str, dtype: torch.dtype = torch.float32, exact: Exactness = "full") -> ModelRunner:
    """A runner with nothing but poison in its arenas."""
    runner = _runner(family, dtype, exact)
    runner.reset()
    poison(runner)
    return runner


def poison(runner: ModelRunner) -> None:
    """Fill the arenas with NaN, whole numbers with one that no table has. An idle decode row holds zeros or
    what it decoded, so its whole numbers are left alone."""
    arenas = runner.arenas
    for arena in (*arenas.cells.values(), *arenas.rest.values(), *arenas.decode.values()):
        if arena.is_floating_point():
            arena.fill_(float("nan"))
    for arena in (*arenas.cells.values(), *arenas.rest.values()):
        if not arena.is_floating_point():
            arena.fill_(2**40)


def finish(copy: CellCopy, between: Callable[[], object] = lambda: None) -> int:
    """Copy piece by piece; return how many there were."""
    count = 1
    while not copy.advance(0.0):
        between()
        count += 1
    assert copy.ended
    return count


def short_of_the_last(plan: ReadPlan, start: int = 0) -> list[tuple[int, int]]:
    """Return the chunks of a plan from `start` on without the prompt's last token, which a step is fed."""
    return [(a, min(b, plan.length - 1)) for a, b in plan.chunks_from(start) if a < plan.length - 1]


def read(
    runner: ModelRunner,
    slot: int,
    ids: Keys,
    plan: ReadPlan,
    start: int = 0,
    between: Callable[[], object] = lambda: None,
) -> dict[int, Snapshot]:
    """Read by the plan from `start` on, all but the last token; return a snapshot of every cut passed."""
    kept = {}
    for a, b in short_of_the_last(plan, start):
        runner.read(Chunk(slot, a, ids[a:b]))
        if plan.is_cut(b):
            snapshot = runner.snapshot(slot).snapshot
            assert snapshot is not None
            kept[b] = snapshot
        between()
    return kept


def first_logits(runner: ModelRunner, slot: int, ids: Keys, plan: ReadPlan) -> torch.Tensor:
    """Read a whole prompt by the plan; return the logits [vocab] after it, from its last chunk."""
    for a, b in plan.chunks_from(0):
        logits = runner.read(Chunk(slot, a, ids[a:b], want_logits="last")).logits
    assert logits is not None
    assert runner.length(slot) == len(ids)
    return logits


def row(runner: ModelRunner, slot: int, token: int) -> Row:
    return Row(slot, token, runner.length(slot), GREEDY)


def follow(runner: ModelRunner, slot: int, tokens: Iterable[int]) -> torch.Tensor:
    """Feed `tokens` to a slot that is read, and leave it joined; return the logits [steps, vocab] of each."""
    runner.join(slot)
    logits = []
    for token in tokens:
        logits.append(runner.decode([row(runner, slot, token)])[0])
        runner.commit(slot, 1)
    return torch.stack(logits)


@dataclass(frozen=True)
class Answer:
    """A greedy answer with all that must be equal bit for bit."""

    tokens: tuple[int, ...]
    logits: torch.Tensor
    digest: Digest

    def same_as(self, other: "Answer") -> bool:
        return (self.tokens, self.digest) == (other.tokens, other.digest) and torch.equal(
            self.logits, other.logits
        )


def answer(
    runner: ModelRunner, slot: int, ids: Keys, n: int, others: Callable[[], list[Row]] = list
) -> Answer:
    """Feed the last prompt token, then n greedy ones; the slot is at rest again afterwards."""
    runner.join(slot)
    token, tokens, logits = int(ids[-1]), [], []
    for _ in range(n + 1):
        rows = [row(runner, slot, token), *others()]
        logits.append(runner.decode(rows)[0])
        for fed in rows:
            runner.commit(fed.slot, 1)
        token = int(logits[-1].argmax())
        tokens.append(token)
    digest = runner.digest(slot)
    runner.leave(slot)
    assert digest == runner.digest(slot), "a state changed on its way between its rows"
    return Answer(tuple(tokens), torch.stack(logits), digest)


@cache
def _stock_model(family: str) -> Any:
    return build_random(family)


@cache
def stock(family: str, n: int, seed: int, steps: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """What `transformers` says for `prompt(n, seed)` and its greedy continuation.

    Returns the tokens fed (the last of the prompt, then `steps` drawn ones) and the logits of each.
    """
    return greedy_of(_stock_model(family), prompt(n, seed), steps)


@torch.inference_mode()
def greedy_of(model: Any, ids: Keys, steps: int) -> tuple[tuple[int, ...], torch.Tensor]:
    past = DynamicCache(config=model.config)

    def forward(tokens: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(tokens))[None]
        logits: torch.Tensor = model(input_ids=tokens[None], position_ids=positions, cache=past).logits[0, -1]
        return logits

    logits = [forward(torch.tensor(ids), 0)]
    fed = [int(ids[-1])]
    for i in range(steps):
        fed.append(int(logits[-1].argmax()))
        logits.append(forward(torch.tensor(fed[-1:]), len(ids) + i))
    return tuple(fed), torch.stack(logits)
