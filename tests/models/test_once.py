"""What several processes share is made once, whole or not at all."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.models.once import made_once, model_directory
from regrow.models.progress import silent

CHILD = """
import sys
from pathlib import Path
from regrow.models.once import made_once

def make(part):
    part.write_text("child")

made_once(Path(sys.argv[1]), make, lambda text, share: print(text, flush=True))
"""


def test_it_is_made_once(tmp_path: Path) -> None:
    made = []

    def make(part: Path) -> None:
        made.append(part)
        part.write_text("whole")

    target = tmp_path / "deep" / "file"
    assert made_once(target, make, silent) == target
    assert made_once(target, make, silent).read_text() == "whole"
    assert len(made) == 1


def test_directories_are_made_too(tmp_path: Path) -> None:
    def make(part: Path) -> None:
        (part / "inner").mkdir(parents=True)
        (part / "inner" / "file").write_text("whole")

    target = made_once(tmp_path / "folder", make, silent)
    assert (target / "inner" / "file").read_text() == "whole"


def test_nothing_is_left_where_making_fails_and_the_next_call_makes_it(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("disk full")

    target = tmp_path / "file"
    with pytest.raises(OSError, match="disk full"):
        made_once(target, fail, silent)
    assert [path.name for path in tmp_path.iterdir()] == [".file.lock"]
    made_once(target, lambda part: part.write_text("whole") and None, silent)
    assert target.read_text() == "whole"


def test_what_a_killed_process_left_is_not_taken_for_whole(tmp_path: Path) -> None:
    (tmp_path / ".folder.part").mkdir()
    (tmp_path / ".folder.part" / "half").write_text("half")

    def make(part: Path) -> None:
        part.mkdir()
        (part / "file").write_text("whole")

    target = made_once(tmp_path / "folder", make, silent)
    assert [path.name for path in target.iterdir()] == ["file"]


def test_a_second_process_waits_and_takes_what_the_first_made(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with (tmp_path / ".file.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(target)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert "waiting for another process" in child.stdout.readline()
        target.write_text("parent")
    assert child.wait(timeout=60) == 0
    assert target.read_text() == "parent"


def test_models_are_kept_in_the_users_cache_or_where_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_directory() == tmp_path / "regrow"
    assert model_directory(tmp_path / "mine") == tmp_path / "mine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model_directory() == Path.home() / ".cache" / "regrow"
