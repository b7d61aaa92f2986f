"""Hostile lives (`python -m tests.sim`): whatever fails, dies, lies, floods or leaves, every request ends
once, no answer differs from the oracle's, and nothing is left of any."""

import pytest

from tests.sim.life import live

SEEDS = 200


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_hostile_life_ends_every_request_once_and_leaves_everything_true(seed: int) -> None:
    assert live(seed).requests > 0


def test_a_life_is_replayed_by_its_seed() -> None:
    first, second = live(7), live(7)
    assert first.trace == second.trace
    assert first.outcomes == second.outcomes


def test_what_is_found_names_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.world.fake_runner.FakeRunner.expected_answer", lambda *_: [])
    with pytest.raises(AssertionError) as found:
        live(3)
    assert found.value.__notes__[-1] == "replay: python -m tests.sim --seed 3 --steps 25"
