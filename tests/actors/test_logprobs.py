"""Log-probabilities through the engine: by the formula, for every token, however much was reused."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from regrow.actors.engine import Engine
from regrow.actors.events import Event, Failed, Finished, Logprob, ReadProgress, Token
from regrow.errors import NonFiniteLogits
from regrow.policy.request import GenerateRequest, SamplingParams
from tests.world.engine import engine_in, runner_in
from tests.world.fake_runner import FakeRunner
from tests.world.loop import VirtualLoop, run_world
from tests.world.tokenizer import world_tokenizer

TEXT = "You answer in one word. " * 12
WILD = SamplingParams(temperature=1.3, seed=4, logit_bias={300: 2.0}, logprobs=4)
SEEDS = range(3)


def asking(text: str = TEXT, sampling: SamplingParams = WILD, **options: object) -> GenerateRequest:
    return replace(GenerateRequest(prompt=text, sampling=sampling, max_tokens=6), **options)  # type: ignore[arg-type]


async def ask(engine: Engine, request: GenerateRequest) -> list[Event]:
    return [event async for event in await engine.submit(request)]


def of_answer(events: Sequence[Event]) -> list[Logprob]:
    tokens = [event for event in events if isinstance(event, Token)]
    assert len(tokens) == 6
    assert all(token.logprob is not None and token.logprob.id == token.id for token in tokens)
    return [token.logprob for token in tokens if token.logprob is not None]


def of_prompt(events: Sequence[Event]) -> list[Logprob]:
    return [told for event in events if isinstance(event, ReadProgress) for told in event.logprobs]


def end_of(events: Sequence[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def check(runner: FakeRunner, text: str, told: Sequence[Logprob], first: int) -> None:
    """Hold what was told of the tokens from position `first` on, after a text or in it, against the
    formula."""
    tokenizer = world_tokenizer()
    keys = np.concatenate([tokenizer.encode(text)[:first], [t.id for t in told]])
    for position, token in enumerate(told, first):
        if position == 0:
            assert (token.logprob, token.top) == (None, ())
            continue
        wanted = torch.log_softmax(runner.logits_after(keys[:position]), 0)
        assert token.logprob == float(wanted[token.id])
        values, best = wanted.sort(descending=True, stable=True)
        n = len(token.top)
        assert [t.id for t in token.top] == best[:n].tolist()
        assert [t.logprob for t in token.top] == values[:n].tolist()
        for named in (token, *token.top):
            assert named.bytes == tokenizer.token_bytes(named.id) != b""


def test_each_token_of_an_answer_is_told_with_what_the_model_gave_it() -> None:
    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world)
        texts = [TEXT, "Something else."]
        async with engine_in(world, runner) as engine:
            answers = await asyncio.gather(*(ask(engine, asking(text)) for text in texts))
        for text, events in zip(texts, answers, strict=True):
            told = of_answer(events)
            check(runner, text, told, len(text))
            assert {len(token.top) for token in told} == {4}
            assert not any(event.logprobs for event in events if isinstance(event, ReadProgress))

    for seed in SEEDS:
        run_world(seed, scenario)


def test_none_are_told_to_who_does_not_ask_and_only_the_drawn_ones_to_who_asks_for_no_more() -> None:
    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world)
        async with engine_in(world, runner) as engine:
            plain = await ask(engine, asking(sampling=replace(WILD, logprobs=None)))
            bare = of_answer(await ask(engine, asking(sampling=replace(WILD, logprobs=0))))
        tokens = [event for event in plain if isinstance(event, Token)]
        assert [token.logprob for token in tokens] == [None] * 6
        assert [token.id for token in tokens] == [token.id for token in bare]
        assert [token.top for token in bare] == [()] * 6
        check(runner, TEXT, bare, len(TEXT))

    run_world(0, scenario)


def test_they_are_the_same_with_a_warm_cache_a_cold_one_and_none() -> None:
    async def scenario(world: VirtualLoop) -> None:
        async with engine_in(world, runner_in(world)) as engine:
            cold = await ask(engine, asking())
            warm = await ask(engine, asking())
            without = await ask(engine, asking(cache="off"))
        assert (end_of(cold).reuse.reused, end_of(without).reuse.reused) == (0, 0)
        assert end_of(warm).reuse.reused > 0
        assert of_answer(cold) == of_answer(warm) == of_answer(without)

    for seed in SEEDS:
        run_world(seed, scenario)


def test_a_prompt_is_told_token_for_token_and_read_from_its_start_though_it_is_known() -> None:
    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world)
        async with engine_in(world, runner) as engine:
            known = await ask(engine, asking())
            events = await ask(engine, asking(prompt_logprobs=3))
            misses = (await engine.status()).engine.totals.misses
        told = of_prompt(events)
        assert [token.id for token in told] == world_tokenizer().encode(TEXT).tolist()
        check(runner, TEXT, told, 0)
        assert of_answer(events) == of_answer(known)
        reuse = end_of(events).reuse
        assert (reuse.source, reuse.reused, reuse.read) == ("none", 0, len(TEXT) - 1)
        assert reuse.why == "The log-probabilities of the prompt are asked for, so all of it is read."
        assert reuse.diverged is None
        assert misses["log-probabilities"] == 1

    for seed in SEEDS:
        run_world(seed, scenario)


def test_what_was_read_for_them_is_kept_for_others() -> None:
    async def scenario(world: VirtualLoop) -> None:
        async with engine_in(world, runner_in(world)) as engine:
            await ask(engine, asking(prompt_logprobs=0))
            assert end_of(await ask(engine, asking())).reuse.reused > 0

    run_world(0, scenario)


def test_a_prompt_of_one_token_is_told_too() -> None:
    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world)
        async with engine_in(world, runner) as engine:
            events = await ask(engine, asking("x", prompt_logprobs=2))
        check(runner, "x", of_prompt(events), 0)
        check(runner, "x", of_answer(events), 1)
        assert len(of_prompt(events)) == 1

    run_world(0, scenario)


def test_a_prompt_without_finite_logits_ends_with_that_error_and_the_next_one_is_answered() -> None:
    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world, slots=1)
        runner.nan_at.add((0, 100))
        async with engine_in(world, runner) as engine:
            events = await ask(engine, asking(prompt_logprobs=2))
            assert isinstance(events[-1], Failed)
            assert isinstance(events[-1].error, NonFiniteLogits)
            assert len(of_prompt(events)) == 65
            check(runner, TEXT, of_answer(await ask(engine, asking())), len(TEXT))

    run_world(0, scenario)
