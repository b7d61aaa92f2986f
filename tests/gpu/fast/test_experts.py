"""Experts row by row: what `transformers` computes, and a row's bits do not depend on the rows beside it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from transformers.integrations.moe import batched_mm_experts_forward

from regrow.errors import BadConfig
from regrow.gpu.fast.experts import experts_by_row
from regrow.gpu.fast.indexer import use_fast_indexers
from regrow.gpu.fast.stock import left_stock
from regrow.gpu.forward import SlotModel
from regrow.gpu.probe import probe
from regrow.models.random_models import build_random
from tests.gpu.drive import DTYPES

EXPERTS, CHOSEN, HIDDEN, WIDTH = 8, 3, 96, 40
KINDS: dict[str, dict[str, bool]] = {
    "gated": {},
    "not gated": {"has_gate": False},
    "with a bias": {"has_bias": True},
    "transposed": {"is_transposed": True, "has_bias": True},
    "with a norm": {"has_post_expert_norm": True},
}


def layer(dtype: torch.dtype, **kind: bool) -> Any:
    flags = dict.fromkeys(("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel"), False)
    made = SimpleNamespace(**{**flags, "has_gate": True, **kind}, num_experts=EXPERTS, act_fn=silu)
    generator = torch.Generator().manual_seed(0)
    inner = 2 * WIDTH if made.has_gate else WIDTH
    up = "gate_up_proj" if made.has_gate else "up_proj"
    for name, outputs, inputs in ((up, inner, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        shape = (inputs, outputs) if made.is_transposed else (outputs, inputs)
        weight = torch.randn(EXPERTS, *shape, generator=generator) * inputs**-0.5
        setattr(made, name, weight.to(dtype))
        setattr(made, f"{name}_bias", torch.randn(EXPERTS, outputs, generator=generator).to(dtype))
    made._apply_gate = lambda out: silu(out[:, :WIDTH]) * out[:, WIDTH:]
    made.post_expert_norm = lambda out: out * 0.5
    return made


def rows(n: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, HIDDEN, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(n)])
    return hidden, chosen, torch.rand(n, CHOSEN, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_they_compute_what_the_stock_form_does(kind: dict[str, bool], dtype: torch.dtype) -> None:
    for n in (1, 5):
        given = layer(dtype, **kind), *rows(n, dtype)
        wanted, got = batched_mm_experts_forward(*given), experts_by_row(*given)
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype is torch.float32 else 0.05
        assert float((got - wanted).abs().max()) < tolerance
        assert float(wanted.float().std()) > 0.1


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_row_has_the_same_bits_alone_and_beside_rows_that_share_its_experts(dtype: torch.dtype) -> None:
    made = layer(dtype)
    hidden, chosen, weights = rows(1, dtype)
    alone = experts_by_row(made, hidden, chosen, weights)
    for seed in range(1, 6):
        others = rows(4, dtype, seed)
        beside = [
            torch.cat((b[:2], a, b[2:])) for a, b in zip((hidden, chosen, weights), others, strict=True)
        ]
        beside[1][:] = chosen
        assert torch.equal(experts_by_row(made, *beside)[2], alone[0])


def test_parts_that_are_left_alone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not left_stock("experts")
    monkeypatch.setenv("REGROW_STOCK", "indexer, experts")
    assert left_stock("indexer")
    assert left_stock("experts")
    model = build_random("qwen4_exp")
    probe(SlotModel(model))
    assert model.config._experts_implementation == "batched_mm"
    assert not any("forward" in vars(module) for module in model.modules())
    assert use_fast_indexers(model) == 1
    monkeypatch.setenv("REGROW_STOCK", "kernels")
    with pytest.raises(BadConfig, match="REGROW_STOCK: 'kernels' is none of indexer, experts"):
        left_stock("indexer")
