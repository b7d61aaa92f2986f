from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.explain import Known, Miss, MissReason, divergence_message, why
from regrow.policy.plan import MessageMarks, build_plan
from tests.policy.chats import TABLE, chat, plan_of

CHUNK = 64
PROMPT = chat(("system", 400), ("user", 200), ("assistant", 100), ("user", 50))
PLAN = plan_of(PROMPT)


def known(shared: int, pure: int | None = None, usable: int = 0, holder: str = "slot 2") -> Known:
    pure = shared if pure is None else pure
    return Known(prompts=True, shared=shared, pure=pure, usable=usable, holder=holder)


def missed(facts: Known, reused: int, reason: MissReason) -> str:
    """The sentence for a miss of this kind."""
    miss = why(PLAN, facts, reused, chunk=CHUNK)
    assert miss is not None
    assert miss.reason == reason
    assert miss.sentence.endswith(".")
    assert "\n" not in miss.sentence
    return miss.sentence


@pytest.mark.parametrize("lost", [0, 1, CHUNK, 2 * CHUNK])
def test_e1_nothing_is_said_when_at_most_two_chunks_were_lost(lost: int) -> None:
    assert why(PLAN, known(500), 500 - lost, chunk=CHUNK) is None


def test_e1_something_is_said_whenever_nothing_was_reused() -> None:
    assert "at position 70" in missed(known(70), 0, "no checkpoint")


def test_e1_more_than_two_chunks_lost_are_explained_by_the_missing_checkpoint() -> None:
    sentence = missed(known(500), 500 - 2 * CHUNK - 1, "no checkpoint")
    assert "No checkpoint was kept between positions 371 and 500" in sentence


def test_e1_it_says_that_no_other_prompt_is_known_yet() -> None:
    assert missed(Known(prompts=False), 0, "nothing known") == "No other prompt is known yet."


def test_e1_it_says_that_the_cache_is_off() -> None:
    off = Miss("cache off", "The cache is off for this request.")
    assert why(PLAN, known(500), 0, chunk=CHUNK, cache="off") == off
    assert why(PLAN, Known(prompts=False), 0, chunk=CHUNK, cache="off") == off
    assert why(PLAN, known(500), 500, chunk=CHUNK, cache="read-only") is None


def test_e1_it_says_that_only_another_namespace_knows_prompts() -> None:
    sentence = missed(Known(prompts=False, elsewhere=True), 0, "other namespace")
    assert "another model, adapter or cache salt" in sentence


def test_e1_it_says_that_no_known_prompt_begins_like_this_one() -> None:
    sentence = missed(known(0), 0, "no such beginning")
    assert sentence.startswith("No known prompt begins like this one;")
    assert "at position 0, in message 0 (system)" in sentence


def test_case_35_it_names_the_place_where_the_prompt_first_differs() -> None:
    first = "first differs from the nearest known prompt at position 30, in message 0 (system)"
    assert first in missed(known(30), 0, "between cuts")
    assert "at position 450, in message 1 (user)" in missed(known(450), 0, "no checkpoint")


def test_e1_it_says_that_the_prompt_differs_before_any_place_to_resume() -> None:
    assert "no place to resume between positions 0 and 30;" in missed(known(30), 0, "between cuts")


def test_r2_a_cut_at_the_very_end_is_no_place_to_resume() -> None:
    plan = build_plan(PROMPT[:64], TABLE, MessageMarks())
    assert not plan.cuts
    miss = why(plan, Known(prompts=True, shared=64, pure=64), 0, chunk=CHUNK)
    assert miss == Miss("between cuts", "There is no place to resume between positions 0 and 64.")


def test_e1_it_says_that_another_conversation_keeps_what_is_known() -> None:
    sentence = missed(known(500, usable=405), 0, "held elsewhere")
    assert "Its first 405 tokens are held by slot 2, which another conversation keeps" in sentence


def test_e1_it_says_that_a_part_was_decoded() -> None:
    sentence = missed(known(700, pure=410), 405, "decoded")
    assert "between positions 410 and 700 was decoded, not read" in sentence


def test_a_prompt_known_as_a_whole_differs_nowhere() -> None:
    sentence = missed(known(PLAN.length), 0, "no checkpoint")
    assert sentence == f"No checkpoint was kept between positions 0 and {PLAN.length}."


def test_a_difference_outside_any_message_has_only_a_position() -> None:
    plan = build_plan(PROMPT, TABLE, MessageMarks())
    miss = why(plan, known(300), 0, chunk=CHUNK)
    assert miss is not None
    assert miss.sentence.endswith("at position 300.")
    assert divergence_message(plan, 300) is None


@given(
    st.booleans(),
    st.booleans(),
    st.integers(0, PLAN.length),
    st.integers(0, PLAN.length),
    st.integers(0, PLAN.length),
    st.integers(0, PLAN.length),
)
def test_every_miss_has_one_of_the_reasons_that_are_counted(
    prompts: bool, elsewhere: bool, shared: int, pure: int, usable: int, reused: int
) -> None:
    reused = min(reused, shared)
    miss = why(PLAN, Known(prompts, elsewhere, shared, pure, usable, "slot 2"), reused, chunk=CHUNK)
    assert (miss is None) == (prompts and reused > 0 and shared - reused <= 2 * CHUNK)
    assert miss is None or miss.reason in get_args(MissReason)


def test_a_position_lies_in_the_message_that_opened_last() -> None:
    opened = [start.position for start in PLAN.starts]
    roles = ["system", "user", "assistant", "user", "assistant"]
    for index, (place, role) in enumerate(zip(opened, roles, strict=True)):
        assert divergence_message(PLAN, place) == (index, role)
    assert divergence_message(PLAN, opened[1] - 1) == (0, "system")
    assert divergence_message(PLAN, len(PROMPT)) == (4, "assistant")
