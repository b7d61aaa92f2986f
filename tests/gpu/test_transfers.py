"""Copies and the order they keep (S4): whole or not at all, nothing is overwritten while it is copied, and
nobody waits who need not. The fake device checks each call and knows every key of every slot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from regrow.errors import DeviceFailed
from regrow.gpu.transfers import Fill, Save, Transfers
from regrow.gpu.types import Chunk, HostCells, Snapshot
from regrow.policy.keys import Keys
from tests.gpu.in_slots import content, held, hold, keys
from tests.world.fake_runner import PIECES, Costs, FakeRunner, hash_of

COSTS = Costs(copy=2**-14)


@dataclass
class Answers:
    """What `done` was called with, by name."""

    got: dict[str, list[object]] = field(default_factory=dict)

    def done(self, name: str) -> Callable[[object], None]:
        calls = self.got.setdefault(name, [])
        return calls.append

    def __getitem__(self, name: str) -> object:
        (answer,) = self.got[name]
        return answer

    def waits(self, name: str) -> bool:
        return not self.got[name]


@dataclass
class Desk:
    """Transfers on a fake runner; slot 0 holds `keys(0)`, slot 1 `keys(1)`."""

    runner: FakeRunner
    answers: Answers = field(default_factory=Answers)

    def __post_init__(self) -> None:
        self.transfers = Transfers(self.runner)
        self.states = [hold(self.runner, slot, keys(slot)) for slot in (0, 1)]

    def fill(
        self,
        name: str,
        slot: int,
        position: int,
        source: int | Sequence[HostCells] | None,
        state: Snapshot | None = None,
    ) -> None:
        self.transfers.fill(Fill(0, slot, position, source, state, self.answers.done(name)))

    def save(self, name: str, slot: int, *ranges: tuple[int, int]) -> None:
        self.transfers.save(Save(0, slot, ranges, self.answers.done(name)))

    def saved(self, name: str, slot: int, *ranges: tuple[int, int]) -> tuple[HostCells, ...]:
        """Save to the end and return the cells."""
        self.save(name, slot, *ranges)
        self.run()
        answer = self.answers[name]
        assert isinstance(answer, tuple)
        return answer

    def run(self) -> None:
        while self.transfers:
            self.transfers.advance(1.0)


@pytest.fixture(params=[True, False], ids=["hybrid", "attention"])
def desk(request: pytest.FixtureRequest) -> Desk:
    return Desk(FakeRunner(slots=4, hybrid=request.param))


def test_s4_a_fill_makes_a_slot_hold_the_prefix_and_leaves_the_donor_as_it_was(desk: Desk) -> None:
    donor = desk.runner.digest(0)
    desk.fill("fork", 2, 128, 0, desk.states[0][128])
    assert desk.answers.waits("fork")
    desk.run()
    assert desk.answers["fork"] is None
    assert held(desk.runner, 2) == hash_of(keys(0)[:128])
    assert desk.runner.digest(0) == donor
    desk.runner.read(Chunk(2, 128, keys(0)[128:]))
    assert desk.runner.digest(2) == donor


def test_s4_a_slot_that_holds_something_else_is_filled_from_spans_in_host_memory(desk: Desk) -> None:
    first, second, rest = desk.saved("save", 0, (0, 64), (64, 128), (128, 256))
    assert (rest.start, rest.stop) == (128, 256)
    desk.fill("restore", 1, 128, (first, second), desk.states[0][128])
    desk.run()
    assert desk.answers["restore"] is None
    assert held(desk.runner, 1) == hash_of(keys(0)[:128])


def test_a_parked_prefix_is_restored_in_part() -> None:
    desk = Desk(FakeRunner(slots=4, hybrid=False))
    first, second = desk.saved("save", 0, (0, 64), (64, 256))
    desk.fill("restore", 2, 100, (first, second.upto(100)))
    desk.run()
    assert desk.answers["restore"] is None
    assert held(desk.runner, 2) == hash_of(keys(0)[:100])
    assert desk.runner.length(2) == 100


def test_a_fill_in_place_copies_nothing_and_is_answered_at_once(desk: Desk) -> None:
    desk.fill("back", 0, 128, None, desk.states[0][128])
    assert desk.answers["back"] is None
    assert held(desk.runner, 0) == hash_of(keys(0)[:128])
    assert not desk.transfers


def test_s5_a_fill_whose_source_does_not_reach_is_refused_and_touches_nothing(desk: Desk) -> None:
    before = desk.runner.digest(1)
    desk.fill("too far", 1, 257, 0)
    assert isinstance(desk.answers["too far"], DeviceFailed)
    assert desk.runner.digest(1) == before
    assert not desk.transfers


def test_s4_while_a_fill_is_on_its_way_the_slot_is_empty_and_so_it_stays_when_it_is_given_up(
    desk: Desk,
) -> None:
    desk.fill("fork", 1, 256, 0, desk.states[0][256])
    for _ in range(PIECES - 1):
        desk.transfers.advance(0.0)
        assert desk.runner.length(1) == 0
    desk.transfers.fail(DeviceFailed("enough"))
    assert str(desk.answers["fork"]) == "enough"
    assert desk.runner.length(1) == 0


def test_r4_a_fill_with_the_state_of_another_position_or_none_leaves_the_slot_empty() -> None:
    desk = Desk(FakeRunner(slots=4, hybrid=True))
    for name, state in (("other", desk.states[0][256]), ("none", None)):
        desk.fill(name, 1, 128, 0, state)
        desk.run()
        assert isinstance(desk.answers[name], DeviceFailed)
        assert desk.runner.length(1) == 0


def test_a_save_of_cells_that_are_not_there_is_refused(desk: Desk) -> None:
    for number, ranges in enumerate([((0, 257),), ((0, 64), (64, 300)), ((64, 64),)]):
        desk.save(f"save {number}", 0, *ranges)
        assert isinstance(desk.answers[f"save {number}"], DeviceFailed)
    assert not desk.transfers


def test_a_save_of_nothing_new_is_answered_at_once(desk: Desk) -> None:
    desk.save("nothing", 0)
    assert desk.answers["nothing"] == ()


def test_s3_a_save_is_finished_before_its_slot_is_filled_with_something_else(desk: Desk) -> None:
    desk.save("park", 1, (0, 128), (128, 256))
    desk.fill("fork", 1, 128, 0, desk.states[0][128])
    assert held(desk.runner, 1) == hash_of(keys(1)), "the fill waits"
    desk.run()
    assert desk.answers["fork"] is None
    assert held(desk.runner, 1) == hash_of(keys(0)[:128])
    parked = desk.answers["park"]
    assert isinstance(parked, tuple)
    desk.fill("back", 2, 256, parked, desk.states[1][256])
    desk.run()
    assert held(desk.runner, 2) == hash_of(keys(1))


def test_going_back_in_place_waits_only_for_copies_of_what_will_be_overwritten(desk: Desk) -> None:
    desk.fill("fork", 2, 128, 0, desk.states[0][128])
    desk.fill("at", 0, 128, None, desk.states[0][128])
    assert desk.answers["at"] is None
    assert desk.answers.waits("fork")
    desk.save("park", 1, (0, 256))
    desk.fill("below", 1, 128, None, desk.states[1][128])
    assert desk.answers.waits("below")
    desk.run()
    assert desk.answers["fork"] is desk.answers["below"] is None
    assert isinstance(desk.answers["park"], tuple)


def test_of_two_fills_of_one_slot_both_are_answered_and_the_later_one_stands(desk: Desk) -> None:
    desk.fill("first", 2, 256, 0, desk.states[0][256])
    desk.transfers.advance(0.0)
    desk.fill("second", 2, 128, 1, desk.states[1][128])
    desk.run()
    assert desk.answers["first"] is desk.answers["second"] is None
    assert held(desk.runner, 2) == hash_of(keys(1)[:128])


def test_settling_finishes_all_that_touches_the_cells_and_nothing_else(desk: Desk) -> None:
    desk.save("park", 0, (0, 64), (64, 256))
    desk.fill("fork", 2, 128, 1, desk.states[1][128])
    desk.transfers.settle(0, 256)
    assert desk.answers.waits("park")
    desk.transfers.settle(0, 255)
    assert isinstance(desk.answers["park"], tuple)
    assert desk.answers.waits("fork")
    desk.transfers.settle(2)
    assert not desk.answers.waits("fork")


class AnyOrder(RuleBasedStateMachine):
    """Whatever is filled and saved in whatever order: all is answered once, and holds what it should."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(FakeRunner(slots=4, hybrid=True))
        self.names = 0
        self.wanted: dict[str, int] = {}
        self.filling: dict[str, tuple[int, int | None, int]] = {}
        self.saving: dict[str, Keys] = {}

    def name(self) -> str:
        self.names += 1
        return str(self.names)

    def now(self) -> None:
        """Take note of what was answered."""
        for name in [n for n in self.filling if not self.desk.answers.waits(n)]:
            slot, _, wanted = self.filling.pop(name)
            assert self.desk.answers[name] is None
            if not any(target == slot for target, _, _ in self.filling.values()):
                assert held(self.desk.runner, slot) == wanted
        for name in [n for n in self.saving if not self.desk.answers.waits(n)]:
            cells = self.desk.answers[name]
            assert isinstance(cells, tuple)
            assert content(cells) == hash_of(self.saving.pop(name)[: cells[-1].stop])

    @rule(slot=st.sampled_from([2, 3]), donor=st.sampled_from([0, 1]), half=st.booleans())
    def fork(self, slot: int, donor: int, half: bool) -> None:
        name, position = self.name(), 128 if half else 256
        self.filling[name] = (slot, donor, hash_of(keys(donor)[:position]))
        self.desk.fill(name, slot, position, donor, self.desk.states[donor][position])
        self.now()

    @rule(slot=st.sampled_from([0, 1]), edge=st.integers(1, 255), all_of_it=st.booleans())
    def park(self, slot: int, edge: int, all_of_it: bool) -> None:
        name = self.name()
        self.saving[name] = keys(slot)
        self.desk.save(name, slot, (0, edge), *([(edge, 256)] if all_of_it else []))
        self.now()

    @rule(slot=st.sampled_from([0, 1]))
    def read_again(self, slot: int) -> None:
        """Go back to 0 and read the same keys: what is being copied must not be touched."""
        lent = any(donor == slot for _, donor, _ in self.filling.values())
        if not lent:
            name = self.name()
            self.filling[name] = (slot, None, hash_of(keys(slot)[:0]))
            self.desk.fill(name, slot, 0, None, None)
            self.now()
            self.desk.transfers.settle(slot)
            self.now()
            hold(self.desk.runner, slot, keys(slot))

    @rule(seconds=st.sampled_from([0.0, 1e-3, 1.0]))
    def advance(self, seconds: float) -> None:
        self.desk.transfers.advance(seconds)
        self.now()

    @rule(slot=st.sampled_from([0, 1, 2, 3]), position=st.sampled_from([0, 128, 256]))
    def settle(self, slot: int, position: int) -> None:
        self.desk.transfers.settle(slot, position)
        self.now()

    def teardown(self) -> None:
        self.desk.run()
        self.now()
        assert not self.filling
        assert not self.saving


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
