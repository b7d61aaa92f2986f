"""The device loop alone, on a scripted device: the order of its work, what it tells, and how it breaks."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch

from regrow.errors import DeviceFailed
from regrow.gpu.device_loop import (
    Broken,
    Call,
    ChunkRead,
    DeviceEvent,
    DeviceLoop,
    Halt,
    Job,
    JobEnded,
    Reset,
    TokenDrawn,
)
from regrow.gpu.types import Runner
from regrow.policy.keys import as_keys
from regrow.policy.request import SamplingParams, StopRules
from tests.world.fake_runner import Costs, FakeRunner, Operation

CHUNK = 64
COSTS = Costs()


@dataclass
class Bench:
    """A loop with a clock that only work moves; `told` is what it said and when."""

    share: float = 0.5
    slots: int = 3
    hybrid: bool = True
    costs: Costs = COSTS
    max_stall_s: float = math.inf
    now: float = 0.0
    told: list[tuple[float, DeviceEvent]] = field(default_factory=list)
    work: list[tuple[float, tuple[object, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(
            slots=self.slots,
            hybrid=self.hybrid,
            costs=self.costs,
            sleep=self.sleep,
            note=lambda what: self.work.append((self.now, what)),
        )
        self.loop = DeviceLoop(
            self.runner,
            decode_share=self.share,
            now=lambda: self.now,
            deliver=self.deliver,
            max_stall_s=self.max_stall_s,
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def deliver(self, events: Sequence[DeviceEvent]) -> None:
        assert events
        self.told += [(self.now, event) for event in events]

    def run(self, steps: int = 10_000) -> None:
        """Step until there is nothing to do, or so many times."""
        for _ in range(steps):
            if not self.loop.step():
                return
        assert steps < 10_000

    def start(self, slot: int, tokens: int, answer: int = 5, epoch: int = 1, **rules: object) -> Job:
        """Give `slot` a prompt of so many tokens."""
        ids = as_keys([(slot * 31 + i * 7) % 256 for i in range(tokens)])
        edges = [*range(0, max(tokens - 1, 1), CHUNK), max(tokens - 1, 1)]
        job = Job(
            slot=slot,
            epoch=epoch,
            generation=0,
            ids=ids,
            start=0,
            chunks=tuple(pairwise(edges)),
            snapshot_at=frozenset(),
            sampling=SamplingParams(),
            stops=StopRules(answer),
        )
        job = replace(job, **cast(Any, rules))
        self.loop.post(job)
        return job

    def events(self, slot: int) -> list[ChunkRead | TokenDrawn | JobEnded]:
        return [e for _, e in self.told if not isinstance(e, Broken) and e.slot == slot]

    def drawn(self, slot: int) -> list[int]:
        return [e.token for e in self.events(slot) if isinstance(e, TokenDrawn)]

    def ended(self, slot: int) -> JobEnded:
        (end,) = [e for e in self.events(slot) if isinstance(e, JobEnded)]
        return end

    def truth(self, job: Job, tokens: int) -> list[int]:
        return self.runner.expected_answer(job.ids, tokens, job.sampling)

    def times(self, slot: int, kind: type[ChunkRead | TokenDrawn | JobEnded]) -> list[float]:
        return [at for at, e in self.told if isinstance(e, kind) and e.slot == slot]

    def call(self, function: Callable[[Runner], object], generation: int = 0) -> list[object]:
        """Post a call; the list gets its answer."""
        answers: list[object] = []
        self.loop.post(Call(generation, function, answers.append))
        return answers


def test_a_job_is_told_chunk_by_chunk_then_token_by_token_then_its_end() -> None:
    bench = Bench()
    job = bench.start(0, 150, answer=4)
    bench.run()
    assert [type(e).__name__ for e in bench.events(0)] == [
        *["ChunkRead"] * 3,
        *["TokenDrawn"] * 4,
        "JobEnded",
    ]
    reads = [e for e in bench.events(0) if isinstance(e, ChunkRead)]
    assert [(e.position, e.seconds) for e in reads] == [
        (64, COSTS.of_chunk(0, 64)),
        (128, COSTS.of_chunk(64, 64)),
        (149, COSTS.of_chunk(128, 21)),
    ]
    assert bench.drawn(0) == bench.truth(job, 4)
    assert (bench.ended(0).reason, bench.ended(0).length) == ("length", 153)
    counters = bench.loop.counters
    assert (counters.chunks, counters.read_tokens, counters.steps, counters.drawn) == (3, 149, 4, 4)
    assert counters.read_s + counters.step_s == bench.now


@pytest.mark.parametrize("tokens", [1, 2, 3, CHUNK, CHUNK + 1])
def test_a_prompt_of_any_length_is_answered_from_its_last_token(tokens: int) -> None:
    bench = Bench()
    job = bench.start(1, tokens)
    bench.run()
    assert bench.drawn(1) == bench.truth(job, 5)
    assert bench.ended(1).length == tokens + 4


def test_a_job_with_nothing_left_to_read_decodes_at_once() -> None:
    bench = Bench()
    first = bench.start(0, 65, answer=1, snapshot_at=frozenset({64}))
    bench.run()
    (state,) = [e.snapshot for e in bench.events(0) if isinstance(e, ChunkRead)]
    bench.call(lambda runner: runner.mount(0, 64, state))
    bench.start(0, 65, answer=5, epoch=2, start=64, chunks=())
    bench.run()
    assert [e.token for e in bench.events(0) if isinstance(e, TokenDrawn) and e.epoch == 2] == bench.truth(
        first, 5
    )


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
def test_a_running_row_waits_for_one_chunk_at_most_and_gets_its_share(share: float) -> None:
    bench = Bench(share=share)
    bench.start(0, 2, answer=400)
    bench.run(20)
    bench.start(1, 20 * CHUNK)
    bench.run()
    tokens, chunks = bench.times(0, TokenDrawn), bench.times(1, ChunkRead)
    chunk = COSTS.of_chunk(0, CHUNK)
    assert max(b - a for a, b in pairwise(tokens)) <= chunk + COSTS.step
    for begin, end in pairwise(chunks[1:-1]):
        steps = sum(begin < at <= end for at in tokens)
        assert steps >= 1
        assert (steps - 1) * COSTS.step < max(chunk * share / (1 - share), COSTS.step)
        assert steps * COSTS.step >= chunk * share / (1 - share)


def test_while_nobody_decodes_chunks_follow_each_other() -> None:
    bench = Bench()
    bench.start(0, 10 * CHUNK)
    bench.run()
    assert all(b - a <= COSTS.of_chunk(0, CHUNK) for a, b in pairwise(bench.times(0, ChunkRead)))


SLOW = Costs(read=0.0, token=1 / CHUNK)  # a chunk takes a second, and each of its layers a quarter


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_row_is_stepped_between_the_layers_of_a_chunk_that_takes_longer_than_it_may_wait(
    share: float,
) -> None:
    bench = Bench(share=share, costs=SLOW, max_stall_s=0.6)
    running, reading = bench.start(0, 2, answer=200), bench.start(1, 4 * CHUNK + 1, answer=2)
    bench.run()
    times = bench.times(0, TokenDrawn)
    begin, end = bench.times(1, ChunkRead)[0] - 1.0, bench.times(1, ChunkRead)[-1]
    gaps = [b - a for a, b in pairwise(times) if begin < b <= end]
    assert max(gaps) <= 0.5 + SLOW.step
    assert sum(gap > SLOW.step for gap in gaps) >= 4
    counters = bench.loop.counters
    assert (counters.long_chunks, counters.stalls) == (4, 0)
    assert counters.pauses >= 4
    assert counters.longest_wait_s == 0.5
    if share:  # as long as what was read before it, as between two chunks
        assert sum(begin < at <= end for at in times) * SLOW.step >= 0.5 * (end - begin) - 1.0
    assert bench.drawn(0) == bench.truth(running, 200)
    assert bench.drawn(1) == bench.truth(reading, 2)
    assert [e.seconds for e in bench.events(1) if isinstance(e, ChunkRead)] == [1.0] * 4


def test_a_chunk_that_lets_many_steps_in_between_does_not_pass_for_one_that_hangs() -> None:
    bench = Bench(share=0.9, costs=SLOW, max_stall_s=0.6)
    busy: list[float | None] = []
    bench.runner._note = lambda what: busy.append(bench.loop.busy_s)
    bench.start(0, 2, answer=2000)
    bench.start(1, 4 * CHUNK + 1, answer=1)
    bench.run()
    assert bench.loop.counters.pauses >= 4
    assert max(filter(None, busy)) <= 0.5


def test_a_row_that_ends_between_the_layers_of_a_chunk_is_told_at_once() -> None:
    bench = Bench(costs=SLOW, max_stall_s=0.6)
    bench.start(0, 2, answer=3)
    reading = bench.start(1, 2 * CHUNK + 1, answer=2)
    bench.run()
    (ended,) = bench.times(0, JobEnded)
    assert ended < bench.times(1, ChunkRead)[-1]
    assert ended not in bench.times(1, ChunkRead)
    assert bench.drawn(1) == bench.truth(reading, 2)


def test_a_chunk_is_not_parted_while_nobody_decodes() -> None:
    bench = Bench(costs=SLOW, max_stall_s=0.1)
    bench.start(0, 3 * CHUNK, answer=1)
    bench.run()
    counters = bench.loop.counters
    assert (counters.pauses, counters.long_chunks, counters.stalls) == (0, 3, 0)


def test_a_layer_that_alone_takes_longer_than_a_row_may_wait_is_counted_as_a_stall() -> None:
    bench = Bench(share=0.0, costs=SLOW, max_stall_s=0.2)
    bench.start(0, 2, answer=200)
    bench.start(1, 2 * CHUNK + 1, answer=1)
    bench.run()
    counters = bench.loop.counters
    assert counters.stalls == 8
    assert counters.longest_wait_s == 0.25


def test_an_error_between_the_layers_of_a_chunk_breaks_the_device() -> None:
    bench = Bench(costs=SLOW, max_stall_s=0.6)
    bench.start(0, 2, answer=200)
    bench.start(1, 4 * CHUNK)
    bench.runner.faults["step", 4] = RuntimeError("no more")
    bench.run()
    assert any(isinstance(e, Broken) for _, e in bench.told)
    assert [bench.ended(slot).reason for slot in (0, 1)] == ["failed", "failed"]


def test_reads_are_done_one_after_the_other_and_a_long_one_lets_a_short_one_pass() -> None:
    bench = Bench()
    bench.start(0, 12 * CHUNK, answer=1)
    bench.run(3)
    bench.start(1, 11 * CHUNK, answer=1)
    bench.start(2, 2 * CHUNK, answer=1)
    bench.run()
    done = sorted(range(3), key=lambda slot: bench.times(slot, ChunkRead)[-1])
    assert done == [2, 0, 1]
    assert bench.times(2, ChunkRead)[0] < bench.times(0, ChunkRead)[4]


def test_a_long_read_lets_others_pass_no_more_than_twice() -> None:
    bench = Bench()
    bench.start(0, 12 * CHUNK, answer=1)
    bench.run(2)
    for epoch in range(1, 6):
        bench.call(lambda runner: runner.empty(1))
        bench.start(1, 2 * CHUNK, answer=1, epoch=epoch)
        while len(bench.times(1, JobEnded)) < epoch:
            assert bench.loop.step()
    assert sum(at < bench.times(0, ChunkRead)[-1] for at in bench.times(1, JobEnded)) == 2


def test_rows_that_decode_together_share_their_steps() -> None:
    bench = Bench()
    jobs = [bench.start(slot, 2, answer=10) for slot in (2, 0, 1)]
    bench.run()
    assert [bench.drawn(job.slot) for job in jobs] == [bench.truth(job, 10) for job in jobs]
    steps = [what for _, what in bench.work if what[0] == "step"]
    assert ("step", 0, 1, 2) in steps
    assert bench.loop.counters.steps == len(steps) < 30


@pytest.mark.parametrize("epoch", [1, None])
def test_a_halt_ends_a_job_before_its_next_chunk(epoch: int | None) -> None:
    bench = Bench()
    bench.start(0, 10 * CHUNK)
    bench.run(3)
    bench.loop.post(Halt(0, epoch))
    bench.run()
    end = bench.ended(0)
    assert (end.reason, end.length, bench.loop.counters.chunks) == ("halted", 3 * CHUNK, 3)
    assert end.snapshot is not None
    assert end.snapshot.position == 3 * CHUNK


def test_a_halt_ends_a_job_before_its_next_step() -> None:
    bench = Bench()
    job = bench.start(0, 10, answer=100)
    bench.run(8)
    bench.loop.post(Halt(0, 1))
    bench.run()
    end = bench.ended(0)
    assert bench.drawn(0) == bench.truth(job, 7)
    assert (end.reason, end.length, end.snapshot) == ("halted", 16, None)
    assert not any(slot.joined for slot in bench.runner._slots)


def test_a_halt_for_another_job_or_for_none_changes_nothing() -> None:
    bench = Bench()
    bench.loop.post(Halt(0, None))
    job = bench.start(0, 10, epoch=7)
    bench.run(3)
    bench.loop.post(Halt(0, 6))
    bench.loop.post(Halt(1, None))
    bench.run()
    assert bench.drawn(0) == bench.truth(job, 5)


def test_the_state_is_copied_where_it_is_wanted_and_only_there() -> None:
    bench = Bench()
    bench.start(0, 4 * CHUNK, snapshot_at=frozenset({CHUNK, 3 * CHUNK}))
    bench.run()
    reads = [e for e in bench.events(0) if isinstance(e, ChunkRead)]
    assert [e.snapshot.position if e.snapshot else None for e in reads] == [CHUNK, None, 3 * CHUNK, None]


def test_end_tokens_limits_and_repeats_are_seen_without_a_round_trip() -> None:
    bench = Bench()
    job = bench.start(0, 10, stops=StopRules(100, frozenset({2})))
    bench.runner.answer_length(job.ids, 3)
    bench.start(1, 10, answer=4)
    bench.start(2, 10, answer=1000, sampling=SamplingParams(logit_bias={99: 1e6}))
    bench.run()
    assert [bench.ended(slot).reason for slot in range(3)] == ["stop", "length", "repeat"]
    assert [len(bench.drawn(slot)) for slot in range(3)] == [3, 4, 256]
    assert bench.drawn(0) == bench.truth(job, 3)


def test_end_tokens_are_banned_until_the_least_number_of_tokens_is_drawn() -> None:
    bench = Bench()
    job = bench.start(0, 10, stops=StopRules(9, frozenset({2}), min_tokens=6), banned=frozenset({50}))
    bench.runner.answer_length(job.ids, 3)
    bench.run()
    assert len(bench.drawn(0)) == 9
    assert not {2, 50} & set(bench.drawn(0))


def test_a_mask_forbids_tokens_and_is_advanced_by_those_that_are_drawn() -> None:
    class Odd:
        """Odd and even tokens take turns."""

        def __init__(self) -> None:
            self.accepted: list[int] = []

        def apply(self, logits: torch.Tensor) -> None:
            logits[len(self.accepted) % 2 :: 2] = -torch.inf

        def accept(self, token: int) -> None:
            self.accepted.append(token)

    bench, mask = Bench(), Odd()
    bench.start(0, 10, answer=8, mask=mask)
    bench.run()
    assert mask.accepted == bench.drawn(0)
    assert [token % 2 for token in bench.drawn(0)] == [1, 0] * 4


@pytest.mark.parametrize("tokens", [1, 10])
def test_logits_that_are_not_finite_end_their_job_alone(tokens: int) -> None:
    bench = Bench()
    bench.runner.nan_at.add((0, tokens - 1))
    bench.start(0, tokens)
    healthy = bench.start(1, 10)
    bench.run()
    assert (bench.ended(0).reason, bench.drawn(0)) == ("non_finite", [])
    assert bench.drawn(1) == bench.truth(healthy, 5)


def test_a_call_runs_between_two_steps_and_its_result_comes_back() -> None:
    bench = Bench()
    bench.start(0, 10)
    bench.run(3)
    results = bench.call(lambda runner: runner.length(0))
    bench.run()
    assert results == [11]
    assert bench.ended(0).reason == "length"


def test_a_call_that_is_refused_breaks_nothing() -> None:
    bench = Bench()
    job = bench.start(1, 10)
    results = bench.call(lambda runner: runner.mount(0, 5, None))
    bench.run()
    assert isinstance(results[0], DeviceFailed)
    assert "holds 0 cells" in str(results[0])
    assert bench.drawn(1) == bench.truth(job, 5)


def fails(what: str) -> object:
    raise OSError(what)


def test_a_call_that_fails_breaks_the_device_and_is_answered_after_that_was_told() -> None:
    bench = Bench()
    bench.start(1, 10, answer=100)
    bench.run(3)
    told: list[int] = []
    bench.loop.post(Call(0, lambda runner: fails("lost"), lambda _: told.append(len(bench.told))))
    bench.run()
    assert bench.ended(1).reason == "failed"
    (broken,) = [e for _, e in bench.told if isinstance(e, Broken)]
    assert (str(broken.error), broken.generation) == ("lost", 0)
    assert told == [len(bench.told)]


@pytest.mark.parametrize("operation", ["read", "step", "snapshot", "join", "leave"])
def test_an_error_of_the_device_ends_every_job_and_work_is_refused_until_a_reset(
    operation: Operation,
) -> None:
    bench = Bench()
    bench.runner.faults[operation, 1] = OSError("the bus fell off")
    bench.start(0, 10 * CHUNK, snapshot_at=frozenset({CHUNK}))
    bench.start(1, 10, answer=40)
    bench.run()
    assert [bench.ended(slot).reason for slot in (0, 1)] == ["failed", "failed"]
    assert sum(isinstance(e, Broken) for _, e in bench.told) == 1
    bench.told.clear()
    bench.start(2, 10)
    refused = bench.call(lambda runner: runner.length(0))
    bench.run()
    assert (bench.ended(2).reason, bench.ended(2).length) == ("failed", 0)
    assert isinstance(refused[0], DeviceFailed)
    bench.told.clear()
    bench.loop.post(Reset(1))
    job = bench.start(2, 10, generation=1)
    bench.run()
    assert bench.drawn(2) == bench.truth(job, 5)


def test_jobs_and_calls_of_an_earlier_generation_are_refused() -> None:
    bench = Bench()
    bench.loop.post(Reset(3))
    bench.start(0, 10, generation=2)
    refused = bench.call(lambda runner: runner.length(0), generation=2)
    bench.run()
    assert (bench.ended(0).reason, bench.ended(0).length) == ("failed", 0)
    assert isinstance(refused[0], DeviceFailed)
    assert bench.loop.counters.chunks == 0


def test_a_reset_ends_what_runs_and_starts_with_fresh_arenas() -> None:
    bench = Bench()
    bench.start(0, 10, answer=100)
    bench.start(1, 10 * CHUNK)
    bench.run(6)
    bench.loop.post(Reset(1))
    bench.run()
    assert [bench.ended(slot).reason for slot in (0, 1)] == ["failed", "failed"]
    assert [bench.runner.length(slot) for slot in range(3)] == [0, 0, 0]
    assert not any(isinstance(e, Broken) for _, e in bench.told)


def test_a_reset_that_fails_is_told_as_the_new_generation() -> None:
    bench = Bench()
    bench.runner.faults["reset", 1] = OSError("no memory")
    bench.loop.post(Reset(1))
    bench.run()
    ((_, broken),) = bench.told
    assert isinstance(broken, Broken)
    assert broken.generation == 1


def test_a_second_job_for_a_busy_slot_is_an_error_of_the_caller_and_breaks_the_device() -> None:
    bench = Bench()
    bench.start(0, 10 * CHUNK)
    bench.start(0, 10, epoch=2)
    bench.run()
    assert any(isinstance(e, Broken) and "has a job already" in str(e.error) for _, e in bench.told)
    assert [e.epoch for e in bench.events(0) if isinstance(e, JobEnded)] == [1]


def test_a_waiting_thread_wakes_up_for_a_command_and_for_the_end() -> None:
    bench = Bench()
    woken = threading.Event()

    def drive() -> None:
        while not bench.loop.closed:
            if not bench.loop.step():
                bench.loop.wait()
            woken.set()

    thread = threading.Thread(target=drive)
    thread.start()
    bench.start(0, 10)
    while not any(isinstance(e, JobEnded) for _, e in list(bench.told)):
        woken.wait()
        woken.clear()
    assert not bench.loop.closed
    bench.loop.close()
    thread.join()
    assert bench.loop.closed
