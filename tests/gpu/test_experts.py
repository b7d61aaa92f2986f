"""Experts: in mode "full" a row's bits must not depend on which other rows share its experts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regrow.gpu import forward
from regrow.gpu.forward import SlotModel
from regrow.gpu.probe import probe
from regrow.models.random_models import build_random

MOE = ("qwen3_moe", "qwen3_next", "qwen4_exp", "granitemoehybrid", "nemotron_h")


def test_rows_leave_each_other_alone_where_the_math_library_would_let_another_form_mix_them() -> None:
    """`regrow` pins the library to one code path, and there a row of a product has the same bits for any
    number of rows, so that no form fails. Where it is free, the form in use holds, and others do not."""
    forms = (forward._DECODING_EXPERTS, forward._READING_EXPERTS)
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.expert_rows", *forms],
        env={**os.environ, "MKL_CBWR": "OFF"},
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    in_use, other = map(int, done.stdout.split())
    assert in_use == 0
    if torch.backends.mkl.is_available():
        assert other > 0


@pytest.mark.parametrize("family", MOE)
def test_experts_that_gather_the_rows_that_chose_them_are_found_out_by_probing(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe(SlotModel(build_random(family))).row_exact
    monkeypatch.setattr(forward, "_DECODING_EXPERTS", "eager")
    assert not probe(SlotModel(build_random(family))).row_exact
