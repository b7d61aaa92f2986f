"""The real directory does what the simulated disk promises, and belongs to one process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from regrow.errors import BadConfig
from regrow.store.files import Files, OsFiles
from tests.store.disk import SimulatedDisk


@pytest.fixture(params=["real", "simulated"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return OsFiles(tmp_path / "cache") if request.param == "real" else SimulatedDisk()


def read(files: Files, name: str, offset: int, n: int) -> bytes:
    into = np.zeros(n, dtype=np.uint8)
    return into[: files.read(name, offset, into)].tobytes()


def test_a_file_is_written_renamed_read_and_removed(files: Files) -> None:
    output = files.create("a.part")
    for piece in (b"one ", np.frombuffer(b"two ", dtype=np.uint8).data, b"three"):
        output.write(piece)
    output.sync()
    output.close()
    files.rename("a.part", "a")
    files.sync()
    assert {name: facts.size for name, facts in files.facts().items()} == {"a": 13}
    assert read(files, "a", 4, 4) == b"two "
    assert read(files, "a", 10, 100) == b"ree"
    assert read(files, "a", 50, 1) == b""
    files.touch("a")
    files.create("b").close()
    files.rename("a", "b")
    assert read(files, "b", 0, 3) == b"one"
    assert files.free() > 0
    files.unlink("b")
    files.unlink("b")
    assert files.facts() == {}
    with pytest.raises(FileNotFoundError):
        read(files, "b", 0, 1)
    with pytest.raises(FileNotFoundError):
        files.rename("b", "c")
    files.close()


def test_d5_the_directory_and_its_files_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "cache"
    OsFiles(directory).create("x").close()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "x").stat().st_mode & 0o777 == 0o600


def test_d5_one_process_has_the_directory_and_another_is_told_so(tmp_path: Path) -> None:
    files = OsFiles(tmp_path)
    script = (
        f"from pathlib import Path; from regrow.store.files import OsFiles; OsFiles(Path({str(tmp_path)!r}))"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"--cache-dir: {tmp_path} is in use by another regrow process" in other.stderr
    files.close()
    OsFiles(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_a_wrong_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadConfig, match=r"--cache-dir: .*file"):
        OsFiles(tmp_path / "file")


def test_a_directory_inside_is_no_file_of_ours(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    assert OsFiles(tmp_path).facts() == {}
