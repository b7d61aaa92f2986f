import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from regrow.models import chosen
from regrow.models.chosen import all_chosen, chosen_once
from regrow.models.progress import silent
from regrow.policy.chunks import HELD, ChosenChunks
from regrow.policy.plan import ChunkTable


class Chooser:
    """Chooses another table every time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> ChosenChunks:
        self.asked += 1
        return ChosenChunks(ChunkTable(((0, 512), (64 * self.asked, 64))), HELD)


def once(folder: Path, choose: Chooser, *, weights: str = "w", stall: float = 200.0) -> ChosenChunks:
    return chosen_once(folder, "demo", (weights, 2), stall, choose, silent)


def test_what_was_chosen_holds_at_every_later_start(tmp_path: Path) -> None:
    choose = Chooser()
    first = once(tmp_path, choose)
    assert [once(tmp_path, choose), once(tmp_path, Chooser())] == [first, first]
    assert choose.asked == 1


def test_other_weights_another_bound_and_another_machine_are_chosen_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Chooser()
    once(tmp_path, choose)
    once(tmp_path, choose, weights="others")
    once(tmp_path, choose, stall=100.0)
    monkeypatch.setattr(chosen, "machine", lambda: "another one, 64 cores")
    once(tmp_path, choose)
    assert choose.asked == 4
    assert [kept.machine for kept in all_chosen(tmp_path)] == ["another one, 64 cores"]


def test_what_was_chosen_by_another_rule_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Chooser()
    once(tmp_path, choose)
    monkeypatch.setattr(chosen, "RULE", chosen.RULE + 1)
    assert list(all_chosen(tmp_path)) == []
    once(tmp_path, choose)
    assert choose.asked == 2
    assert len(list((tmp_path / chosen.FOLDER).glob("*.json"))) == 2


def test_what_is_kept_says_for_whom_it_is(tmp_path: Path) -> None:
    once(tmp_path, Chooser())
    (kept,) = all_chosen(tmp_path)
    assert (kept.model, kept.max_stall_ms, kept.stall) == ("demo", 200.0, HELD)
    assert kept.machine == chosen.machine()
    assert kept.machine.endswith("cores")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": "demo"}', None])
def test_a_file_that_cannot_be_read_is_measured_again_and_that_is_logged(
    tmp_path: Path, text: str | None
) -> None:
    choose = Chooser()
    once(tmp_path, choose)
    (path,) = (tmp_path / chosen.FOLDER).glob("*.json")
    broken = {**json.loads(path.read_text()), "steps": [[64, 64]]}
    path.write_text(json.dumps(broken) if text is None else text)
    assert list(all_chosen(tmp_path)) == []
    with capture_logs() as logs:
        again = once(tmp_path, choose)
    assert choose.asked == 2
    assert once(tmp_path, choose) == again
    assert "measured again" in logs[0]["event"]


def test_where_nothing_can_be_kept_it_is_measured_and_that_is_logged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    choose = Chooser()
    with capture_logs() as logs:
        assert once(tmp_path / "file", choose) == ChosenChunks(ChunkTable(((0, 512), (64, 64))), HELD)
    assert choose.asked == 1
    assert "cannot be kept" in logs[0]["event"]
