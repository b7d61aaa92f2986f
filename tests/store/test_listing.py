"""`regrow cache` on a directory that no server has: listed, checked, removed."""

from pathlib import Path

import pytest

from regrow import cli
from regrow.errors import BadConfig
from regrow.store.files import OsFiles
from regrow.store.listing import Listing
from regrow.store.records import ASIDE, Records
from tests.store.talks import IDENTITY, talk, write


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A root, two conversations under it, and one of another model."""
    for identity, records in (
        (IDENTITY, [talk(7), talk(7, (1,)), talk(7, (2,))]),
        ("other", [talk(8, (1,))]),
    ):
        opened = Records(OsFiles(tmp_path), identity, 1 << 30, 0)
        opened.open()
        for new in records:
            write(opened, new)
        opened.files.close()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], directory: Path, *words: str) -> tuple[int, str]:
    code = cli.main(["cache", *words, "--cache-dir", str(directory)])
    told = capsys.readouterr()
    return code, " ".join((told.out + told.err).split())


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_tells_of_every_file_what_it_is(directory: Path) -> None:
    spoil(sorted(directory.iterdir())[3])
    listing = Listing(directory)
    assert not list(listing.verify())[1:]
    rows = list(listing.rows())
    listing.close()
    assert [row[1].split(",")[0] for row in rows[:3]] == ["root", "chat", "chat"]
    assert "64 tokens, 1 states, 0.0 MiB, used 0.0 days ago" in rows[0][1]
    assert rows[0][2] == f"model {IDENTITY[:8]}"
    assert "checksum is wrong" in rows[3][2]
    again = Listing(directory)
    assert list(again.rows())[3][2] == "broken: set aside"
    assert [row[2] for row in again.verify()] == ["set aside before"]
    again.close()


def test_the_command_lists_checks_and_removes(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted(path.name for path in directory.iterdir())
    code, told = run(capsys, directory, "ls")
    assert code == 0
    assert all(word in told for word in ("root, 64 tokens", "chat, 96 tokens", "0000000001-root-"))
    assert run(capsys, directory, "verify") == (0, "every record is as it was written")
    spoil(directory / names[1])
    code, told = run(capsys, directory, "verify")
    assert code == 1
    assert "checksum is wrong" in told
    assert (directory / (names[1] + ASIDE)).exists()
    assert run(capsys, directory, "rm", "broken") == (0, "removed: 1")
    assert run(capsys, directory, "rm", names[0]) == (0, "removed: 2")  # what needs it goes with it
    assert run(capsys, directory, "rm", "all") == (0, "removed: 1")
    assert list(directory.iterdir()) == []


def test_what_is_wrong_with_a_command_is_said(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("rm",), "rm takes names of records"),
        (("ls", "x"), "ls and verify take none"),
        (("rm", "x"), "there is no record x"),
    ):
        code, told = run(capsys, directory, *words)
        assert code == 2
        assert said in told
    assert len(list(directory.iterdir())) == 4
    assert cli.main(["cache", "ls"]) == 2
    assert "--cache-dir" in capsys.readouterr().err
    with pytest.raises(BadConfig, match="is no directory"):
        Listing(directory / "none")


def test_while_a_server_has_the_directory_nothing_is_touched(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = OsFiles(directory)
    code, told = run(capsys, directory, "rm", "all")
    files.close()
    assert code == 2
    assert "in use by another regrow process" in told
    assert len(list(directory.iterdir())) == 4
