"""Norms and MLPs in one native call each give what the model's own code gives."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from regrow.gpu.fast.native import library, state
from regrow.gpu.fast.parts import NativeMlp, NativeNorm, use_native_parts
from regrow.gpu.fast.prepare import prepare
from regrow.models.random_models import build_random

pytestmark = pytest.mark.skipif(library() is None, reason=f"the native kernels are {state()}")
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def modules(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if isinstance(getattr(m, "forward", None), NativeNorm | NativeMlp))


@TYPES
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3_5RMSNorm])
@pytest.mark.parametrize("size", [64, 100])
def test_a_norm_gives_what_its_own_code_gives_for_any_number_of_rows(
    kind: type[nn.Module], size: int, dtype: torch.dtype
) -> None:
    model = nn.Sequential(kind(size, eps=1e-5).to(dtype)).requires_grad_(False)
    model[0].weight.copy_(drawn(size, dtype=dtype))
    x = 5 * drawn(2, 300, size, dtype=dtype)
    wanted = model(x)
    assert use_native_parts(model, {}, dtype) == 1
    close = {"rtol": 0.01, "atol": 1e-3} if dtype == torch.bfloat16 else {}
    assert torch.allclose(model(x), wanted, **close)
    assert torch.equal(model(x[:1, 7:8]), model(x)[:1, 7:8])  # whatever rows are beside it


def test_a_norm_that_takes_more_than_its_input_stays_as_it_is() -> None:
    model = nn.Sequential(Qwen3_5RMSNormGated(64, eps=1e-5)).requires_grad_(False)
    assert use_native_parts(model, {}, torch.float32) == 0


@TYPES
def test_an_mlp_gives_what_its_own_code_gives_for_few_rows_and_for_many(dtype: torch.dtype) -> None:
    model = build_random("qwen3_5", "tiny", dtype).requires_grad_(False).eval()
    prepare(model, "none" if dtype == torch.bfloat16 else "int8", {})
    mlp = next(m for m in modules(model) if isinstance(m.forward, NativeMlp))
    x = drawn(1, 100, 192, dtype=dtype)
    few, many = mlp(x[:, :3]), mlp(x)
    assert float((few - many[:, :3]).float().norm()) <= 0.03 * float(few.float().norm())
    assert torch.equal(mlp(x[:, 1:2]), few[:, 1:2])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen4_exp", "falcon_h1", "lfm2", "gemma3"])
def test_the_logits_stay_those_of_the_models_own_code(family: str) -> None:
    model = build_random(family, "tiny", torch.bfloat16).requires_grad_(False).eval()
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        wanted = model(ids).logits.float()
        prepare(model, "none", {})
        assert list(modules(model))
        found = model(ids).logits.float()
    assert float((found - wanted).norm()) <= 0.05 * float(wanted.norm())
