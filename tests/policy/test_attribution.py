"""C11: what became of a turn's cached prefix, told from hashes and idle time."""

from regrow.policy.attribution import Attribution, Sent, attribute
from regrow.policy.cold_prefix import Turn, turn_of
from tests.policy.prompts import chat

TOOLS = [{"name": "run"}]


def turn(turns: int, *, ttl: str | None = "5m", system: str = "s", tools: object = TOOLS) -> Turn:
    return turn_of(chat(turns, ttl=ttl), system, tools)


BEFORE = Sent.of(turn(3), 100.0)


def test_the_first_turn_is_a_cold_start() -> None:
    assert attribute(None, turn(3), 100.0) == Attribution("cold start")


def test_the_first_turn_with_a_marker_is_one_too() -> None:
    assert attribute(Sent.of(turn(2, ttl=None), 0.0), turn(3), 1.0) == Attribution("cold start")


def test_a_turn_without_a_marker_has_no_prefix() -> None:
    assert attribute(BEFORE, turn(4, ttl=None), 101.0) == Attribution("no prefix")


def test_an_extended_prefix_is_reused_until_its_ttl_is_over() -> None:
    assert attribute(BEFORE, turn(4), 400.0) == Attribution("warm reuse")
    assert attribute(BEFORE, turn(4), 400.1) == Attribution("ttl lapse")
    hour = Sent.of(turn(3, ttl="1h"), 100.0)
    assert attribute(hour, turn(4), 3700.0) == Attribution("warm reuse")


def test_going_back_reuses_the_prefix() -> None:
    assert attribute(BEFORE, turn(2), 101.0) == Attribution("warm reuse")


def test_a_changed_prefix_says_where_it_changed_first() -> None:
    assert attribute(BEFORE, turn(3, tools=[]), 101.0) == Attribution("prefix change", "tools")
    assert attribute(BEFORE, turn(3, system="t"), 9999.0) == Attribution("prefix change", "system")
    messages = chat(3)
    messages[2] = {"role": "user", "content": "another"}
    assert attribute(BEFORE, turn_of(messages, "s", TOOLS), 101.0) == Attribution(
        "prefix change", "messages[2]"
    )


def test_a_change_behind_the_cached_prefix_is_none() -> None:
    before = Sent.of(turn_of(chat(3), "s", TOOLS, cached=3), 100.0)
    messages = [*chat(3)[:3], {"role": "assistant", "content": "another"}]
    assert attribute(before, turn_of(messages, "s", TOOLS, cached=4), 101.0) == Attribution("warm reuse")
