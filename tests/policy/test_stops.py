from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from regrow.policy.stops import REPEATS, RepeatGuard, StopMatcher

letters = st.text(alphabet="abé", max_size=24)
stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4)


def by_definition(text: str, strings: list[str]) -> tuple[str, bool]:
    """The text up to the longest stop string that ends where first one does."""
    for end in range(len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def run(pieces: list[str], strings: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(strings)
    fed = [matcher.feed(piece) for piece in pieces]
    return "".join(text for text, _ in fed) + matcher.flush(), any(stopped for _, stopped in fed)


@given(letters, stops, st.lists(st.integers(0, 24), max_size=8))
@example("abc", ["abc", "b"], [1, 2])
@example("aab", ["ab"], [1, 2])
def test_every_split_of_a_text_gives_the_same_answer(
    text: str, strings: list[str], places: list[int]
) -> None:
    edges = [0, *sorted(min(p, len(text)) for p in places), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(pieces, strings) == run(list(text), strings) == by_definition(text, strings)


@given(letters, stops)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, strings: list[str]) -> None:
    matcher = StopMatcher(strings)
    shown = ""
    for end, character in enumerate(text, 1):
        piece, stopped = matcher.feed(character)
        shown += piece
        if stopped:
            return
        held = text[len(shown) : end]
        assert held == "" or any(s.startswith(held) for s in strings)


def test_a_stop_string_is_never_shown_not_even_its_first_half() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.feed("Hello.\nUs") == ("Hello.", False)
    assert matcher.feed("er") == ("", False)
    assert matcher.feed(": next") == ("", True)
    assert matcher.flush() == ""


def test_text_held_back_in_vain_is_shown() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.feed("a\nUs") == ("a", False)
    assert matcher.feed("e it") == ("\nUse it", False)
    assert matcher.feed("\n") == ("", False)
    assert matcher.flush() == "\n"


def test_pieces_after_the_stop_are_dropped() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == ("a", True)
    assert matcher.feed("c") == ("", True)
    assert matcher.flush() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopMatcher([]).feed("abc") == ("abc", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_case_34_an_answer_that_repeats_one_token_256_times_ends() -> None:
    guard = RepeatGuard()
    assert [guard.repeats(7) for _ in range(REPEATS)].index(True) == 255


def test_a_token_between_starts_the_count_again() -> None:
    guard = RepeatGuard(limit=3)
    assert [guard.repeats(t) for t in (5, 5, 6, 5, 5, 5)] == [False] * 5 + [True]


def test_a_pattern_of_two_tokens_is_no_repeat() -> None:
    guard = RepeatGuard(limit=3)
    assert not any(guard.repeats(t) for t in [1, 2] * 50)
