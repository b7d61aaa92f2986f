"""The bench of gaps says what it promises to say."""

from pathlib import Path

import pytest

from tests.bench.test_benches import Load, run


def test_stall_gaps_of_streams_are_told_for_every_copy_and_for_a_read(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = load("stall")
    monkeypatch.setattr(stall, "LENGTH", 400)
    monkeypatch.setattr(stall, "CALM_S", 0.2)
    rows = run(stall, "stall", tmp_path, monkeypatch, "--model", "random:qwen3_5")
    assert [row["source"] for row in rows] == ["slot", "none", "parked", "none", "none"]
    for row in rows:
        assert row["gaps"] > 0
        assert row["longest ms"] > 0
