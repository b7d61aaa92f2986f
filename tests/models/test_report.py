"""What `doctor` and `models` say."""

from pathlib import Path

import pytest
import torch

from regrow.models import demo
from regrow.models.gguf import converted_path
from regrow.models.random_models import FAMILIES
from regrow.models.report import doctor_rows, model_rows


def test_doctor_says_what_auto_means_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    rows = {row.subject: row for row in doctor_rows()}
    assert rows["device"].fact == "cpu"
    assert rows["dtype"].fact == "bfloat16"
    assert "amx_bf16" in rows["dtype"].note
    assert rows["torch"].fact == torch.__version__
    assert "transformers" in rows["packages"].fact
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "OMP_WAIT_POLICY=active" in {row.subject: row for row in doctor_rows()}["math library"].fact


def test_doctor_makes_no_directory(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    rows = {row.subject: row for row in doctor_rows(folder)}
    assert str(folder) in rows["model directory"].fact
    assert not folder.exists()


def test_models_names_every_family_and_form(tmp_path: Path) -> None:
    rows = model_rows(tmp_path)
    text = " ".join(part for row in rows for part in row)
    assert all(family in text for family in FAMILIES)
    assert {"demo", "random:FAMILY[:SIZE]", "DIRECTORY", "FILE.gguf"} <= {row.subject for row in rows}


def test_models_says_how_far_the_demo_is_and_what_is_converted(tmp_path: Path) -> None:
    def state() -> str:
        return next(row.note for row in model_rows(tmp_path) if row.subject == "demo")

    assert state().startswith("not fetched: 88 MiB")
    path = demo.demo_path(tmp_path)
    path.parent.mkdir()
    path.touch()
    assert state() == "fetched, not converted yet"
    converted = converted_path(path, tmp_path, demo.SHA256)
    converted.mkdir(parents=True)
    assert state() == "ready"
    assert model_rows(tmp_path)[-1].subject == str(converted)
