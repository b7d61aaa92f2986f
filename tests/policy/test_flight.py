from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.directory import CutHash
from regrow.policy.flight import Reading, awaited, deepest_common
from regrow.policy.keys import Keys, as_keys, common_prefix
from tests.policy.chats import NAMESPACE, chat, hashed, plan_of

SYSTEM = ("system", 300)
PROMPTS = [chat(SYSTEM, ("user", 100, i)) for i in range(4)]
ROOT = plan_of(PROMPTS[0]).ends[0].position


def cuts(keys: Keys, salt: str | None = None) -> tuple[CutHash, ...]:
    return hashed(keys, plan_of(keys), NAMESPACE.salted(salt))


def reading(keys: Keys, position: int, slot: int = 0, salt: str | None = None) -> Reading:
    return Reading(slot, cuts(keys, salt), position)


def test_s6_a_new_chat_waits_for_the_system_prompt_that_another_one_reads() -> None:
    reader = reading(PROMPTS[0], 64)
    assert awaited(cuts(PROMPTS[1]), 0, [reader]) == (reader, ROOT)


def test_s6_the_same_prompt_waits_for_its_last_cut() -> None:
    reader = reading(PROMPTS[0], 0)
    assert awaited(cuts(PROMPTS[0]), 0, [reader]) == (reader, plan_of(PROMPTS[0]).cuts[-1])


def test_s6_once_the_reader_is_past_what_both_share_there_is_nothing_to_wait_for() -> None:
    for position in (ROOT, ROOT + 1, 380):
        assert awaited(cuts(PROMPTS[1]), 0, [reading(PROMPTS[0], position)]) is None


def test_s6_nobody_waits_for_a_reader_that_is_behind_what_is_known_already() -> None:
    longer = chat(SYSTEM, ("user", 100, 0), ("assistant", 50), ("user", 100))
    known = plan_of(longer).ends[1].position
    assert awaited(cuts(longer), known, [reading(longer, known - 1)]) is None
    reader = reading(longer, known)
    assert awaited(cuts(longer), known, [reader]) == (reader, plan_of(longer).cuts[-1])


def test_s6_nobody_waits_for_what_can_be_resumed_at_once() -> None:
    assert awaited(cuts(PROMPTS[1]), ROOT, [reading(PROMPTS[0], 64)]) is None
    assert awaited(cuts(PROMPTS[1]), ROOT, [reading(PROMPTS[0], ROOT)]) is None


def test_s6_of_several_readers_the_one_that_will_share_most_is_waited_for() -> None:
    root, deep = reading(PROMPTS[0], 320, slot=0), reading(PROMPTS[1], 0, slot=1)
    for readers in ([root, deep], [deep, root]):
        found = awaited(cuts(PROMPTS[1]), 0, readers)
        assert found == (deep, plan_of(PROMPTS[1]).cuts[-1])


def test_s6_without_readers_or_cuts_nobody_waits() -> None:
    assert awaited(cuts(PROMPTS[0]), 0, []) is None
    short = as_keys(range(20))
    assert awaited(cuts(short), 0, [reading(short, 0)]) is None


def test_r3_nobody_waits_for_a_reader_of_another_namespace() -> None:
    assert awaited(cuts(PROMPTS[0]), 0, [reading(PROMPTS[0], 0, salt="somebody else")]) is None


branchy = st.lists(st.integers(0, 1), max_size=6).map(
    lambda bits: as_keys([bit for bit in bits for _ in range(64)] + [9])
)


@given(branchy, branchy)
def test_the_deepest_common_cut_is_the_last_one_that_both_plans_have_below_where_they_part(
    one: Keys, other: Keys
) -> None:
    shared = common_prefix(one, other)
    both = [p for p in plan_of(one).cuts if p in plan_of(other).cuts and p <= shared]
    assert deepest_common(cuts(one), cuts(other)) == max(both, default=0)


@given(branchy, st.lists(st.tuples(branchy, st.integers(0, 400)), max_size=4), st.integers(0, 400))
def test_s6_waiting_never_takes_longer_than_reading(
    prompt: Keys, others: list[tuple[Keys, int]], have: int
) -> None:
    readers = [reading(keys, position, slot) for slot, (keys, position) in enumerate(others)]
    found = awaited(cuts(prompt), have, readers)
    worth = [
        common
        for reader in readers
        if (common := deepest_common(cuts(prompt), reader.cuts)) > have and have <= reader.position < common
    ]
    if found is None:
        assert not worth
    else:
        reader, cut = found
        assert cut == max(worth)
        assert cut - reader.position <= cut - have
