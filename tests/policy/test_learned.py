import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.checkpoints import checkpoint_cuts
from regrow.policy.keys import Keys, as_keys, common_prefix
from regrow.policy.learned import BranchPoints, branch_point
from tests.policy.chats import MARKS, hashed, message, plan_of

CHUNK = 64


@pytest.mark.parametrize(("known", "expected"), [(100, None), (164, None), (165, 165), (400, 400)])
def test_p4_a_branch_more_than_one_chunk_past_the_resume_point_is_remembered(
    known: int, expected: int | None
) -> None:
    assert branch_point(known, 100, CHUNK) == expected


def test_what_was_learned_is_known_and_nothing_else_is() -> None:
    points = BranchPoints()
    points.learn(b"one")
    points.learn(b"one")
    assert b"one" in points
    assert b"two" not in points


def test_of_too_many_the_least_recently_learned_or_met_is_forgotten() -> None:
    points = BranchPoints(limit=2)
    points.learn(b"one")
    points.learn(b"two")
    assert b"one" in points  # met again
    points.learn(b"three")
    assert [name in points for name in (b"one", b"two", b"three")] == [True, False, True]
    points.learn(b"one")
    points.learn(b"four")
    assert [name in points for name in (b"one", b"three", b"four")] == [True, False, True]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30), st.integers(1, 4))
def test_the_last_few_learned_or_met_are_exactly_what_is_known(
    uses: list[tuple[bool, int]], limit: int
) -> None:
    points, recent = BranchPoints(limit), list[int]()
    for learn, number in uses:
        name = bytes([number])
        if learn:
            points.learn(name)
        else:
            assert (name in points) == (number in recent)
        if learn or number in recent:
            recent = [*(n for n in recent if n != number), number][-limit:]


def dated(day: int) -> Keys:
    """A chat whose system prompt has a date in its middle."""
    head, tail = message("system", 300)[:-2], message("system", 200, 1)[3:]
    return as_keys([*head, 50 + day, *tail, *message("user", 20, day), *MARKS.begin["assistant"]])


def test_case_6_the_system_prompt_with_a_date_in_it_is_shared_up_to_the_date_from_the_third_chat_on() -> None:
    """The second chat meets no state where it leaves the first one, but leaves one there (P4)."""
    points = BranchPoints()
    prompts = [dated(day) for day in range(3)]
    states: set[bytes] = set()
    resumed = []
    for number, prompt in enumerate(prompts):
        plan = plan_of(prompt)
        hashes = dict(hashed(prompt, plan))
        shared = max((common_prefix(prompt, known) for known in prompts[:number]), default=0)
        known = plan.last_cut_at_or_below(shared)
        resume = max((p for p, key in hashes.items() if key in states and p <= shared), default=0)
        resumed.append(resume)
        point = branch_point(known, resume, CHUNK)
        if point is not None:
            points.learn(hashes[point])
        learned = [p for p, key in hashes.items() if key in points]
        states |= {hashes[cut.position] for cut in checkpoint_cuts(plan, 0, learned, 6)}
    date = common_prefix(prompts[0], prompts[1])
    assert resumed == [0, 0, date // CHUNK * CHUNK]
