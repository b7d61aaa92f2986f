"""What a prompt reuses: all that was read and is kept, nothing that was decoded or belongs to another."""

import pytest

from regrow.actors.events import Mounted, Placed, ReadProgress
from regrow.actors.messages import DigestRequest
from regrow.policy.request import CacheUse, Exactness
from tests.actors.world import OTHER, SYSTEM, House, chat, in_house, raw, starts, stranger, system_end, text
from tests.world.engine import CHUNK


@pytest.mark.parametrize("length", [1, 6, 3 * CHUNK])
@pytest.mark.parametrize("system", [None, SYSTEM], ids=["short", "long"])
def test_every_turn_reuses_to_the_last_assistant_start_whatever_the_replys_length(
    length: int, system: dict[str, str] | None
) -> None:
    async def scenario(house: House) -> None:
        contents = ["hi"]
        for _ in range(4):
            request = chat(*contents, system=system, max_tokens=length)
            answer = await house.ask(request)
            assert answer.tokens == house.truth(request)
            assert answer.reused == (starts(request)[-2] if len(contents) > 1 else 0)
            contents += [answer.text, "and then?"]

    in_house(scenario, seeds=range(2))


def test_a_reply_that_the_template_rewrites_does_not_matter() -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hi"))
        second = chat("hi", "quite another reply", "and?")
        answer = await house.ask(second)
        assert answer.reused == starts(second)[0]
        assert answer.tokens == house.truth(second)

    in_house(scenario, seeds=[0])


@pytest.mark.parametrize("left", [1, 2, 3])
@pytest.mark.parametrize("exact", ["full", "cache", "off"])
def test_a_prompt_is_right_with_one_two_or_three_tokens_left(left: int, exact: Exactness) -> None:
    async def scenario(house: House) -> None:
        known = raw(text(1, 3 * CHUNK + 1))
        await house.ask(known)
        request = raw(text(1, 3 * CHUNK + left))
        answer = await house.ask(request)
        assert answer.tokens == house.truth(request)
        assert answer.reused == 3 * CHUNK
        assert answer.read == left - 1

    in_house(scenario, exact=exact)


def test_the_same_prompt_again_resumes_below_its_last_token() -> None:
    async def scenario(house: House) -> None:
        for n in (2 * CHUNK, 2 * CHUNK + 1):
            request = raw(text(n, n))
            await house.ask(request)
            again = await house.ask(request)
            assert again.tokens == house.truth(request)
            assert again.reused == (n - 1) // CHUNK * CHUNK

    in_house(scenario, seeds=[0])


def test_an_edited_last_user_message_resumes_no_earlier_than_the_assistant_start_before_it() -> None:
    async def scenario(house: House) -> None:
        contents = ["hi"]
        for _ in range(4):
            answer = await house.ask(chat(*contents))
            contents += [answer.text, "and then?"]
        edited = chat(*contents[:-3], "no, something else")
        answer = await house.ask(edited)
        assert answer.reused >= starts(edited)[-2]
        assert answer.tokens == house.truth(edited)

    in_house(scenario, seeds=[0])


def test_a_new_chat_under_a_known_system_prompt_starts_at_its_end() -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hi"))
        second = chat("something else")
        answer = await house.ask(second)
        assert (answer.reused, answer.end.reuse.slot) == (system_end(second), 0)

    in_house(scenario, seeds=[0], slots=1)


def test_a_chat_comes_back_to_its_own_slot() -> None:
    async def scenario(house: House) -> None:
        first = await house.ask(chat("hi"))
        other = await house.ask(chat("ho", system=OTHER))
        back = await house.ask(chat("hi", first.text, "more"))
        other_back = await house.ask(chat("ho", other.text, "more", system=OTHER))
        assert [a.end.reuse.slot for a in (first, other, back, other_back)] == [0, 1, 0, 1]
        assert back.reused == starts(chat("hi", first.text, "more"))[0]
        assert other_back.reused == starts(chat("ho", other.text, "more", system=OTHER))[0]

    in_house(scenario, seeds=[0])


def test_a_new_chat_takes_an_empty_slot_else_the_one_that_rested_longest() -> None:
    async def scenario(house: House) -> None:
        slots = []
        for i in range(6):
            answer = await house.ask(raw(text(i, 100)))
            slots.append(answer.end.reuse.slot)
        assert slots == [0, 1, 2, 0, 1, 2]

    in_house(scenario, seeds=[0], slots=3)


@pytest.mark.parametrize("salt", ["", "another"])
def test_prompts_with_different_salts_never_match(salt: str) -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hi", cache_salt="one"))
        stranger = await house.ask(chat("hi", cache_salt=salt))
        nobody = await house.ask(chat("hi"))
        assert (stranger.reused, nobody.reused) == (0, 0)
        assert nobody.end.reuse.why == "Prompts are known only for another model, adapter or cache salt."
        assert stranger.end.reuse.why == "No other prompt is known yet."  # whoever asks with a salt
        assert stranger.end.reuse.diverged is nobody.end.reuse.diverged is None
        assert (await house.ask(chat("hi", cache_salt=salt))).reused > 0

    in_house(scenario, seeds=[0], slots=3)


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
def test_without_exactness_a_chat_goes_on_at_its_live_end(hybrid: bool) -> None:
    async def scenario(house: House) -> None:
        first = await house.ask(raw(text(1, 100)))
        held = house.slot(0).session.keys.tolist()
        assert held == text(1, 100) + first.tokens[:-1]
        request = raw([*text(1, 100), *first.tokens, 1, 2, 3])
        answer = await house.ask(request)
        assert (answer.reused, answer.end.reuse.source) == (len(held), "live")
        assert answer.tokens == house.truth(request)

    in_house(scenario, exact="off", hybrid=hybrid)


def test_without_exactness_and_running_state_any_position_counts() -> None:
    async def scenario(house: House) -> None:
        await house.ask(raw(text(1, 100)))
        request = raw([*text(1, 77), 255, 255])
        answer = await house.ask(request)
        assert answer.reused == 77
        assert answer.tokens == house.truth(request)

    in_house(scenario, exact="off", hybrid=False)


@pytest.mark.parametrize("exact", ["full", "cache"])
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
def test_what_was_decoded_is_never_passed_off_as_read(exact: Exactness, hybrid: bool) -> None:
    async def scenario(house: House) -> None:
        prompt = text(1, CHUNK + 10)
        first = await house.ask(raw(prompt, max_tokens=4 * CHUNK))
        request = raw([*prompt, *first.tokens, 1, 2, 3])
        answer = await house.ask(request)
        assert answer.reused == CHUNK
        assert answer.tokens == house.truth(request)

    in_house(scenario, seeds=[0], exact=exact, hybrid=hybrid)


@pytest.mark.parametrize("exact", ["full", "cache"])
def test_without_running_state_every_cut_that_was_read_counts_and_no_state_is_kept(
    exact: Exactness,
) -> None:
    async def scenario(house: House) -> None:
        await house.ask(raw(text(1, 10 * CHUNK)))
        for shared in (7 * CHUNK + 5, 5 * CHUNK, 2 * CHUNK - 1):
            request = raw([*text(1, shared), *[255] * 40])
            answer = await house.ask(request)
            assert answer.reused == shared // CHUNK * CHUNK
            assert answer.tokens == house.truth(request)
        assert (await house.engine.status()).cache.states == 0

    in_house(scenario, seeds=[0], hybrid=False, exact=exact)


def test_a_checkpoint_every_so_many_tokens_serves_a_prompt_that_leaves_there() -> None:
    async def scenario(house: House) -> None:
        await house.ask(raw(text(1, 10 * CHUNK)))
        request = raw([*text(1, 7 * CHUNK), *[255] * 40])
        answer = await house.ask(request)
        assert answer.reused == 6 * CHUNK
        assert answer.tokens == house.truth(request)

    in_house(scenario, seeds=[0], checkpoint_every=2 * CHUNK)


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_a_slot_keeps_no_more_checkpoints_than_allowed_and_the_newest_turn_first(limit: int) -> None:
    async def scenario(house: House) -> None:
        contents = ["hi"]
        for _ in range(3):
            request = chat(*contents)
            answer = await house.ask(request)
            assert answer.tokens == house.truth(request)
            kept = house.slot(0).session.chain.positions
            assert len(kept) <= limit
            assert not limit or kept[-1] == starts(request)[-1]
            contents += [answer.text, "and then?"]

    in_house(scenario, seeds=[0], checkpoints=limit)


def test_taking_checkpoints_changes_no_answer_and_no_chunk() -> None:
    async def scenario(house: House) -> tuple[object, ...]:
        answers = [await house.ask(chat(*contents)) for contents in (["hi"], ["hi", "well", "yes"])]
        reads = [what for _, what in house.world.trace if isinstance(what, tuple) and what[0] == "read"]
        assert answers[0].reused == 0
        return answers[0].tokens, answers[1].tokens, tuple(reads[:6])

    (with_,), (without,) = (in_house(scenario, seeds=[0], checkpoints=n) for n in (6, 0))
    assert with_ == without


@pytest.mark.parametrize("exact", ["full", "cache", "off"])
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
@pytest.mark.parametrize("by", ["request", "setting"])
def test_with_the_cache_off_nothing_is_used_and_nothing_is_kept(
    exact: Exactness, hybrid: bool, by: str
) -> None:
    cache: CacheUse = "off" if by == "request" else "on"

    async def scenario(house: House) -> None:
        first = await house.ask(chat("hi", cache=cache))
        again = await house.ask(chat("hi", cache=cache))
        turn = await house.ask(chat("hi", first.text, "more"))
        assert first.tokens == again.tokens == house.truth(chat("hi"))
        assert (first.reused, again.reused, turn.reused) == (0, 0, 0)
        assert again.end.reuse.why == "The cache is off for this request."
        assert again.end.reuse.source == "none"
        assert turn.tokens == house.truth(chat("hi", first.text, "more"))
        if by == "setting":
            report = (await house.engine.status()).cache
            assert (report.peak, report.states) == (0, 0)

    in_house(scenario, seeds=[0], cache=by == "request", exact=exact, hybrid=hybrid)


def test_a_request_with_the_cache_off_uses_nothing_that_others_kept() -> None:
    async def scenario(house: House) -> None:
        first = await house.ask(chat("hi"))
        off = await house.ask(chat("hi", cache="off"))
        assert (off.reused, off.end.reuse.slot) == (0, 1)  # an empty slot, so the chat is not lost
        assert (await house.ask(chat("hi", first.text, "more"))).reused > 0

    in_house(scenario, seeds=[0])


def test_a_read_only_request_uses_what_is_kept_and_keeps_nothing_but_the_root() -> None:
    async def scenario(house: House) -> None:
        root = system_end(chat("hi"))
        first = await house.ask(chat("hi", cache="read-only"))
        assert len(house.placement.sessions[0].keys) == root
        assert house.slot(0).session.chain.positions == (root,)
        again = await house.ask(chat("hi", first.text, "more", cache="read-only"))
        assert again.reused == root
        kept = await house.ask(chat("hi", first.text, "more"))
        assert kept.reused == root
        used = await house.ask(chat("hi", first.text, "more", kept.text, "yes", cache="read-only"))
        assert used.reused == starts(chat("hi", first.text, "more"))[-1]
        assert len(house.placement.sessions[0].keys) == used.reused
        assert used.tokens == house.truth(chat("hi", first.text, "more", kept.text, "yes"))

    in_house(scenario, seeds=[0], slots=1)


def test_the_answer_names_the_place_where_a_prompt_leaves_the_nearest_known_one() -> None:
    async def scenario(house: House) -> None:
        morning = {"role": "system", "content": "You help. " * 30 + "It is 08:00. " + "Be kind. " * 30}
        evening = {"role": "system", "content": "You help. " * 30 + "It is 20:00. " + "Be kind. " * 30}
        await house.ask(chat("hi", system=morning))
        answer = await house.ask(chat("hi", system=evening))
        reuse = answer.end.reuse
        assert reuse.reused == 0
        assert reuse.why is not None
        assert reuse.diverged is not None
        assert (reuse.diverged.message, reuse.diverged.role) == (0, "system")
        assert reuse.diverged.before.endswith("It is ")
        assert reuse.diverged.after.startswith("20:00. Be kind.")
        assert len(reuse.diverged.before) == len(reuse.diverged.after) == 60

    in_house(scenario, seeds=[0])


def test_the_device_holds_the_same_bits_resumed_and_read_straight_through() -> None:
    async def scenario(house: House) -> str:
        cache: CacheUse = "on" if house.engine.settings.checkpoints else "off"
        await house.ask(chat("hi", cache=cache))
        answer = await house.ask(chat("hi", "well", "yes", cache=cache))
        assert (answer.reused > 0) == (cache == "on")
        return (await house.engine.slot(0).ask(DigestRequest(), 1)).value

    warm, cold = (in_house(scenario, seeds=[0], slots=1, checkpoints=n) for n in (6, 0))
    assert warm == cold


def test_the_events_of_a_resumed_prompt_begin_at_what_is_reused() -> None:
    async def scenario(house: House) -> None:
        first = await house.ask(chat("hi"))
        answer = await house.ask(chat("hi", first.text, "more"))
        (placed,), (mounted,) = answer.of(Placed), answer.of(Mounted)
        assert placed.reused == mounted.reused == answer.reused
        assert (placed.source, placed.slot) == ("checkpoint", 0)
        assert all(p.reused == answer.reused < p.position for p in answer.of(ReadProgress))

    in_house(scenario, seeds=[0])


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
def test_a_slot_that_is_about_to_be_overwritten_is_no_source(hybrid: bool) -> None:
    async def scenario(house: House) -> None:
        parked = await house.ask(stranger(1))
        await house.ask(chat("hi"))
        await house.ask(stranger(2))
        back = stranger(1, parked.text, "more")
        runs = [await house.submit(request) for request in (back, chat("something else"))]
        answers = [await house.ended(run) for run in runs]
        assert [run.slot for run in runs] == [1, 0]
        assert answers[0].end.reuse.source == "parked"
        assert answers[0].tokens == house.truth(back)
        assert answers[1].tokens == house.truth(chat("something else"))

    in_house(scenario, hybrid=hybrid)


def test_a_cache_too_small_for_a_state_refuses_it_and_serves_the_request() -> None:
    async def scenario(house: House) -> None:
        for _ in range(2):
            answer = await house.ask(chat("hi"))
            assert (answer.reused, answer.tokens) == (0, house.truth(chat("hi")))
        cache = (await house.engine.status()).cache
        assert (cache.states, cache.peak, cache.evictions) == (0, 0, {})
        assert cache.refusals > 0

    in_house(scenario, seeds=[0], budget=7)


def test_with_room_for_one_state_the_newest_turn_has_it() -> None:
    async def scenario(house: House) -> None:
        first = await house.ask(chat("hi"))
        second = chat("hi", first.text, "more")
        answer = await house.ask(second)
        assert answer.reused == starts(second)[0]
        assert house.slot(0).session.chain.positions == (starts(second)[1],)
        assert (await house.engine.status()).cache.peak <= 8

    in_house(scenario, seeds=[0], budget=8)


def test_what_is_evicted_is_no_place_to_resume_and_the_answer_stays_right() -> None:
    async def scenario(house: House) -> None:
        chats = [[f"chat {i}"] for i in range(3)]
        for _ in range(3):
            for contents in chats:
                answer = await house.ask(chat(*contents))
                assert answer.tokens == house.truth(chat(*contents))
                contents += [answer.text, "and?"]
        cache = (await house.engine.status()).cache
        assert cache.evictions
        assert sum(cache.used.values()) <= cache.peak <= 32

    in_house(scenario, seeds=[0], budget=32, slots=3)
