"""P1: whether p is a cut depends on keys[0:p] and fixed settings alone."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from regrow.policy.keys import as_keys
from regrow.policy.plan import (
    ChunkTable,
    MessageEnd,
    MessageMarks,
    MessageStart,
    build_plan,
    message_ends,
    message_starts,
)
from tests.policy.chats import BEGIN, END, LINE, MARKS, chat, message, plan_of

pattern = st.lists(st.integers(1, 3), min_size=0, max_size=4).map(tuple)
roles = st.sampled_from(["system", "user", "tool", "assistant"])
any_marks = st.builds(
    MessageMarks, begin=st.dictionaries(roles, pattern), end=st.dictionaries(roles, pattern)
)
some_keys = st.lists(st.integers(1, 4), max_size=80)


def as_defined(keys: list[int], marks: MessageMarks) -> list[MessageEnd]:
    """The definition, written out: at each end pattern, the begin mark that was complete last."""

    def at(place: int, mark: tuple[int, ...]) -> bool:
        return bool(mark) and keys[place : place + len(mark)] == list(mark)

    ends = {}
    for role, end in marks.end.items():
        for place in range(len(keys)):
            if role == "assistant" or not at(place, end) or place + len(end) >= len(keys):
                continue
            opened = [
                (start + len(mark), start, index, name)
                for start in range(place + 1)
                for index, (name, mark) in enumerate(marks.begin.items())
                if at(start, mark) and start + len(mark) <= place
            ]
            if opened and max(opened)[3] != "assistant":
                ends[place + len(end)] = max(opened)[3]
    return [MessageEnd(p, ends[p]) for p in sorted(ends)]


@settings(max_examples=300)
@given(some_keys, any_marks)
@example(
    [1, 1, 2, 3, 2, 1], MessageMarks({"user": (1,), "tool": (1, 1, 2, 3)}, {"user": (2,), "tool": (3, 2)})
)
def test_message_ends_are_what_their_definition_says(keys: list[int], marks: MessageMarks) -> None:
    assert [e.position for e in message_ends(as_keys(keys), marks)] == [
        e.position for e in as_defined(keys, marks)
    ]


@settings(max_examples=300)
@given(some_keys, any_marks)
def test_at_each_end_stands_the_role_of_the_open_message(keys: list[int], marks: MessageMarks) -> None:
    one_end = MessageMarks(marks.begin, {"user": marks.end.get("user", ())})
    assert list(message_ends(as_keys(keys), one_end)) == as_defined(keys, one_end)


@settings(max_examples=300)
@given(some_keys, some_keys, any_marks)
def test_p1_what_follows_never_adds_or_takes_a_cut(
    keys: list[int], extension: list[int], marks: MessageMarks
) -> None:
    table = ChunkTable.uniform(64)
    short = build_plan(as_keys(keys), table, marks)
    long = build_plan(as_keys(keys + extension), table, marks)
    assert tuple(cut for cut in long.cuts if cut < len(keys)) == short.cuts
    assert tuple(end for end in long.ends if end.position < len(keys)) == short.ends


@settings(max_examples=200)
@given(some_keys, some_keys, some_keys, any_marks)
def test_p1_two_prompts_with_the_same_keys_below_p_agree_on_p(
    keys: list[int], one: list[int], other: list[int], marks: MessageMarks
) -> None:
    plans = [build_plan(as_keys([*keys, *rest, 1]), ChunkTable.uniform(64), marks) for rest in (one, other)]
    assert plans[0].is_cut(len(keys)) == plans[1].is_cut(len(keys))


@given(some_keys, any_marks)
def test_a_cut_lies_inside_the_prompt(keys: list[int], marks: MessageMarks) -> None:
    plan = build_plan(as_keys(keys), ChunkTable.uniform(64), marks)
    assert all(0 < cut < len(keys) for cut in plan.cuts)
    assert list(plan.cuts) == sorted(set(plan.cuts))
    assert {end.position for end in plan.ends} <= set(plan.cuts)


def test_the_end_of_every_message_but_the_assistants_is_a_cut() -> None:
    parts = [("system", 5), ("user", 7), ("assistant", 9), ("tool", 4), ("assistant", 2), ("user", 1)]
    edges, position = [], 0
    for role, length in parts:
        position += len(message(role, length))
        edges.append(MessageEnd(position, role))
    plan = plan_of(chat(*parts))
    assert list(plan.ends) == [edge for edge in edges if edge.role != "assistant"]


def test_an_end_pattern_inside_an_assistant_message_cuts_nothing() -> None:
    keys = as_keys([*message("user", 3), *MARKS.begin["assistant"], 50, END, LINE, 51, END, LINE, 52])
    assert [end.role for end in message_ends(keys, MARKS)] == ["user"]


def test_the_assistants_own_end_is_not_looked_for_in_other_messages() -> None:
    marks = MessageMarks(MARKS.begin, {"user": (END, LINE), "assistant": (7,)})
    keys = as_keys([*MARKS.begin["user"], 50, 7, 51, END, LINE, BEGIN])
    assert message_ends(keys, marks) == (MessageEnd(8, "user"),)


def test_a_tool_result_that_opens_with_the_users_mark_and_more_is_a_tools() -> None:
    keys = chat(("user", 3), ("tool", 3))
    assert [end.role for end in message_ends(keys, MARKS)] == ["user", "tool"]
    assert [start.role for start in message_starts(keys, MARKS)] == ["user", "tool", "assistant"]


def test_the_longest_mark_at_a_place_wins_in_whatever_order_the_roles_stand() -> None:
    for roles in (["user", "tool"], ["tool", "user"]):
        marks = MessageMarks({role: MARKS.begin[role] for role in roles}, MARKS.end)
        keys = as_keys([*message("tool", 3), BEGIN])
        assert [end.role for end in message_ends(keys, marks)] == ["tool"]
        assert [start.role for start in message_starts(keys, marks)] == ["tool"]


def test_a_mark_inside_a_longer_one_opens_nothing() -> None:
    marks = MessageMarks({"tool": (5, 6, 7, 8), "user": (6, 7)}, {"user": (9,)})
    assert [end.role for end in message_ends(as_keys([5, 6, 7, 8, 1, 9, 1]), marks)] == ["tool"]


def test_messages_merged_under_one_mark_are_one_message() -> None:
    merged = [*MARKS.begin["user"], 50, 51, LINE, 52, 53, END, LINE]
    assert message_ends(as_keys([*merged, BEGIN]), MARKS) == (MessageEnd(len(merged), "user"),)


def test_an_end_before_any_message_has_begun_cuts_nothing() -> None:
    assert message_ends(as_keys([5, END, LINE, 5, END, LINE, 5]), MARKS) == ()


def test_a_message_that_ends_with_the_prompt_is_no_cut_of_it() -> None:
    keys = message("user", 3)
    assert message_ends(as_keys(keys), MARKS) == ()
    assert message_ends(as_keys([*keys, 9]), MARKS) == (MessageEnd(len(keys), "user"),)


def test_starts_name_every_message_with_its_place() -> None:
    keys = chat(("system", 5), ("user", 7), ("assistant", 9))
    places = [0, 10, 22, 36]
    assert message_starts(keys, MARKS) == tuple(
        MessageStart(place, role)
        for place, role in zip(places, ["system", "user", "assistant", "assistant"], strict=True)
    )


def test_empty_marks_cut_on_the_grid_alone() -> None:
    plan = build_plan(chat(("user", 200)), ChunkTable.uniform(64), MessageMarks())
    assert plan.cuts == (64, 128, 192)
    assert not plan.ends
    assert not plan.starts
