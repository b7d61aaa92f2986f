"""A copy in host memory that has changed (V2): it is found while nothing is served, or the request that would
go on from it fails with the parts that differ; all that shares it is dropped, and the next one reads afresh
and is right."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch

from regrow.actors.cache import CacheActor
from regrow.actors.engine import Engine
from regrow.actors.events import Event, Failed, Finished, Token
from regrow.actors.served import load_served
from regrow.config import EngineSettings
from regrow.errors import VerifyFailed
from regrow.policy.request import CacheUse, GenerateRequest

FIRST = [{"role": "user", "content": "tell me of the sea " * 20}]
NEXT = [*FIRST, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
OTHER = [{"role": "user", "content": "another matter " * 30}]
Messages = list[dict[str, str]]


def flip(tensor: torch.Tensor) -> None:
    """Change one bit in the middle."""
    data = tensor.view(-1).view(torch.uint8)
    data[len(data) // 2] ^= 4


def in_a_cell(cache: CacheActor) -> None:
    span = next(span for span in cache._shelf.spans.values() if span.cells is not None)
    assert span.cells is not None
    flip(span.cells.tensors[0])


def in_a_state(cache: CacheActor) -> None:
    for state in cache._shelf.states.values():
        flip(state.snapshot.states[-1])


async def ask(engine: Engine, messages: Messages, cache: CacheUse = "on") -> tuple[list[int], Event]:
    run = await engine.submit(GenerateRequest(messages=messages, max_tokens=4, cache=cache))
    events = [event async for event in run]
    return [event.id for event in events if isinstance(event, Token)], events[-1]


@pytest.mark.parametrize(("damage", "part"), [(in_a_cell, "cells.L"), (in_a_state, "state.L")])
async def test_v2_a_changed_copy_is_named_and_purged_and_the_retry_is_right(
    damage: Callable[[CacheActor], None], part: str
) -> None:
    settings = EngineSettings(
        model="random:qwen3_5", dtype="float32", parallel=1, context=1024, chunk=64, verify=True, debug=True
    )
    served = load_served(settings, lambda text, share: None)
    async with Engine.open(settings, served=replace(served, budget=64 << 20)) as engine:
        await ask(engine, FIRST)
        await ask(engine, OTHER)  # parks the first
        damage(cast(CacheActor, engine.lives["cache"]))
        _, failed = await ask(engine, NEXT)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, VerifyFailed)
        assert part in str(failed.error)
        retry, end = await ask(engine, NEXT)
        assert isinstance(end, Finished)
        assert end.reuse.reused == 0
        assert retry == (await ask(engine, NEXT, "off"))[0]


@pytest.mark.parametrize("damage", [in_a_cell, in_a_state])
async def test_a_changed_copy_is_found_while_nothing_is_served(damage: Callable[[CacheActor], None]) -> None:
    settings = EngineSettings(
        model="random:qwen3_5", dtype="float32", parallel=1, context=1024, chunk=64, scrub_s=0.01, debug=True
    )
    served = load_served(settings, lambda text, share: None)
    async with Engine.open(settings, served=replace(served, budget=64 << 20)) as engine, asyncio.timeout(60):
        await ask(engine, FIRST)
        await ask(engine, OTHER)
        cache = cast(CacheActor, engine.lives["cache"])
        while len(cache._scrub._sums) < len(cache._shelf.states) + len(cache._shelf.spans):
            await engine.cache_report()
        damage(cache)
        while not (await engine.cache_report())[0].changed:
            pass
        answer, end = await ask(engine, NEXT)
        assert isinstance(end, Finished)
        assert end.reuse.reused == 0
        assert answer == (await ask(engine, NEXT, "off"))[0]
