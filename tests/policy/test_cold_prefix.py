"""C1 to C9 as promises: what is cached, whose it is, when it is surely gone, and what follows from that."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.cold_prefix import (
    CONVERSATIONS,
    DEFAULT_TTL_S,
    LATCHES,
    RULES,
    UNKNOWN_TTL_S,
    Book,
    Conversation,
    Latch,
    Turn,
    cached_prefix_len,
    is_cold,
    is_known_cold,
    latches_of,
    left_out,
    merged,
    prefix_ttl,
    prune_decision,
    repack_decision,
    settle,
    touch,
    turn_of,
)
from regrow.policy.history import boundary_of, prune
from tests.policy.prompts import anthropic_turn, chat, chats, openai_turn

SYSTEM = "You are a coding agent. " * 40
TOOLS = [{"name": "run", "input_schema": {"type": "object"}}]
MARK = {"cache_control": {"type": "ephemeral"}}
TURNS = 20  # of a chat with 41 messages, whose boundary is 32
IDLE = 600.0


def turn(messages: list[dict], system: object = SYSTEM, **explicit: object) -> Turn:
    return turn_of(messages, system, TOOLS, **explicit)


def played(*steps: tuple[float, Turn]) -> tuple[list[bool], Book]:
    """Decide on turns at their times; returns what was decided, and the book."""
    book: Book = {}
    decided = []
    for now, one in steps:
        repack, book = repack_decision(book, one, now)
        decided.append(repack)
    return decided, book


# C1


@pytest.mark.parametrize(
    "marked",
    [
        {"role": "user", "content": "x", **MARK},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y", **MARK}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "x", **MARK}],
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x", **MARK}]},
    ],
    ids=["message", "block", "nested item", "part of an OpenAI message"],
)
def test_c1_the_prefix_reaches_to_the_last_marked_message_wherever_the_marker_stands(marked: dict) -> None:
    plain = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    assert cached_prefix_len([plain, marked, plain, marked, plain]) == 4


@pytest.mark.parametrize("marker", [None, {}, {"cache_control": None}])
def test_c1_without_a_marker_nothing_is_cached(marker: dict | None) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "x", **(marker or {})}], **(marker or {})}
    assert cached_prefix_len([message] * 3) == 0
    assert cached_prefix_len([]) == 0


def test_c1_the_name_of_a_marker_inside_a_tools_input_is_no_marker() -> None:
    use = {"type": "tool_use", "id": "1", "name": "edit", "input": {"cache_control": {"type": "ephemeral"}}}
    assert cached_prefix_len([{"role": "assistant", "content": [use]}]) == 0


def test_c1_the_caller_may_give_an_explicit_length() -> None:
    messages = chat(3, ttl=None)
    assert (turn(messages).cached, turn(messages, cached=5, ttl=60.0).cached) == (0, 5)
    assert turn(messages, cached=5, ttl=60.0).ttl == 60.0
    assert turn(messages, cached=99).cached == len(messages)


# C2


def marked(*ttls: str | None) -> list[dict]:
    return [
        {
            "role": "user",
            "content": [{"type": "text", "text": "x", "cache_control": {"type": "e", "ttl": ttl}}],
        }
        for ttl in ttls
    ]


def test_c2_the_largest_ttl_counts_and_a_marker_without_one_means_five_minutes() -> None:
    assert prefix_ttl(marked("5m", "1h", "5m")) == 3600
    assert prefix_ttl(marked("90s", None)) == DEFAULT_TTL_S == 300
    assert prefix_ttl(marked("1m")) == 60
    assert prefix_ttl(marked("2d", "1h")) == 172_800
    assert turn(chat(1, ttl=None)).ttl is None


@pytest.mark.parametrize("ttl", ["soon", "", 5, "-1m", ["1h"], "1h ", "9999999h"])
def test_c2_a_ttl_that_cannot_be_read_counts_as_a_day(ttl: object) -> None:
    assert prefix_ttl(marked(ttl)) == UNKNOWN_TTL_S


def test_c2_markers_of_system_and_tools_count_and_those_behind_the_prefix_do_not() -> None:
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = chat(2, ttl="5m")
    assert turn_of(messages, [{"type": "text", "text": "x", **hour}]).ttl == 3600
    assert turn_of(messages, None, [{"name": "run", **hour}]).ttl == 3600
    assert turn_of([*messages, *marked("1h")], cached=len(messages)).ttl == 300


# C3


def unmarked(value: object) -> object:
    if isinstance(value, dict):
        return {key: unmarked(value[key]) for key in sorted(value, reverse=True) if key != "cache_control"}
    return [unmarked(inner) for inner in value] if isinstance(value, list) else value


@given(st.one_of(chats(anthropic_turn, 5), chats(openai_turn, 5)))
def test_c3_markers_and_the_order_of_keys_change_no_hash(messages: list[dict]) -> None:
    one, other = turn(messages), turn(unmarked(messages))
    assert (one.key, one.digests) == (other.key, other.digests)


def test_c3_the_key_is_of_system_tools_and_the_first_message_that_is_no_system_message() -> None:
    first, other = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    system, developer = {"role": "system", "content": "s"}, {"role": "developer", "content": "s"}
    keys = {
        turn_of([first]).key,
        turn_of([other]).key,
        turn_of([first], "s").key,
        turn_of([first], None, TOOLS).key,
        turn_of([system, first]).key,
        turn_of([developer, first]).key,
    }
    assert len(keys) == 6
    assert turn_of([system, first, other]).key == turn_of([system, first]).key


def test_c3_without_such_a_message_there_is_no_key_and_no_decision() -> None:
    for messages in ([], [{"role": "system", "content": "s", **MARK}]):
        assert turn(messages).key is None
        assert repack_decision({}, turn(messages), 9.0) == (False, {})


@given(st.integers(0, 2 * TURNS))
def test_c3_a_chat_that_differs_in_a_shortened_message_does_not_share_the_latch(at: int) -> None:
    ours = chat(TURNS)
    theirs = [*ours]
    theirs[at] = {**ours[at], "content": [{"type": "text", "text": "another", **MARK}]}
    (_, cold), book = played((0, turn(ours)), (IDLE + 1, turn(ours)))
    assert cold
    repack, _ = repack_decision(book, turn(theirs), IDLE + 2)
    assert repack == (at >= boundary_of(len(ours)))


def test_c3_two_chats_under_one_system_prompt_never_share_a_latch() -> None:
    one, other = turn(chat(TURNS, seed=1)), turn(chat(TURNS, seed=2))
    decided, _ = played(
        (0, one), (0, other), (IDLE + 1, one), (IDLE + 1, one), (IDLE - 1, other), (IDLE, other)
    )
    assert decided == [False, False, True, True, False, False]


# C4


def test_c4_the_first_sighting_only_sets_the_baseline() -> None:
    assert played((1e9, turn(chat(TURNS))))[0] == [False]


@pytest.mark.parametrize("ttl, limit", [("5m", 600), ("1h", 7200), ("1m", 600), ("301s", 602)])
def test_c4_cold_is_strictly_more_than_twice_the_ttl_and_ten_minutes(ttl: str, limit: float) -> None:
    one = turn(chat(TURNS, ttl=ttl))
    assert played((0, one), (limit, one))[0] == [False, False]
    assert played((0, one), (limit + 0.001, one))[0] == [False, True]


def test_c4_a_longer_ttl_that_was_named_before_still_holds() -> None:
    hour, minutes = turn(chat(TURNS, ttl="1h")), turn(chat(TURNS + 1, ttl="5m"))
    assert played((0, hour), (10, minutes), (7000, minutes))[0] == [False] * 3
    assert played((0, hour), (10, minutes), (7211, minutes), (7211 + 601, minutes))[0][2:] == [True, True]
    _, book = played((0, hour), (10, minutes), (7211, minutes))
    assert is_cold(book, minutes, 7211 + 601, RULES)  # the hour is over since that cold turn


def test_c4_every_use_is_a_touch_also_one_without_markers_and_the_end_of_a_response() -> None:
    one, bare = turn(chat(TURNS)), turn(chat(TURNS, ttl=None))
    assert played((0, one), (500, bare), (1000, one))[0] == [False] * 3
    _, book = played((0, one))
    book = touch(book, {one.key: 500.0, "nobody": 500.0})
    assert repack_decision(book, one, 1000)[0] is False
    assert repack_decision(book, one, 1101)[0] is True
    assert list(book) == [one.key]


def test_c4_a_clock_that_went_backwards_counts_as_idle_zero() -> None:
    one = turn(chat(TURNS))
    assert played((10_000, one), (0, one), (10_000 + IDLE, one))[0] == [False] * 3
    _, book = played((10_000, one))
    assert touch(book, {one.key: 5.0})[one.key].touched == 10_000


gaps = st.sampled_from([0.0, 1.0, 299.0, 600.0, 600.5, 1201.0, 7200.0, 7201.0, -50.0, -9000.0])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, "5m", "1h"]), gaps), min_size=1, max_size=25)
)
def test_c4_c5_a_repack_happens_only_after_a_true_gap_or_the_latch_of_that_very_chat(
    steps: list[tuple[int, str | None, float]],
) -> None:
    """The chats grow; the reference keeps, for each, the time no use of it was later than."""
    book: Book = {}
    now = 1e6
    lengths, used, ttls, latched = [TURNS] * 3, [None] * 3, [0.0] * 3, [False] * 3
    for number, ttl, gap in steps:
        now += gap
        lengths[number] += 1
        one = turn(chat(lengths[number], seed=number, ttl=ttl))
        repack, book = repack_decision(book, one, now)
        idle = 0.0 if used[number] is None else now - used[number]
        holding = max(ttls[number], one.ttl or 0.0)
        cold = ttl is not None and idle > max(2 * holding, 600.0)
        latched[number] |= cold
        assert repack == (latched[number] and ttl is not None)
        used[number] = now if used[number] is None else max(used[number], now)
        ttls[number] = (one.ttl or 0.0) if cold else holding


# C5


def test_c5_a_chat_stays_repacked_with_the_boundary_of_its_cold_turn() -> None:
    first = turn(chat(TURNS))
    _, book = played((0, first), (IDLE + 1, first))
    for more in range(1, 30):
        later = turn(chat(TURNS + more))
        repack, book = repack_decision(book, later, IDLE + 1 + more)
        assert repack
        assert [latch.boundary for latch in latches_of(book[later.key].latches, later)] == [32]


def test_c5_the_boundary_moves_at_the_next_cold_turn() -> None:
    early, late = turn(chat(TURNS)), turn(chat(2 * TURNS))
    _, book = played((0, early), (IDLE + 1, early), (2 * IDLE + 2, late))
    assert max(latch.boundary for latch in latches_of(book[late.key].latches, late)) == 64


def test_c5_without_a_marker_a_latched_chat_is_sent_as_it_is() -> None:
    one, bare = turn(chat(TURNS)), turn(chat(TURNS, ttl=None))
    assert played((0, one), (IDLE + 1, one), (IDLE + 2, bare), (IDLE + 3, one))[0] == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("turns", [TURNS - 3, TURNS + 5])
def test_c5_going_back_behind_the_shortened_messages_keeps_them_shortened(turns: int) -> None:
    cold = chat(TURNS)
    branch = [*cold[:33], {"role": "user", "content": "Go another way"}, *chat(turns, seed=7)[1:]]
    decided, _ = played((0, turn(cold)), (IDLE + 1, turn(cold)), (IDLE + 2, turn(branch, cached=34)))
    assert decided == [False, True, True]


def test_c5_several_chats_that_open_alike_keep_their_latches_side_by_side() -> None:
    stem = chat(1)[:1]
    branches = [turn([*stem, *chat(TURNS, seed=seed)[1:]]) for seed in range(1, 5)]
    book: Book = {}
    for number, one in enumerate(branches):
        _, book = repack_decision(book, one, number * (IDLE + 1))
    held = [repack_decision(book, one, 4 * IDLE)[0] for one in branches]
    assert held == [False, True, True, True]  # the first was the first sighting of their key


def test_c5_of_too_many_latches_the_one_used_least_lately_leaves() -> None:
    stem = chat(1)[:1]
    turns = [turn([*stem, *chat(TURNS, seed=seed)[1:]]) for seed in range(LATCHES + 2)]
    book: Book = {}
    for number, one in enumerate(turns):
        _, book = settle(book, one, True, float(number))
        _, book = settle(book, turns[0], False, number + 0.5)  # in use all the time
    latched = [bool(latches_of(book[one.key].latches, one)) for one in turns]
    assert latched == [True, False, False, *[True] * (LATCHES - 1)]


# C6


def test_c6_a_prefix_that_is_small_before_or_after_shortening_is_not_repacked() -> None:
    def decides(turns: int, system: str, minimum: int = 0) -> bool:
        one = turn_of(chat(turns), system)
        _, book = repack_decision({}, one, 0)
        return repack_decision(book, one, IDLE + 1, provider_minimum=minimum)[0]

    assert decides(TURNS, SYSTEM)
    assert not decides(1, "")
    assert decides(TURNS, SYSTEM, 2048)
    assert not decides(TURNS, SYSTEM, 20_000)
    long_alone = turn_of(chat(TURNS, lines=60), "")
    short = turn_of([{**m, "content": []} if m["role"] == "assistant" else m for m in long_alone.messages])
    _, book = repack_decision({}, short, 0)
    assert short.prefix_tokens(short.messages) > 5000
    assert not repack_decision(book, short, IDLE + 1, provider_minimum=5000)[0]


def test_c6_pictures_do_not_make_a_prefix_tall() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 1_000_000}
    messages = [{"role": "user", "content": [{"type": "image", "source": source, **MARK}]}]
    assert turn_of(messages).prefix_tokens(messages) < 10


# C7


def test_c7_the_conversation_with_the_oldest_touch_leaves() -> None:
    book: Book = {str(i): Conversation(float(i), 300.0) for i in range(1, CONVERSATIONS + 1)}
    _, book = repack_decision(book, turn(chat(2)), 0.5)
    assert (len(book), "1" in book) == (CONVERSATIONS, True)  # the new one has the oldest touch itself
    _, book = repack_decision(book, turn(chat(2)), 1e6)
    assert (len(book), "1" in book, turn(chat(2)).key in book) == (CONVERSATIONS, False, True)


# C8, the pure half


latches = st.builds(
    Latch,
    start=st.just(0),
    boundary=st.sampled_from([0, 16]),
    count=st.just(16),
    digest=st.sampled_from("abc"),
    used=st.floats(0, 9),
)
books = st.dictionaries(
    st.sampled_from("xyz"),
    st.builds(
        Conversation,
        touched=st.floats(0, 9),
        ttl=st.sampled_from([300.0, 3600.0]),
        latches=st.lists(latches, max_size=3, unique_by=lambda one: (one.boundary, one.digest)).map(tuple),
    ),
)


def names(book: Book) -> set[tuple[str, Latch]]:
    return {(key, replace(latch, used=0.0)) for key, record in book.items() for latch in record.latches}


@given(books, books)
def test_c8_merging_keeps_the_later_touch_the_longer_ttl_and_every_latch(one: Book, other: Book) -> None:
    both = merged(one, other)
    assert both.keys() == one.keys() | other.keys()
    for key, record in both.items():
        sources = [book[key] for book in (one, other) if key in book]
        assert record.touched == max(source.touched for source in sources)
        assert record.ttl == max(source.ttl for source in sources)
    assert names(both) == names(one) | names(other)


@given(books, books)
def test_c8_merging_is_the_same_both_ways_and_twice(one: Book, other: Book) -> None:
    both = merged(one, other)
    back = merged(other, one)
    assert {k: (c.touched, c.ttl) for k, c in both.items()} == {
        k: (c.touched, c.ttl) for k, c in back.items()
    }
    assert names(both) == names(back) == names(merged(both, other))


# C10, the part for --prune


def test_c10_prune_latches_only_what_stands_behind_the_cached_prefix() -> None:
    one = turn(chat(TURNS), cached=5)
    _, book = settle({}, one, False, 0.0)
    book = prune_decision(book, one, 0.0)
    assert [(latch.start, latch.boundary) for latch in book[one.key].latches] == [(5, 32)]
    whole = turn(chat(TURNS))
    _, book = settle({}, whole, False, 0.0)
    assert prune_decision(book, whole, 0.0) == book


def test_c10_what_prune_shortened_stays_shortened_when_it_becomes_cached_and_when_the_chat_goes_back() -> (
    None
):
    grown, book = chat(4 * TURNS), {}
    spans: set[int] = set()
    for length, cached in ((41, 0), (61, 30), (61, 60), (101, 90), (53, 50)):
        one = turn(grown[:length], cached=cached)
        _, book = settle(book, one, False, 0.0)
        book = prune_decision(book, one, 0.0)
        held = latches_of(book[one.key].latches, one)
        covered = {i for latch in held for i in range(latch.start, latch.boundary)}
        assert {i for i in spans if i < boundary_of(length)} <= covered
        spans |= covered
    assert spans == set(range(48))


def test_numbers_of_any_size_can_be_hashed() -> None:
    message = {
        "role": "user",
        "content": [{"type": "tool_use", "input": json.loads("[1e400, 99999999999999999999]")}],
    }
    assert turn_of([message]).key


# Known, not predicted


@given(messages=chats(openai_turn), idle=st.floats(-10.0, 5000.0), held=st.booleans(), seen=st.booleans())
def test_an_engine_knows_a_chat_to_be_cold_iff_it_lost_one_that_it_saw_and_that_rested(
    messages: list[dict], idle: float, held: bool, seen: bool
) -> None:
    one = turn(messages, SYSTEM * 10, cached=len(messages), ttl=IDLE)
    book = settle({}, one, False, 1000.0)[1] if seen else {}
    assert one.ttl is not None  # IDLE, or more where a marker asks for that
    assert is_known_cold(book, one, held, 1000.0 + idle) == (seen and not held and idle > one.ttl)


def test_an_engine_leaves_a_small_chat_alone_and_one_that_nobody_opened() -> None:
    small = turn([{"role": "user", "content": "hello"}], "", cached=1, ttl=IDLE)
    assert not is_known_cold(settle({}, small, False, 0.0)[1], small, False, 10 * IDLE)
    nobody = turn([{"role": "system", "content": SYSTEM * 10}], cached=1, ttl=IDLE)
    assert not is_known_cold({}, nobody, False, 10 * IDLE)


def test_what_was_left_out_is_counted_in_messages_and_characters() -> None:
    messages = chat(TURNS)
    after = prune(messages, 32).messages
    changed = [(a, b) for a, b in zip(messages, after, strict=True) if a != b]
    texts = [(a["content"][0]["content"], b["content"][0]["content"]) for a, b in changed]
    assert left_out(messages, after) == (len(changed), sum(len(a) - len(b) for a, b in texts))
    assert left_out(messages, messages) == (0, 0)
