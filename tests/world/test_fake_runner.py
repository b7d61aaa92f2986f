"""The fake device: tokens that depend on every key, exact costs, faults, and each misuse it detects."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch

from regrow.gpu.types import Chunk, Row, Runner, Snapshot
from regrow.policy.keys import Keys, as_keys
from regrow.policy.request import SamplingParams
from tests.world.fake_runner import Costs, FakeRunner, Hang, Misuse

GREEDY = SamplingParams()
PROMPT = as_keys(range(100, 120))


def read(runner: FakeRunner, keys: Keys, slot: int = 0, start: int = 0, stop: int | None = None) -> None:
    stop = len(keys) - 1 if stop is None else stop
    runner.read(Chunk(slot, start, keys[start:stop]))


def answer(
    runner: FakeRunner, keys: Keys, tokens: int, slot: int = 0, sampling: SamplingParams = GREEDY
) -> list[int]:
    """Decode a slot that holds all but the last key; leave it as it was found, but longer."""
    drawn: list[int] = []
    token = int(keys[-1])
    runner.join(slot)
    while len(drawn) < tokens:
        ((token,),) = runner.step(
            [Row(slot, token, runner.length(slot), sampling, counter=len(drawn))]
        ).tokens
        runner.commit(slot, 1)
        drawn.append(token)
    runner.leave(slot)
    return drawn


@pytest.fixture(params=[True, False], ids=["hybrid", "attention"])
def runner(request: pytest.FixtureRequest) -> FakeRunner:
    return FakeRunner(hybrid=request.param)


def test_it_is_a_runner() -> None:
    runner: Runner = FakeRunner(slots=3, context=64)
    assert (runner.slots, runner.context, runner.geometry.hybrid) == (3, 64, True)
    assert not FakeRunner(hybrid=False).geometry.hybrid


def test_the_answer_is_the_same_however_the_prompt_is_cut_and_in_every_slot(runner: FakeRunner) -> None:
    read(runner, PROMPT)
    expected = answer(runner, PROMPT, 8)
    for stop in range(1, len(PROMPT) - 1):
        runner.empty(1)
        read(runner, PROMPT, 1, 0, stop)
        read(runner, PROMPT, 1, stop)
        assert answer(runner, PROMPT, 8, 1) == expected


def test_every_key_changes_the_answer(runner: FakeRunner) -> None:
    read(runner, PROMPT)
    expected = answer(runner, PROMPT, 4)
    for i in range(len(PROMPT)):
        other = PROMPT.copy()
        other[i] += 1
        runner.empty(0)
        read(runner, other)
        assert answer(runner, other, 4) != expected


def test_a_resume_gives_the_answer_of_reading_straight_through(runner: FakeRunner) -> None:
    read(runner, PROMPT, stop=10)
    state = runner.snapshot(0).snapshot
    read(runner, PROMPT, start=10)
    expected = answer(runner, PROMPT, 8)
    digest = runner.digest(0)
    runner.mount(0, 10, state)
    read(runner, PROMPT, start=10)
    assert answer(runner, PROMPT, 8) == expected
    assert runner.digest(0) == digest
    assert digest.length == len(PROMPT) - 1 + 8


def test_a_digest_has_a_part_for_each_kind_and_changes_with_every_key() -> None:
    runner = FakeRunner()
    read(runner, PROMPT)
    read(runner, PROMPT, slot=1, stop=18)
    assert [part for part, _ in runner.digest(0).parts] == ["k.0", "v.0", "recurrent.1.0"]
    assert runner.digest(0).value != runner.digest(1).value


def test_a_snapshot_has_the_bytes_that_the_geometry_says() -> None:
    runner = FakeRunner()
    read(runner, PROMPT)
    state = runner.snapshot(0).snapshot
    assert state is not None
    assert state.position == 19
    assert state.nbytes == runner.geometry.bytes_per_checkpoint > 0


def test_a_prompt_of_one_token_is_sampled_from_its_chunk(runner: FakeRunner) -> None:
    one = PROMPT[:1]
    logits = runner.read(Chunk(0, 0, one, want_logits="last")).logits
    assert logits is not None
    first = runner.sample(Row(0, int(one[0]), 0, GREEDY), logits)
    assert logits.shape == (512,)
    assert first == int(logits.argmax())


def test_the_same_seed_draws_the_same_and_another_seed_another_answer(runner: FakeRunner) -> None:
    answers = []
    for seed in (1, 1, 2):
        runner.empty(0)
        read(runner, PROMPT)
        answers.append(answer(runner, PROMPT, 8, sampling=SamplingParams(temperature=1.0, seed=seed)))
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=3)])
def test_the_expected_answer_is_what_the_slots_give(runner: FakeRunner, sampling: SamplingParams) -> None:
    runner.answer_length(PROMPT, 5)
    read(runner, PROMPT)
    assert runner.expected_answer(PROMPT, 8, sampling) == answer(runner, PROMPT, 8, sampling=sampling)


def test_a_scripted_end_comes_after_so_many_tokens_at_any_temperature(runner: FakeRunner) -> None:
    runner.answer_length(PROMPT, 3)
    for sampling in (GREEDY, SamplingParams(temperature=2.0, seed=5)):
        runner.empty(0)
        read(runner, PROMPT)
        drawn = answer(runner, PROMPT, 5, sampling=sampling)
        assert [token == 2 for token in drawn] == [False, False, False, True, False]


def test_a_scripted_end_of_a_one_token_prompt_can_come_at_once(runner: FakeRunner) -> None:
    runner.answer_length(PROMPT[:1], 0)
    logits = runner.read(Chunk(0, 0, PROMPT[:1], want_logits="last")).logits
    assert logits is not None
    assert runner.sample(Row(0, 0, 0, GREEDY), logits) == 2


def test_banned_tokens_and_masks_and_biases_hold() -> None:
    class Only:
        def apply(self, logits: torch.Tensor) -> None:
            keep = logits[77].clone()
            logits.fill_(-torch.inf)
            logits[77] = keep

        def accept(self, token: int) -> None:
            raise NotImplementedError

    runner = FakeRunner()
    logits = runner.read(Chunk(0, 0, PROMPT, want_logits="last")).logits
    assert logits is not None
    best = int(logits.argmax())
    banned = runner.sample(Row(0, 0, 0, GREEDY, banned=frozenset({best})), logits)
    assert banned not in (best, None, 2)
    assert runner.sample(Row(0, 0, 0, SamplingParams(logit_bias={5: 500.0})), logits) == 5
    assert runner.sample(Row(0, 0, 0, GREEDY, mask=Only()), logits) == 77
    assert int(logits.argmax()) == best


def test_costs_are_exact_and_passed_in_order() -> None:
    slept: list[float] = []
    noted: list[tuple[object, ...]] = []
    costs = Costs(read=1.0, token=0.25, depth=0.5, step=3.0, snapshot=7.0, mount=9.0)
    runner = FakeRunner(costs=costs, sleep=slept.append, note=noted.append)
    read(runner, PROMPT, stop=4)
    state = runner.snapshot(0).snapshot
    read(runner, PROMPT, start=4, stop=6)
    answer(runner, PROMPT, 1)
    runner.mount(0, 4, state)
    assert slept == [1.0 + 4 * 0.25, 7.0, 1.0 + 2 * (0.25 + 4 * 0.5), 3.0, 9.0]
    assert noted == [
        ("read", 0, 0, 4),
        ("snapshot", 0, 4),
        ("read", 0, 4, 2),
        ("join", 0),
        ("step", 0),
        ("leave", 0),
        ("mount", 0, 4),
    ]


def test_a_fault_is_raised_by_the_nth_call_alone() -> None:
    runner = FakeRunner()
    runner.faults["read", 2] = OSError("gone")
    read(runner, PROMPT, stop=4)
    with pytest.raises(OSError, match="gone"):
        read(runner, PROMPT, start=4)
    read(runner, PROMPT, slot=1)
    assert runner.counts["read"] == 3


@pytest.mark.parametrize("operation", ["read", "snapshot", "join", "leave", "step", "mount"])
def test_a_failed_call_leaves_a_slot_that_only_a_reset_makes_whole(operation: str) -> None:
    runner = FakeRunner()
    runner.faults[operation, 1] = OSError("gone")  # type: ignore[index]
    with pytest.raises(OSError, match="gone"):
        read(runner, PROMPT, stop=4)
        runner.mount(0, 4, runner.snapshot(0).snapshot)
        read(runner, PROMPT, start=4)
        answer(runner, PROMPT, 1)
    with pytest.raises(Misuse, match="failed call"):
        runner.digest(0)
    runner.reset()
    read(runner, PROMPT)


def test_a_hang_costs_its_time() -> None:
    slept: list[float] = []
    runner = FakeRunner(sleep=slept.append, costs=Costs(step=1.0))
    runner.faults["step", 2] = Hang(60.0)
    read(runner, PROMPT)
    answer(runner, PROMPT, 3)
    assert slept[1:] == [1.0, 61.0, 1.0]


def test_numbers_are_not_finite_from_the_chosen_cell_on_and_once(runner: FakeRunner) -> None:
    runner.nan_at.add((0, len(PROMPT) + 1))
    read(runner, PROMPT)
    answer(runner, PROMPT, 2)
    runner.join(0)
    for counter in (2, 3):
        length = runner.length(0)
        assert runner.step([Row(0, 50, length, GREEDY, counter)]).tokens == ((),)
        runner.commit(0, 1)
    runner.leave(0)
    assert (runner.snapshot(0).snapshot is None) == runner.geometry.hybrid
    runner.empty(0)
    read(runner, PROMPT)
    assert len(answer(runner, PROMPT, 4)) == 4


def test_a_read_that_is_not_finite_gives_such_logits(runner: FakeRunner) -> None:
    runner.nan_at.add((0, 3))
    logits = runner.read(Chunk(0, 0, PROMPT, want_logits="last")).logits
    assert logits is not None
    assert runner.sample(Row(0, 0, 0, GREEDY), logits) is None


def test_a_mount_that_the_slot_or_the_state_does_not_reach_is_refused(runner: FakeRunner) -> None:
    read(runner, PROMPT, stop=10)
    state = runner.snapshot(0).snapshot
    with pytest.raises(ValueError, match="holds 10 cells, not 11"):
        runner.mount(0, 11, state)
    if runner.geometry.hybrid:
        with pytest.raises(ValueError, match="no state at 9"):
            runner.mount(0, 9, state)
        with pytest.raises(ValueError, match="no state at 9"):
            runner.mount(0, 9, None)
        runner.mount(0, 10, None)
        assert runner.length(0) == 10
    else:
        runner.mount(0, 9, None)
        assert runner.length(0) == 9


def prepared() -> tuple[FakeRunner, Snapshot]:
    """A runner whose slot 0 holds 10 keys and whose slot 1 is joined and holds 5."""
    runner = FakeRunner(context=24)
    read(runner, PROMPT, stop=10)
    read(runner, PROMPT, slot=1, stop=5)
    runner.join(1)
    state = runner.snapshot(0).snapshot
    assert state is not None
    return runner, state


Act = Callable[[FakeRunner, Snapshot], object]


def of_other_keys(runner: FakeRunner, state: Snapshot) -> None:
    runner.mount(0, 0, None)
    read(runner, as_keys(range(200, 210)), stop=10)
    runner.mount(0, 10, state)


def stale(runner: FakeRunner, state: Snapshot) -> None:
    runner.mount(0, 0, None)
    read(runner, PROMPT, stop=9)
    read(runner, PROMPT + 1, start=9, stop=12)
    runner.mount(0, 10, state)


def row(slot: int, length: int, counter: int = 0) -> Row:
    return Row(slot, 50, length, GREEDY, counter)


def leased(slot: int, below: int, act: Callable[[FakeRunner], object]) -> Act:
    def misuse(runner: FakeRunner, _: Snapshot) -> None:
        runner.lease(slot, below)
        act(runner)

    return misuse


def step_again_without_commit(runner: FakeRunner, _: Snapshot) -> None:
    runner.step([row(1, 5)])
    runner.step([row(1, 5)])


def leave_after_a_draft_that_was_not_kept(runner: FakeRunner, _: Snapshot) -> None:
    runner.step([row(1, 5)])
    runner.commit(1, 0)
    runner.step([row(1, 5)])


def leave_and_step(runner: FakeRunner, _: Snapshot) -> None:
    runner.leave(1)
    runner.step([])


def rewind_and_write(runner: FakeRunner) -> None:
    runner.mount(0, 0, None)
    read(runner, PROMPT, stop=1)


MISUSES: dict[str, tuple[str, Act]] = {
    "a state of other keys": ("not of the keys", of_other_keys),
    "a state of keys that were rewritten": ("not of the keys", stale),
    "a gap before a chunk": ("has 10 cells, not 11", lambda r, _: read(r, PROMPT, start=11)),
    "a chunk over cells that are held": ("has 10 cells, not 9", lambda r, _: read(r, PROMPT, start=9)),
    "an empty chunk": ("without a token", lambda r, _: read(r, PROMPT, start=10, stop=10)),
    "reading a joined slot": ("decode row", lambda r, _: read(r, PROMPT, slot=1, start=5)),
    "mounting a joined slot": ("decode row", lambda r, s: r.mount(1, 5, s)),
    "copying the state of a joined slot": ("decode row", lambda r, _: r.snapshot(1)),
    "joining twice": ("decode row", lambda r, _: r.join(1)),
    "leaving twice": ("rest row", lambda r, _: r.leave(0)),
    "stepping a slot at rest": ("step of the slots", lambda r, _: r.step([row(0, 10), row(1, 5)])),
    "leaving out a joined slot": ("step of the slots", lambda r, _: r.step([])),
    "a step of nothing": ("step of the slots", leave_and_step),
    "two rows of one slot": ("step of the slots", lambda r, _: r.step([row(1, 5), row(1, 5)])),
    "a row at another length": ("has 5 cells, not 6", lambda r, _: r.step([row(1, 6)])),
    "a counter beyond the cells": ("cannot have drawn", lambda r, _: r.step([row(1, 5, counter=6)])),
    "committing at rest": ("rest row", lambda r, _: r.commit(0, 0)),
    "committing what was not fed": ("1 of 0 tokens", lambda r, _: r.commit(1, 1)),
    "stepping before the commit": ("is committed", step_again_without_commit),
    "a state ahead of its cells": ("state is at 6", leave_after_a_draft_that_was_not_kept),
    "a snapshot of nothing": ("is empty", lambda r, _: r.snapshot(2)),
    "reading beyond the context": (
        "beyond its 24 cells",
        lambda r, _: r.read(Chunk(0, 10, np.zeros(15, dtype=np.int64))),
    ),
    "writing below a lease": ("leased and written", leased(0, 10, rewind_and_write)),
    "stepping below a lease": ("leased and written", leased(1, 6, lambda r: r.step([row(1, 5)]))),
    "emptying a leased slot": ("emptied while", leased(0, 10, lambda r: r.empty(0))),
    "replacing leased arenas": ("reset while", leased(0, 10, lambda r: r.reset())),
}


@pytest.mark.parametrize(("message", "misuse"), MISUSES.values(), ids=MISUSES.keys())
def test_misuse_is_detected(message: str, misuse: Act) -> None:
    runner, state = prepared()
    with pytest.raises(Misuse, match=message):
        misuse(runner, state)


def test_the_same_calls_in_order_are_no_misuse() -> None:
    runner, state = prepared()
    runner.lease(0, 10)
    read(runner, PROMPT, start=10)
    runner.mount(0, 10, state)
    runner.release(0)
    runner.mount(0, 0, None)
    read(runner, PROMPT)
    runner.step([row(1, 5)])
    runner.commit(1, 1)
    runner.leave(1)
    runner.empty(1)
    runner.reset()
    assert [runner.length(slot) for slot in range(runner.slots)] == [0] * 4


@pytest.mark.parametrize(
    "call",
    [
        lambda r: read(r, PROMPT),
        lambda r: r.join(0),
        lambda r: r.empty(0),
        lambda r: r.reset(),
        lambda r: r.digest(0),
        lambda r: r.sample(row(0, 0), torch.zeros(512)),
    ],
    ids=["read", "join", "empty", "reset", "digest", "sample"],
)
def test_calls_in_the_event_loop_are_misuse(call: Callable[[FakeRunner], object]) -> None:
    async def scenario() -> None:
        with pytest.raises(Misuse, match="in the event loop"):
            call(FakeRunner())

    asyncio.run(scenario())
