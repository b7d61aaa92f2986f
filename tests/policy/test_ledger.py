import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from regrow.policy.ledger import KINDS, Kind, Ledger

sizes = st.integers(1, 60)


class AnyUse(RuleBasedStateMachine):
    """B1: whatever is reserved, committed, shrunk and released, the sums are right and within the budget."""

    @initialize(budget=st.integers(0, 200))
    def open(self, budget: int) -> None:
        self.ledger = Ledger(budget)
        self.budget = budget
        self.held: dict[int, tuple[Kind, int, bool]] = {}
        self.most = 0
        self.ever: set[int] = set()

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)))

    @rule(kind=st.sampled_from(KINDS), size=sizes)
    def reserve(self, kind: Kind, size: int) -> None:
        used = sum(s for _, s, _ in self.held.values())
        lease = self.ledger.reserve(kind, size)
        assert (lease is not None) == (used + size <= self.budget)
        if lease is not None:
            assert lease not in self.ever
            self.ever.add(lease)
            self.held[lease] = (kind, size, False)
            self.most = max(self.most, used + size)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), whole=st.booleans())
    def commit(self, data: st.DataObject, whole: bool) -> None:
        lease = self.pick(data)
        kind, size, _ = self.held[lease]
        real = size if whole else data.draw(st.integers(1, size))
        self.ledger.commit(lease, None if whole else real)
        self.held[lease] = (kind, real, True)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), size=sizes)
    def shrink(self, data: st.DataObject, size: int) -> None:
        lease = self.pick(data)
        kind, held, committed = self.held[lease]
        if size <= held:
            self.ledger.shrink(lease, size)
            self.held[lease] = (kind, size, committed)
        else:
            with pytest.raises(ValueError, match="cannot shrink"):
                self.ledger.shrink(lease, size)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.pick(data)
        self.ledger.release(lease)
        del self.held[lease]

    @precondition(lambda self: self.ever - self.held.keys())
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.ever - self.held.keys())))
        with pytest.raises(KeyError, match="not open"):
            self.ledger.release(lease)

    @invariant()
    def sums_are_right(self) -> None:
        ledger = self.ledger
        used = sum(size for _, size, _ in self.held.values())
        assert ledger.used == used <= ledger.budget
        assert ledger.free == self.budget - used
        assert ledger.peak == self.most
        assert ledger.pending == sum(size for _, size, committed in self.held.values() if not committed)
        assert ledger.by_kind == {
            kind: sum(s for k, s, _ in self.held.values() if k == kind) for kind in KINDS
        }
        assert {lease: ledger.size(lease) for lease in ledger.leases} == {
            lease: size for lease, (_, size, _) in self.held.items()
        }


TestAnyUse = AnyUse.TestCase


@pytest.mark.parametrize("size", [0, -1])
def test_b1_a_size_that_is_not_positive_is_refused_loudly(size: int) -> None:
    ledger = Ledger(100)
    with pytest.raises(ValueError, match="cannot be leased"):
        ledger.reserve("keys", size)
    lease = ledger.reserve("keys", 10)
    assert lease is not None
    with pytest.raises(ValueError, match="cannot shrink"):
        ledger.shrink(lease, size)
    assert ledger.used == 10


def test_b1_what_can_never_fit_is_told_from_what_does_not_fit_now() -> None:
    ledger = Ledger(100)
    ledger.reserve("parked", 80)
    assert ledger.reserve("root", 50) is None
    assert ledger.can_ever_fit(50)
    assert ledger.reserve("root", 101) is None
    assert not ledger.can_ever_fit(101)
    assert ledger.by_kind["parked"] == 80


def test_a_budget_is_not_negative_and_0_grants_nothing() -> None:
    with pytest.raises(ValueError, match="budget"):
        Ledger(-1)
    assert Ledger(0).reserve("buffer", 1) is None


def test_an_unknown_lease_is_an_error_everywhere() -> None:
    ledger = Ledger(100)
    for call in (ledger.release, ledger.size, ledger.commit):
        with pytest.raises(KeyError, match="not open"):
            call(7)
