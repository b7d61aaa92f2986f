from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.schedule import (
    DEFERRED_S,
    SHORT,
    PendingRead,
    ScheduleState,
    Work,
    after_chunk,
    after_step,
    must_pause,
    next_work,
)

DECODE = Work(read=None)


def test_with_no_reads_the_rows_always_decode_and_with_no_rows_reads_always_read() -> None:
    owing = after_chunk(ScheduleState(), 0, 256, 1.0, 0.5)
    assert next_work(owing, [], decoding=2) == DECODE
    assert next_work(ScheduleState(), [], decoding=2) == DECODE
    assert next_work(owing, [PendingRead(0, 0, 100)], decoding=0) == Work(read=0)
    assert next_work(owing, [], decoding=0) is None


def test_after_a_chunk_at_least_one_step_runs_even_with_a_share_of_0() -> None:
    state = after_chunk(ScheduleState(), 0, 256, 1.0, 0.0)
    reads = [PendingRead(0, 0, 100)]
    assert next_work(state, reads, decoding=1) == DECODE
    assert next_work(after_step(state, 0.01), reads, decoding=1) == Work(read=0)


def test_a_step_that_takes_longer_than_what_is_owed_leaves_no_credit() -> None:
    state = after_step(after_chunk(ScheduleState(), 0, 256, 1.0, 0.5), 9.0)
    assert (state.owed_steps, state.owed_s) == (0, 0.0)


@given(
    st.floats(0.01, 2),
    st.floats(0.05, 5),
    st.sampled_from([0.0, 0.2, 0.5, 0.75, 0.9]),
)
def test_rows_get_their_share_of_the_time_between_two_chunks(
    chunk_s: float, step_s: float, share: float
) -> None:
    state = after_chunk(ScheduleState(), 0, 256, chunk_s, share)
    steps = 0
    while next_work(state, [PendingRead(0, 0, 100)], decoding=1) == DECODE:
        state = after_step(state, step_s)
        steps += 1
    owed = share / (1 - share) * chunk_s
    assert steps >= 1
    assert steps * step_s >= owed - 1e-9
    assert steps == 1 or (steps - 1) * step_s <= owed + 1e-9


def test_what_is_left_of_a_short_read_comes_after_one_step_and_the_rows_are_paid_after_it() -> None:
    short = [PendingRead(0, 0, SHORT)]
    state = after_chunk(ScheduleState(), 0, 256, 0.04, 0.5)
    assert next_work(state, short, decoding=1) == DECODE
    state = after_step(state, 0.01)
    assert next_work(state, [PendingRead(0, 0, SHORT + 1)], decoding=1) == DECODE
    assert next_work(state, short, decoding=1) == Work(read=0)
    state = after_chunk(state, 0, SHORT, 0.04, 0.5)
    assert state.owed_s == pytest.approx(0.03 + 0.04)


def test_the_end_of_a_short_read_comes_at_once_where_little_was_read_since_the_last_step() -> None:
    state = after_chunk(ScheduleState(), 0, 40, 0.03, 0.5)
    assert next_work(state, [PendingRead(0, 0, SHORT - 40)], decoding=1) == Work(read=0)
    assert next_work(state, [PendingRead(0, 0, SHORT - 39)], decoding=1) == DECODE
    assert after_step(state, 0.01).since_step == 0


def test_short_reads_one_after_another_leave_the_rows_their_share() -> None:
    state, read, decoded = ScheduleState(), 0.0, 0.0
    for i in range(1000):
        if next_work(state, [PendingRead(0, i, SHORT)], decoding=1) == DECODE:
            state, decoded = after_step(state, 0.01), decoded + 0.01
        else:
            state, read = after_chunk(state, 0, 256, 0.04, 0.5), read + 0.04
        assert decoded >= read - DEFERRED_S - 0.04 - 1e-9


def test_rows_get_a_step_before_a_layer_that_would_make_them_wait_too_long() -> None:
    assert not must_pause(waited_s=0.1, next_s=0.1, most_s=0.2)
    assert must_pause(waited_s=0.1, next_s=0.11, most_s=0.2)
    assert must_pause(waited_s=0.3, next_s=0.0, most_s=0.2)


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_a_share_that_leaves_nothing_to_reads_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="decode share"):
        after_chunk(ScheduleState(), 0, 256, 1.0, share)


def test_reads_go_in_the_order_of_the_queue() -> None:
    reads = [PendingRead(0, 7, 100), PendingRead(1, 3, 100), PendingRead(2, 5, 100)]
    assert next_work(ScheduleState(), reads, decoding=0) == Work(read=1)


def test_a_read_that_has_begun_goes_on_before_an_earlier_one_that_has_not() -> None:
    reads = [PendingRead(0, 0, 100), PendingRead(1, 1, 100)]
    assert next_work(ScheduleState(reading=1), reads, decoding=0) == Work(read=1)


def test_a_long_read_yields_to_one_under_half_its_remaining_length() -> None:
    long = PendingRead(0, 0, remaining=1000)
    state = ScheduleState(reading=0)
    assert next_work(state, [long, PendingRead(1, 1, 500)], 0) == Work(read=0)
    assert next_work(state, [long, PendingRead(1, 1, 499)], 0) == Work(read=1, yielding=(0,))


def test_of_several_shorter_reads_the_earliest_passes() -> None:
    reads = [PendingRead(0, 0, 1000), PendingRead(1, 2, 10), PendingRead(2, 1, 300)]
    assert next_work(ScheduleState(reading=0), reads, 0) == Work(read=2, yielding=(0,))


def test_a_read_yields_at_most_twice() -> None:
    reads = [PendingRead(0, 0, 1000, yielded=2), PendingRead(1, 1, 10)]
    assert next_work(ScheduleState(reading=0), reads, 0) == Work(read=0)


def test_no_read_yields_while_rows_are_owed_steps() -> None:
    state = after_chunk(ScheduleState(), 0, 256, 1.0, 0.5)
    assert next_work(state, [PendingRead(0, 0, 1000), PendingRead(1, 1, 10)], decoding=1) == DECODE


@dataclass
class Reading:
    """A scripted device: every chunk reads `chunk` tokens in one second, every step takes `step_s`."""

    remaining: dict[int, int]
    decoding: int = 0
    step_s: float = 0.3
    chunk: int = 100

    def run(self) -> Iterator[Work]:
        state = ScheduleState()
        self.yielded = dict.fromkeys(self.remaining, 0)
        while self.remaining:
            reads = [PendingRead(s, s, n, self.yielded[s]) for s, n in self.remaining.items()]
            work = next_work(state, reads, self.decoding)
            assert work is not None
            yield work
            if work.read is None:
                state = after_step(state, self.step_s)
                continue
            for slot in work.yielding:
                self.yielded[slot] += 1
            state = after_chunk(state, work.read, self.chunk, 1.0, 0.5)
            self.remaining[work.read] -= self.chunk
            if self.remaining[work.read] <= 0:
                del self.remaining[work.read]


def test_case_38_a_short_read_does_not_wait_for_two_long_ones() -> None:
    order = [work.read for work in Reading({0: 1000, 1: 1000, 2: 100}).run()]
    assert order == [2, *[0] * 10, *[1] * 10]


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    st.integers(0, 3),
    st.sampled_from([0.01, 0.3, 2.0]),
)
def test_every_read_ends_yields_at_most_twice_and_never_stops_the_rows(
    lengths: list[int], decoding: int, step_s: float
) -> None:
    device = Reading(dict(enumerate(lengths)), decoding, step_s)
    works = list(device.run())
    assert sum(work.read is not None for work in works) == sum(-(-n // 100) for n in lengths)
    assert all(count <= 2 for count in device.yielded.values())
    if decoding:
        chunks = [i for i, work in enumerate(works) if work.read is not None]
        assert all(b - a > 1 for a, b in pairwise(chunks))
