"""A request's life: its events in their order, and every way in which an answer ends."""

from dataclasses import replace

import pytest

from regrow.actors.events import Queued, ReadDone, ReadProgress, Token
from regrow.errors import BadRequest, ContextLengthExceeded
from regrow.policy.request import GenerateRequest, SamplingParams
from tests.actors.world import House, chat, in_house, keys_of, raw, stranger, text
from tests.world.engine import CHUNK
from tests.world.tokenizer import EOS, VOCAB, WORDS, world_tokenizer


def test_a_life_is_told_from_the_queue_to_the_last_token() -> None:
    async def scenario(house: House) -> None:
        answer = await house.ask(chat("hello"))
        told = [type(event).__name__ for event in answer.events if not isinstance(event, ReadProgress)]
        assert told == ["Queued", "Placed", "Mounted", "ReadDone", *["Token"] * 6, "Finished"]
        assert answer.tokens == house.truth(chat("hello"))
        assert answer.text == world_tokenizer().decode(answer.tokens)
        assert answer.reason == "length"

    in_house(scenario)


def test_progress_rises_to_the_whole_prompt_and_its_rate_is_that_of_the_device() -> None:
    async def scenario(house: House) -> None:
        prompt = raw(text(1, 5 * CHUNK + 10))
        answer = await house.ask(prompt)
        progress = answer.of(ReadProgress)
        assert [p.position for p in progress] == [CHUNK * i for i in range(1, 6)] + [5 * CHUNK + 9]
        assert all(p.total == 5 * CHUNK + 10 for p in progress)
        assert progress[0].tokens_per_s == CHUNK / house.runner.costs.of_chunk(0, CHUNK)
        assert progress[0].eta_ms == pytest.approx(1e3 * (4 * CHUNK + 9) / progress[0].tokens_per_s)
        assert progress[-1].eta_ms == 0
        (done,) = answer.of(ReadDone)
        assert (done.reused, done.read) == (0, 5 * CHUNK + 9)
        assert done.ms == pytest.approx(1e3 * (done.at - answer.events[0].at))

    in_house(scenario)


def test_the_answer_says_what_was_reused_and_read_and_how_long_it_took() -> None:
    async def scenario(house: House) -> None:
        first = await house.ask(chat("hello"))
        answer = await house.ask(chat("hello", first.text, "more"))
        usage, reuse = answer.end.usage, answer.end.reuse
        assert usage.prompt == len(keys_of(chat("hello", first.text, "more")))
        assert usage.completion == 6
        assert usage.cached == reuse.reused == answer.of(ReadDone)[0].reused > 0
        assert reuse.reused + reuse.read == usage.prompt - 1
        assert (reuse.source, reuse.slot, reuse.exact, reuse.why) == ("checkpoint", 0, "cache", None)
        assert (reuse.queue_ms, reuse.mount_ms) == (0, 0)
        assert reuse.read_ms == answer.of(ReadDone)[0].ms > 0

    in_house(scenario)


@pytest.mark.parametrize("n", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2])
def test_a_prompt_of_any_length_is_answered(n: int) -> None:
    async def scenario(house: House) -> None:
        answer = await house.ask(raw(text(1, n)))
        assert answer.tokens == house.truth(raw(text(1, n)))
        assert answer.end.usage.prompt == n

    in_house(scenario, seeds=[0])


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_an_answer_ends_at_max_tokens(limit: int) -> None:
    async def scenario(house: House) -> None:
        answer = await house.ask(chat("hello", max_tokens=limit))
        assert (len(answer.tokens), answer.reason) == (limit, "length")

    in_house(scenario, seeds=[0])


def test_without_max_tokens_an_answer_may_fill_the_context() -> None:
    async def scenario(house: House) -> None:
        answer = await house.ask(raw(text(1, 50), max_tokens=None))
        assert (len(answer.tokens), answer.reason) == (78, "length")
        assert answer.tokens == house.truth(raw(text(1, 50), max_tokens=None))

    in_house(scenario, seeds=[0], context=128)


@pytest.mark.parametrize("drawn", [0, 1, 4])
def test_the_end_token_ends_an_answer_and_is_no_part_of_it(drawn: int) -> None:
    async def scenario(house: House) -> None:
        house.runner.answer_length(keys_of(chat("hello")), drawn)
        answer = await house.ask(chat("hello"))
        assert (answer.tokens, answer.reason) == (house.truth(chat("hello"))[:drawn], "stop")
        assert answer.end.usage.completion == drawn

    in_house(scenario, seeds=[0])


def test_a_stop_token_of_the_request_ends_its_answer() -> None:
    async def scenario(house: House) -> None:
        expected = house.truth(chat("hello"))
        stop = next(token for token in expected[1:] if token != expected[0])
        answer = await house.ask(chat("hello", stop_token_ids=(stop,)))
        assert (answer.tokens, answer.reason) == (expected[: expected.index(stop)], "stop")

    in_house(scenario, seeds=[0])


def test_min_tokens_keeps_the_end_token_away_until_then() -> None:
    async def scenario(house: House) -> None:
        for min_tokens in (3, 4, 5):
            request = chat("hello", min_tokens=min_tokens)
            house.runner.answer_length(keys_of(request), 3)
            answer = await house.ask(request)
            ends = min_tokens == 3
            assert (len(answer.tokens), answer.reason) == ((3, "stop") if ends else (6, "length"))
            assert EOS not in answer.tokens

    in_house(scenario, seeds=[0])


def test_with_ignore_eos_the_end_token_is_never_drawn() -> None:
    async def scenario(house: House) -> None:
        request = chat("hello", ignore_eos=True, max_tokens=20)
        house.runner.answer_length(keys_of(request), 3)
        answer = await house.ask(request)
        assert (len(answer.tokens), answer.reason) == (20, "length")
        assert EOS not in answer.tokens

    in_house(scenario, seeds=[0])


@pytest.mark.parametrize("begin", range(0, 12, 2))
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_a_stop_string_ends_an_answer_wherever_its_tokens_are_cut(begin: int, size: int) -> None:
    async def scenario(house: House) -> None:
        whole = world_tokenizer().decode(house.truth(chat("hello", max_tokens=20)))
        stop = whole[begin : begin + size]
        answer = await house.ask(chat("hello", max_tokens=20, stop=(stop, "never said")))
        assert (answer.text, answer.reason) == (whole[: whole.index(stop)], "stop")
        drawn = house.slot(0).session.length - len(keys_of(chat("hello")))
        assert len(answer.tokens) - 1 <= drawn <= len(answer.tokens)  # one token may overrun

    in_house(scenario, seeds=range(2))


def test_a_stop_string_that_never_comes_holds_nothing_back() -> None:
    async def scenario(house: House) -> None:
        whole = world_tokenizer().decode(house.truth(chat("hello")))
        stop = whole[-2:] + "!"
        answer = await house.ask(chat("hello", stop=(stop,)))
        assert (answer.text, answer.reason) == (whole, "length")

    in_house(scenario, seeds=[0])


def test_a_token_that_was_drawn_after_the_stop_is_in_the_session_and_not_in_the_text() -> None:
    async def scenario(house: House) -> int:
        expected = house.truth(chat("hello", max_tokens=20))
        stop = world_tokenizer().decode(expected[:3])
        answer = await house.ask(chat("hello", max_tokens=20, stop=(stop,)))
        assert (answer.text, answer.reason) == ("", "stop")
        assert answer.tokens == expected[:3]
        held = house.slot(0).session.keys[len(keys_of(chat("hello"))) :].tolist()
        assert held == expected[: len(held)]
        return len(held)

    # the third token was fed only where the stop reached the device after its next step
    assert set(in_house(scenario, seeds=range(12))) == {2, 3}


@pytest.mark.parametrize("exact", ["cache", "off"])
def test_a_token_256_times_in_a_row_ends_an_answer_and_nothing_of_it_is_saved(exact: str) -> None:
    async def scenario(house: House) -> None:
        same = SamplingParams(logit_bias={WORDS[5]: 1000.0})
        request = chat("hello", sampling=same, max_tokens=1000)
        answer = await house.ask(request)
        assert (answer.tokens, answer.reason) == ([WORDS[5]] * 256, "length")
        assert house.slot(0).session.length == len(keys_of(request)) - 1
        again = await house.ask(chat("hello", answer.text, "more"))
        assert 0 < again.reused < len(keys_of(request))
        assert again.tokens == house.truth(chat("hello", answer.text, "more"))

    in_house(scenario, seeds=[0], exact=exact)


def test_two_chats_in_two_slots_do_not_disturb_each_other() -> None:
    async def scenario(house: House) -> None:
        requests = [chat("hello", max_tokens=40), raw(text(2, 7 * CHUNK), max_tokens=30)]
        runs = [await house.submit(request) for request in requests]
        for request, run in zip(requests, runs, strict=True):
            assert (await house.ended(run)).tokens == house.truth(request)
        assert [run.slot for run in runs] == [0, 1]

    in_house(scenario)


def test_a_sampled_answer_depends_on_its_seed_alone() -> None:
    async def scenario(house: House) -> None:
        warm = chat("hello", sampling=SamplingParams(temperature=1.0, seed=5))
        alone = await house.ask(warm)
        run = await house.submit(chat("another", max_tokens=30))
        beside = await house.ask(warm)
        assert alone.tokens == beside.tokens == house.truth(warm)
        other = await house.ask(chat("hello", sampling=SamplingParams(temperature=1.0, seed=6)))
        assert other.tokens != alone.tokens
        await house.ended(run)

    in_house(scenario)


BAD: list[tuple[GenerateRequest, str]] = [
    (GenerateRequest(), "prompt"),
    (raw([]), "prompt"),
    (raw([VOCAB]), "prompt"),
    (raw([-1]), "prompt"),
    (chat("hello", max_tokens=0), "max_tokens"),
    (chat("hello", max_tokens=-1), "max_tokens"),
    (chat("hello", stop=("",)), "stop"),
    (chat("hello", stop_token_ids=(VOCAB,)), "stop_token_ids"),
    (chat("hello", sampling=SamplingParams(logit_bias={VOCAB: 1.0})), "logit_bias"),
]


@pytest.mark.parametrize(("request_", "field"), BAD)
def test_a_request_that_cannot_be_served_is_refused_by_the_name_of_its_field(
    request_: GenerateRequest, field: str
) -> None:
    async def scenario(house: House) -> None:
        with pytest.raises(BadRequest) as refused:
            await house.submit(request_)
        assert refused.value.param == field
        assert (await house.ask(chat("hello"))).tokens == house.truth(chat("hello"))

    in_house(scenario, seeds=[0])


def test_a_prompt_over_the_context_is_refused_with_both_numbers() -> None:
    async def scenario(house: House) -> None:
        fits = raw(text(1, 100), max_tokens=28)
        assert len((await house.ask(fits)).tokens) == 28
        for request in (replace(fits, max_tokens=29), raw(text(1, 128), max_tokens=None)):
            with pytest.raises(ContextLengthExceeded, match="128"):
                await house.submit(request)

    in_house(scenario, seeds=[0], context=128)


def test_a_third_chat_waits_for_a_slot_and_is_told_how_many_are_before_it() -> None:
    async def scenario(house: House) -> None:
        runs = [await house.submit(stranger(i)) for i in range(5)]
        answers = [await house.ended(run) for run in runs]
        assert [answer.of(Queued)[0].ahead for answer in answers] == [0, 0, 0, 1, 2]
        assert answers[2].end.reuse.queue_ms > 0
        assert [answer.tokens for answer in answers] == [house.truth(stranger(i)) for i in range(5)]
        assert all(answer.of(Token) for answer in answers)

    in_house(scenario)
