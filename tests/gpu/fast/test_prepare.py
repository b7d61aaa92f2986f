"""Preparing weights breaks no family: the same numbers up to rounding, and nothing the model's code uses is
taken from it."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from regrow.config import Quant
from regrow.errors import BadConfig
from regrow.gpu.fast import native
from regrow.gpu.fast.called import called_layers
from regrow.gpu.fast.linear import FastLinear
from regrow.gpu.fast.packing import quantize
from regrow.gpu.fast.prepare import prepare
from regrow.models.random_configs import FAMILIES
from regrow.models.random_models import build_random

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"the native kernels are {native.state()}")
FEW, MANY = 20, 80  # tokens: through the native kernels, and through torch


@torch.inference_mode()
def logits(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    out: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return out


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The median over the tokens, since rounding sends some to another expert; 1.4 is another model."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


def attributes(model: PreTrainedModel) -> dict[str, tuple[type, set[str]]]:
    return {name: (type(module), set(vars(module))) for name, module in model.named_modules()}


@pytest.mark.parametrize(
    ("dtype", "quant", "most"),
    [
        (torch.float32, "none", 1e-4),
        (torch.bfloat16, "none", 0.05),
        (torch.float32, "int8", 0.1),
        (torch.float32, "int4", 0.8),
    ],
    ids=["float32", "bfloat16", "int8", "int4"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prepared_model_gives_the_same_up_to_rounding(
    family: str, dtype: torch.dtype, quant: Quant, most: float
) -> None:
    wanted = [logits(build_random(family, dtype=dtype), n) for n in (FEW, MANY)]
    model = build_random(family, dtype=dtype)
    prepared = prepare(model, quant, {})
    assert prepared.quant == quant
    assert sum(prepared.packed.values()) + prepared.plain + prepared.left > 0
    for n, expected in zip((FEW, MANY), wanted, strict=True):
        assert off(logits(model, n), expected) < most


def test_a_layer_whose_weight_the_models_code_takes_is_left_alone() -> None:
    model = build_random("llama", dtype=torch.bfloat16)
    first, second = (layer.mlp for layer in model.model.layers[:2])

    def own(self: Any, x: torch.Tensor) -> torch.Tensor:
        up = linear(x, self.up_proj.weight)  # not called at all
        gate = self.act_fn(self.gate_proj(x.to(self.gate_proj.weight.dtype)))
        out: torch.Tensor = self.down_proj(gate * up)
        return out

    first.forward = MethodType(own, first)
    wanted = logits(model, FEW)
    called = {name for group in called_layers(model) for name, _ in group}
    assert not {f"model.layers.0.mlp.{name}_proj" for name in ("up", "gate")} & called
    prepare(model, "int8", {})
    assert type(first.up_proj) is type(first.gate_proj) is torch.nn.Linear
    assert type(first.down_proj) is type(second.up_proj) is FastLinear
    assert off(logits(model, FEW), wanted) < 0.1


def test_watching_a_model_leaves_it_as_it_was() -> None:
    model = build_random("qwen3_5", dtype=torch.float32)
    wanted, before = logits(model, FEW), attributes(model)
    called_layers(model)
    assert attributes(model) == before
    assert torch.equal(logits(model, FEW), wanted)


def test_auto_takes_the_codes_that_are_given_and_packs_nothing_else() -> None:
    model = build_random("llama", dtype=torch.bfloat16)
    name = "model.layers.1.self_attn.o_proj"
    codes = quantize(model.get_submodule(name).weight, 4)
    prepared = prepare(model, "auto", {name: codes})
    assert (prepared.quant, prepared.packed[4], prepared.packed[8]) == ("auto", 1, 0)
    other = prepare(build_random("llama", dtype=torch.bfloat16), "auto", {})
    assert (other.quant, sum(other.packed.values())) == ("none", 0)
    assert prepared.identity != other.identity


def test_fewer_bits_are_fewer_bytes() -> None:
    nbytes = {
        q: prepare(build_random("llama", dtype=torch.bfloat16), q, {}).nbytes
        for q in ("none", "int8", "int4")
    }
    assert nbytes["int8"] < 0.6 * nbytes["none"]
    assert nbytes["int4"] < 0.4 * nbytes["none"]


def test_what_is_not_served_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    half = build_random("llama", dtype=torch.float16)
    with pytest.raises(BadConfig, match=r"--quant int8: .*, not for cpu in float16; give none or auto"):
        prepare(half, "int8", {})
    assert prepare(half, "auto", {}).left > 0
    monkeypatch.setattr("regrow.gpu.fast.prepare.library", lambda: None)
    with pytest.raises(BadConfig, match="--quant int4: in float32 such weights need the native kernels"):
        prepare(build_random("llama"), "int4", {})
