"""The clock for idle times."""

from regrow.store.clock import since_boot, system_clock


def test_it_begins_at_the_wall_clocks_time_and_counts_on_by_itself(monkeypatch) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.0 + since_boot())
    clock = system_clock()
    monkeypatch.setattr("time.time", lambda: 0.0)
    earlier, now, later = since_boot(), clock.now(), since_boot()
    assert 5000.0 + earlier <= now + 1e-3
    assert now <= 5000.0 + later + 1e-3


def test_clocks_of_one_boot_say_so() -> None:
    assert system_clock().boot == system_clock().boot
