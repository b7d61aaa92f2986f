"""Outlines: what a model keeps is known from its configuration alone, for published models too."""

from pathlib import Path

import pytest
import torch
from bench.geometry import HEADER, PUBLISHED, geometry_of, row

from regrow.gpu.outline import outline
from regrow.models.random_models import random_config
from tests.gpu.drive import FAMILIES, fresh_runner

DOC = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_outline_is_what_probing_the_model_finds(family: str) -> None:
    assert outline(random_config(family), torch.bfloat16) == fresh_runner(family, torch.bfloat16).geometry


def test_a_checkpoint_of_qwen3_8_flash_next_comes_to_118_megabytes_as_others_count() -> None:
    states = geometry_of("Qwen3.8-Flash-Next").states

    def megabytes(kind: str, index: int) -> float:
        return sum(s.nbytes for s in states if (s.kind, s.index) == (kind, index)) / 1e6

    recurrent, convolutions, ngrams = megabytes("recurrent", 0), megabytes("conv", 0), megabytes("conv", 1)
    assert recurrent == pytest.approx(113.25, abs=0.005)
    assert convolutions * 2 * 3 / 4 == pytest.approx(4.42, abs=0.005)  # in float32, three columns of four
    assert ngrams * 2 == pytest.approx(0.37, abs=0.005)
    assert recurrent + convolutions * 2 * 3 / 4 + ngrams * 2 == pytest.approx(118.04, abs=0.005)
    assert recurrent + convolutions + ngrams == pytest.approx(116.38, abs=0.005)
    assert megabytes("conv", 2) == 16e-6


@pytest.mark.parametrize("name", ["Nemotron-3-Nano-30B-A3B", "Granite-4.0-H-Tiny", "LFM2-1.2B", "Gemma-3-4B"])
def test_the_documented_figures_are_those_of_the_bench(name: str) -> None:
    assert f"{HEADER}\n" in DOC
    assert row(name) in DOC.splitlines()


def test_every_published_model_is_documented() -> None:
    assert all(f"\n| {name} | " in DOC for name in PUBLISHED)
