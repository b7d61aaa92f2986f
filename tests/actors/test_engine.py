"""The engine beside its requests: verifying, forgetting, and what is told of prompts."""

import pytest

from regrow.actors.messages import DigestRequest
from regrow.errors import BadRequest
from tests.actors.world import (
    House,
    chat,
    in_house,
    keys_of,
    plan_of,
    raw,
    starts,
    stranger,
    system_end,
    text,
)
from tests.world.engine import CHUNK
from tests.world.tokenizer import world_tokenizer


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
def test_v2_what_is_mounted_is_read_again_and_compared(hybrid: bool) -> None:
    async def scenario(house: House) -> None:
        first = await house.ask(chat("hi"))
        second = chat("hi", first.text, "more")
        before = house.runner.counts["read"]
        answer = await house.ask(second)
        assert (answer.tokens, answer.reused) == (house.truth(second), starts(second)[0])
        again = len(plan_of(second).chunks_from(0))
        assert house.runner.counts["read"] - before >= again  # the prompt as a whole, in two slots
        assert house.runner.length(2) == 0
        assert len(house.engine.slots) == 2

    in_house(scenario, seeds=[0], slots=3, hybrid=hybrid, verify=True)


def test_v2_a_mounted_state_that_differs_fails_the_request_and_a_retry_reads_afresh() -> None:
    async def scenario(house: House) -> None:
        first = await house.ask(chat("hi"))
        second = chat("hi", first.text, "more")
        cells = house.runner._slots[0].hashes
        spoiled = starts(second)[0] - 1
        assert cells[spoiled] is not None
        cells[spoiled] = 0
        failed = await house.engine.submit(second)
        events = [event async for event in failed]
        assert type(events[-1]).__name__ == "Failed"
        assert "differ" in str(events[-1].error)  # type: ignore[union-attr]
        retry = await house.ask(second)
        assert (retry.tokens, retry.reused) == (house.truth(second), 0)

    in_house(scenario, seeds=[0], slots=2, hybrid=False, verify=True)


def test_v1_with_debug_digest_an_answer_tells_the_digest_of_its_slot() -> None:
    async def scenario(house: House) -> None:
        for request in (chat("hi"), stranger(1)):
            answer = await house.ask(request)
            slot = answer.end.reuse.slot
            assert slot is not None
            assert answer.end.reuse.digest == (await house.engine.slot(slot).ask(DigestRequest(), 60.0)).value

    in_house(scenario, seeds=[0], slots=2, debug_digest=True)


def test_what_is_kept_can_be_forgotten_root_by_root_or_all_at_once() -> None:
    async def scenario(house: House) -> None:
        requests = [chat("hi"), stranger(1)]
        for request in requests:
            await house.ask(request)
        _, roots, _ = await house.engine.cache_report()
        assert [root.tokens for root in roots] == [system_end(r) for r in reversed(requests)]
        assert await house.engine.forget(roots[0].prefix) == 1
        assert await house.engine.forget(roots[0].prefix) == 0
        with pytest.raises(BadRequest) as refused:
            await house.engine.forget("no root")
        assert refused.value.param == "root"
        assert [r.prefix for r in (await house.engine.cache_report())[1]] == [roots[1].prefix]
        pieces = house.engine.tokenizer._pieces
        assert pieces._kept
        assert await house.engine.forget() > 0
        assert not pieces._kept
        cache, roots, records = await house.engine.cache_report()
        assert (cache.states, cache.spans, cache.parked, roots, records) == (0, 0, (), (), ())
        assert (await house.ask(chat("hi"))).reused == 0

    in_house(scenario, seeds=[0])


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_t1_the_last_roots_are_kept_and_t4_none_at_all_with_a_limit_of_none(limit: int) -> None:
    async def scenario(house: House) -> None:
        for i in (1, 2, 3, 1):
            answer = await house.ask(stranger(i))
            assert answer.tokens == house.truth(stranger(i))
        kept = [root.tokens for root in (await house.engine.status()).roots]
        assert kept == [system_end(stranger(i)) for i in (1, 3)][:limit]

    in_house(scenario, seeds=[0], roots=limit)


def test_t1_a_short_system_prompt_is_no_root() -> None:
    async def scenario(house: House) -> None:
        await house.ask(stranger(1))
        assert (await house.engine.status()).roots == ()

    in_house(scenario, seeds=[0], root_min=10_000)


def test_p3_the_end_of_a_pinned_message_is_kept() -> None:
    async def scenario(house: House) -> None:
        long = text(3, 500)
        contents = ["one", "two", bytes(97 + i % 26 for i in long).decode(), "four", "five"]
        request = chat(*contents, pin=3)
        answer = await house.ask(request)
        assert answer.tokens == house.truth(request)
        pinned = starts(request)[1]
        assert pinned in house.slot(0).session.chain.positions
        for pin in (-1, 6):
            with pytest.raises(BadRequest) as refused:
                await house.submit(chat(*contents, pin=pin))
            assert refused.value.param == "regrow.pin"

    in_house(scenario, seeds=[0], checkpoints=2)


def test_what_a_prompt_becomes_is_told() -> None:
    async def scenario(house: House) -> None:
        tokens, plan = await house.engine.plan_of(chat("hi"))
        assert tokens == keys_of(chat("hi")).tolist()
        assert plan == plan_of(chat("hi"))
        rendered = await house.engine.render(chat("hi"))
        assert rendered == await house.engine.text_of(tokens)
        assert world_tokenizer().encode(rendered).tolist() == tokens
        assert (await house.engine.plan_of(raw(text(1, CHUNK + 1))))[1].cuts == (CHUNK,)

    in_house(scenario, seeds=[0])
