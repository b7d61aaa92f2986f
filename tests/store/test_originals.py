"""The originals of what was shortened."""

import os
from pathlib import Path

import pytest

from regrow.policy.history import content_hash
from regrow.store.originals import Originals


def named(*texts: str) -> dict[str, str]:
    return {content_hash(text): text for text in texts}


@pytest.mark.parametrize("text", ["plain", "Grüße 🙂\r\n", "", "\ud800 half a pair"])
def test_an_original_comes_back_as_it_was_also_after_a_restart(tmp_path: Path, text: str) -> None:
    Originals(tmp_path).keep(named(text))
    assert Originals(tmp_path).get(content_hash(text)) == text


@pytest.mark.parametrize("name", ["0" * 24, "", "../cold_prefix_touch.json", "0" * 23, "G" * 24])
def test_what_is_not_there_and_what_is_no_hash_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "cold_prefix_touch.json").write_text("{}")
    assert Originals(tmp_path).get(name) is None


def test_above_the_limit_the_oldest_leave(tmp_path: Path) -> None:
    kept = Originals(tmp_path, limit_bytes=1000)
    for number in range(12):
        text = f"{number:02}" * 50
        kept.keep(named(text))
        os.utime(tmp_path / "originals" / content_hash(text), (number, number))
    left = [number for number in range(12) if kept.get(content_hash(f"{number:02}" * 50))]
    assert left == list(range(2, 12))
    sizes = sum(path.stat().st_size for path in (tmp_path / "originals").iterdir())
    assert sizes <= 1000


def test_without_a_directory_nothing_is_kept() -> None:
    kept = Originals(None)
    kept.keep(named("text"))
    assert kept.get(content_hash("text")) is None


def test_it_is_its_owners_alone(tmp_path: Path) -> None:
    Originals(tmp_path).keep(named("text"))
    assert (tmp_path / "originals").stat().st_mode & 0o077 == 0
