import pytest

from regrow.policy.explain import Known, divergence_message, why
from regrow.policy.plan import MessageMarks, build_plan
from tests.policy.chats import TABLE, chat, plan_of

CHUNK = 64
PROMPT = chat(("system", 400), ("user", 200), ("assistant", 100), ("user", 50))
PLAN = plan_of(PROMPT)


def known(shared: int, pure: int | None = None, usable: int = 0, holder: str = "slot 2") -> Known:
    pure = shared if pure is None else pure
    return Known(prompts=True, shared=shared, pure=pure, usable=usable, holder=holder)


def said(facts: Known, reused: int) -> str:
    sentence = why(PLAN, facts, reused, chunk=CHUNK)
    assert sentence is not None
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("lost", [0, 1, CHUNK, 2 * CHUNK])
def test_e1_nothing_is_said_when_at_most_two_chunks_were_lost(lost: int) -> None:
    assert why(PLAN, known(500), 500 - lost, chunk=CHUNK) is None


def test_e1_more_than_two_chunks_lost_are_explained_by_the_missing_checkpoint() -> None:
    sentence = said(known(500), 500 - 2 * CHUNK - 1)
    assert "No checkpoint was kept between positions 371 and 500" in sentence


def test_e1_it_says_that_no_other_prompt_is_known_yet() -> None:
    assert said(Known(prompts=False), 0) == "No other prompt is known yet."


def test_e1_it_says_that_the_cache_is_off() -> None:
    sentence = why(PLAN, known(500), 0, chunk=CHUNK, cache="off")
    assert sentence == "The cache is off for this request."
    assert why(PLAN, known(500), 500, chunk=CHUNK, cache="read-only") is None


def test_e1_it_says_that_only_another_namespace_knows_prompts() -> None:
    assert "another model, adapter or cache salt" in said(Known(prompts=False, elsewhere=True), 0)


def test_e1_it_says_that_no_known_prompt_begins_like_this_one() -> None:
    sentence = said(known(0), 0)
    assert sentence.startswith("No known prompt begins like this one;")
    assert "at position 0, in message 0 (system)" in sentence


def test_case_35_it_names_the_place_where_the_prompt_first_differs() -> None:
    assert "first differs from the nearest known prompt at position 30, in message 0 (system)" in said(
        known(30), 0
    )
    assert "at position 450, in message 1 (user)" in said(known(450), 0)


def test_e1_it_says_that_the_prompt_differs_before_any_place_to_resume() -> None:
    assert "no place to resume between positions 0 and 30;" in said(known(30), 0)


def test_e1_it_says_that_another_conversation_keeps_what_is_known() -> None:
    sentence = said(known(500, usable=405), 0)
    assert "Its first 405 tokens are held by slot 2, which another conversation keeps" in sentence


def test_e1_it_says_that_a_part_was_decoded() -> None:
    sentence = said(known(700, pure=410), 405)
    assert "between positions 410 and 700 was decoded, not read" in sentence


def test_a_prompt_known_as_a_whole_differs_nowhere() -> None:
    assert said(known(PLAN.length), 0) == f"No checkpoint was kept between positions 0 and {PLAN.length}."


def test_a_difference_outside_any_message_has_only_a_position() -> None:
    plan = build_plan(PROMPT, TABLE, MessageMarks())
    sentence = why(plan, known(300), 0, chunk=CHUNK)
    assert sentence is not None
    assert sentence.endswith("at position 300.")
    assert divergence_message(plan, 300) is None


def test_a_position_lies_in_the_message_that_opened_last() -> None:
    opened = [start.position for start in PLAN.starts]
    roles = ["system", "user", "assistant", "user", "assistant"]
    for index, (place, role) in enumerate(zip(opened, roles, strict=True)):
        assert divergence_message(PLAN, place) == (index, role)
    assert divergence_message(PLAN, opened[1] - 1) == (0, "system")
    assert divergence_message(PLAN, len(PROMPT)) == (4, "assistant")
