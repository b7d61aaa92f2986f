from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.checkpoints import (
    assistant_starts,
    checkpoint_cuts,
    last_start,
    message_end,
    system_end,
)
from regrow.policy.keys import as_keys, common_prefix
from regrow.policy.plan import ChunkTable, MessageMarks, ReadPlan, build_plan
from tests.policy.chats import END, LINE, MARKS, chat, message, plan_of

SYSTEM, USER, TOOL, ANSWER = ("system", 20), ("user", 10), ("tool", 30), ("assistant", 15)
parts = st.lists(
    st.tuples(st.sampled_from(["system", "user", "tool", "assistant"]), st.integers(0, 90)),
    min_size=1,
    max_size=8,
)


def ends(plan: ReadPlan, *indices: int) -> list[int]:
    return [plan.ends[i].position for i in indices]


def protected(plan: ReadPlan, limit: int = 6) -> list[int]:
    return [c.position for c in checkpoint_cuts(plan, 0, (), limit) if c.protected]


def test_p3_the_first_turn_of_a_chat_of_40_tokens_gets_checkpoints() -> None:  # case 1
    plan = plan_of(chat(("system", 15), ("user", 12)))
    assert plan.length < 45
    assert protected(plan) == ends(plan, 0, 1)


def test_p3_the_last_two_assistant_starts_and_the_system_prompt_are_protected() -> None:
    plan = plan_of(chat(SYSTEM, USER, ANSWER, USER, ANSWER, USER))
    assert protected(plan) == ends(plan, 0, 2, 3)


def test_p3_in_a_tool_loop_the_turn_after_the_last_user_message_stays_protected() -> None:  # case 7
    loop = [part for _ in range(20) for part in (ANSWER, TOOL)]
    plan = plan_of(chat(SYSTEM, USER, ANSWER, USER, *loop))
    assert protected(plan) == ends(plan, 0, 2, -2, -1)
    assert [plan.ends[i].role for i in (0, 2, -2, -1)] == ["system", "user", "tool", "tool"]


def test_p3_between_the_results_of_two_tools_the_assistant_does_not_speak() -> None:
    plan = plan_of(chat(SYSTEM, USER, ANSWER, TOOL, TOOL, TOOL))
    assert list(assistant_starts(plan)) == ends(plan, 1, 4)


def test_p3_of_several_end_patterns_in_one_message_the_last_is_before_the_assistant() -> None:
    quoting = [*MARKS.begin["user"], 50, END, LINE, 51, END, LINE]
    keys = as_keys([*message("system", 5), *quoting, *MARKS.begin["assistant"]])
    plan = plan_of(keys)
    assert len(plan.ends) == 3
    assert list(assistant_starts(plan)) == ends(plan, 2)


def test_p3_a_user_message_that_tools_follow_counts_from_where_the_assistant_speaks() -> None:
    plan = plan_of(chat(SYSTEM, USER, ANSWER, USER, TOOL, ANSWER, TOOL, ANSWER, TOOL))
    assert protected(plan) == ends(plan, 0, 3, 4, 5)


def test_p3_system_and_developer_messages_at_the_head_are_one_system_prompt() -> None:
    plan = plan_of(chat(SYSTEM, ("developer", 9), USER, ("system", 5), USER))
    assert [system_end(plan)] == ends(plan, 1)


def test_a_system_message_after_the_talk_has_begun_is_no_system_prompt() -> None:
    assert system_end(plan_of(chat(USER, SYSTEM, USER))) == 0
    assert system_end(plan_of(chat(ANSWER, SYSTEM, USER))) == 0


def test_where_no_mark_opens_the_assistant_it_speaks_where_unmarked_text_follows() -> None:
    marks = MessageMarks({k: v for k, v in MARKS.begin.items() if k != "assistant"}, MARKS.end)
    head, turn = [*message("system", 5), *message("user", 5)], [*range(50, 60), LINE, *message("user", 4)]
    plan = build_plan(as_keys([*head, *turn, *turn, 70]), ChunkTable.uniform(64), marks)
    assert list(assistant_starts(plan)) == ends(plan, 1, 2, 3)


def test_a_raw_text_gets_a_checkpoint_at_its_last_cut() -> None:
    plan = build_plan(as_keys(range(200)), ChunkTable.uniform(64), MessageMarks())
    assert protected(plan) == [last_start(plan)] == [192]
    short = build_plan(as_keys(range(40)), ChunkTable.uniform(64), MessageMarks())
    assert checkpoint_cuts(short, 16, (), 6) == ()


def test_p3_long_reads_get_a_checkpoint_at_the_cut_at_or_below_each_interval() -> None:
    plan = build_plan(as_keys(range(1000)), ChunkTable.uniform(64), MessageMarks())
    cuts = checkpoint_cuts(plan, 300, (), 6)
    assert [(c.position, c.reason) for c in cuts] == [
        (256, "interval"),
        (576, "interval"),
        (896, "interval"),
        (960, "turn"),
    ]
    assert [c.position for c in checkpoint_cuts(plan, 0, (), 6)] == [960]


def test_p3_an_interval_below_the_first_cut_gets_nothing() -> None:
    plan = build_plan(as_keys(range(100)), ChunkTable.uniform(64), MessageMarks())
    assert [c.position for c in checkpoint_cuts(plan, 30, (), 6)] == [64]


def test_p4_learned_cuts_get_a_checkpoint_that_may_go() -> None:
    plan = plan_of(chat(("system", 300), USER))
    cuts = {c.position: c for c in checkpoint_cuts(plan, 0, (128, 130, 4096), 6)}
    assert cuts[128].reason == "learned"
    assert not cuts[128].protected
    assert not {130, 4096} & cuts.keys()


def test_p3_a_pin_gets_a_protected_checkpoint_at_the_cut_at_or_below_it() -> None:
    plan = plan_of(chat(SYSTEM, ("user", 200), ANSWER, USER, ANSWER, USER, ANSWER, USER))
    unpinned = protected(plan)
    for pin, cut in ((plan.ends[1].position, plan.ends[1].position), (200, 192)):
        cuts = {c.position: c for c in checkpoint_cuts(plan, 0, (), 6, pin)}
        assert cut not in unpinned
        assert (cuts[cut].reason, cuts[cut].protected) == ("pin", True)
        assert [p for p, c in cuts.items() if c.protected] == sorted({*unpinned, cut})


def test_p3_a_pin_comes_before_all_but_the_newest_turn() -> None:
    plan = plan_of(chat(SYSTEM, ("user", 200), ANSWER, USER))
    pin = 192
    assert [c.position for c in checkpoint_cuts(plan, 0, (), 2, pin) if c.protected] == [
        pin,
        last_start(plan),
    ]
    assert [c.position for c in checkpoint_cuts(plan, 0, (), 1, pin) if c.protected] == [last_start(plan)]


def test_p3_a_pin_below_the_first_cut_or_where_the_turn_is_anyway_adds_nothing() -> None:
    plan = plan_of(chat(SYSTEM, USER, ANSWER, USER))
    for pin in (0, plan.cuts[0] - 1, last_start(plan)):
        assert checkpoint_cuts(plan, 0, (), 6, pin) == checkpoint_cuts(plan, 0, (), 6)


talk = st.lists(
    st.tuples(st.sampled_from(["system", "user", "tool", "assistant"]), st.integers(0, 9)),
    min_size=1,
    max_size=6,
)


@given(talk, st.booleans(), st.data())
def test_each_message_ends_where_the_next_one_begins_also_behind_a_system_message_of_the_template(
    messages: list[tuple[str, int]], own: bool, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, len(messages) - 1))
    rendered = [("system", 20), *messages] if own else messages
    upto = rendered[: number + 1 + own]
    end = sum(len(message(role, length)) for role, length in upto)
    assert message_end(plan_of(chat(*rendered)), number, len(messages)) == end


def test_where_marks_do_not_tell_the_messages_apart_no_message_ends() -> None:
    merged = plan_of(chat(SYSTEM, USER, ANSWER, TOOL, USER))  # of 6 messages: two tool results under one mark
    assert [message_end(merged, number, 6) for number in range(6)] == [0] * 6
    quoting = plan_of(chat(SYSTEM, SYSTEM, USER, USER))
    assert [message_end(quoting, number, 2) for number in range(2)] == [0] * 2
    raw = build_plan(as_keys(range(200)), ChunkTable.uniform(64), MessageMarks())
    assert message_end(raw, 0, 1) == 0


def test_a_message_that_is_not_there_ends_nowhere() -> None:
    plan = plan_of(chat(SYSTEM, USER))
    assert [message_end(plan, number, 2) for number in (-1, 2, 3)] == [0, 0, 0]


@given(parts, st.integers(1, 200), st.integers(1, 7))
def test_p3_checkpoints_are_cuts_in_order_each_once(
    messages: list[tuple[str, int]], every: int, limit: int
) -> None:
    plan = plan_of(chat(*messages))
    positions = [c.position for c in checkpoint_cuts(plan, every, plan.cuts[:2], limit)]
    assert positions == sorted(set(positions))
    assert all(plan.is_cut(p) for p in positions)


@given(parts, st.integers(1, 7))
def test_p5_no_more_are_protected_than_are_kept_and_the_newest_always_is(
    messages: list[tuple[str, int]], limit: int
) -> None:
    plan = plan_of(chat(*messages))
    kept = protected(plan, limit)
    assert len(kept) <= limit
    assert bool(kept) == bool(plan.cuts)
    assert not kept or last_start(plan) in kept


def test_p5_a_limit_of_0_keeps_none_and_of_1_protects_the_newest_only() -> None:
    plan = plan_of(chat(SYSTEM, USER, ANSWER, USER))
    assert checkpoint_cuts(plan, 16, (), 0) == ()
    assert protected(plan, 1) == ends(plan, -1)


def test_case_2_every_next_turn_meets_a_checkpoint_at_its_last_assistant_start() -> None:
    """The template may rewrite the last reply: only what lies below its start is sure to be the same."""
    messages: list[tuple[str, int] | tuple[str, int, int]] = [SYSTEM, USER]
    for turn in range(6):
        now = chat(*messages)
        positions = {c.position for c in checkpoint_cuts(plan_of(now), 0, (), 6)}
        following = chat(*messages, ("assistant", 12, turn), USER)
        shared = common_prefix(now, following)
        assert max(p for p in positions if p <= shared) == last_start(plan_of(now))
        messages += [("assistant", 9, turn), USER]


def test_case_23_a_warm_turn_makes_at_most_two_new_checkpoints() -> None:
    messages: list[tuple[str, int]] = [SYSTEM, USER]
    known: set[int] = set()
    for turn in range(30):
        positions = {c.position for c in checkpoint_cuts(plan_of(chat(*messages)), 512, (), 6)}
        assert turn == 0 or len(positions - known) <= 2
        known |= positions
        messages += [ANSWER, TOOL if turn % 3 else USER]


def test_case_7_thinking_dropped_from_history_goes_back_to_the_turn_after_the_last_user_message() -> None:
    loop = [part for _ in range(10) for part in (("assistant", 40, 1), TOOL)]
    before = chat(SYSTEM, USER, *loop)
    rewritten = [part for _ in range(10) for part in (("assistant", 12, 2), TOOL)]
    after = chat(SYSTEM, USER, *rewritten, ("assistant", 5), USER)
    shared = common_prefix(before, after)
    kept = [p for p in protected(plan_of(before)) if p <= shared]
    assert max(kept) == plan_of(before).ends[1].position
