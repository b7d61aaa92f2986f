"""A decoder layer in one native call gives what the model's own code gives, row by row."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from regrow.gpu.fast.native import library, state
from regrow.gpu.fast.packing import floats, quantize
from regrow.gpu.fast.prepare import Prepared, Quant, prepare
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, Row
from regrow.models.random_models import build_random
from regrow.policy.request import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason=f"the native kernels are {state()}")
SLOTS, CONTEXT, STEPS = 4, 128, 6
FAMILIES = ("llama", "mistral", "qwen3")  # mistral's window is shorter than the rows
KINDS = (("none", torch.bfloat16), ("int8", torch.float32), ("int4", torch.bfloat16))


def runner_of(family: str, dtype: torch.dtype, quant: Quant) -> tuple[ModelRunner, Prepared]:
    model = build_random(family, "tiny", dtype).requires_grad_(False).eval()
    prepared = prepare(model, quant, {})
    return ModelRunner(model, SLOTS, CONTEXT, "full"), prepared


def stock_runner(family: str, dtype: torch.dtype, quant: Quant) -> ModelRunner:
    """The model's own code, with the weights that packed ones stand for."""
    model = build_random(family, "tiny", dtype).requires_grad_(False).eval()
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and quant != "none":
            packed = quantize(module.weight, 8 if quant == "int8" or module is head else 4)
            module.weight.copy_(floats(packed))
    return ModelRunner(model, SLOTS, CONTEXT, "full")


def tokens(slot: int, length: int) -> np.ndarray:
    return np.random.default_rng(slot).integers(1, 400, length)


@torch.inference_mode()
def decoded(runner: ModelRunner, lengths: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
    """Read a prompt of so many tokens into each of `slots`, decode the same tokens, and return all logits
    [steps, slots, vocab]."""
    runner.reset()
    for slot, length in zip(slots, lengths, strict=True):
        runner.read(Chunk(slot, 0, tokens(length, length)))
        runner.join(slot)
    out = []
    for i in range(STEPS):
        rows = [Row(s, 7 * i + n, n + i, SamplingParams()) for s, n in zip(slots, lengths, strict=True)]
        out.append(runner.decode(rows))
        for slot in slots:
            runner.commit(slot, 1)
    return torch.stack(out).float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("quant", "dtype"), KINDS)
def test_steps_give_the_logits_of_the_models_own_code(family: str, quant: Quant, dtype: torch.dtype) -> None:
    stock = stock_runner(family, dtype, quant)
    fast, prepared = runner_of(family, dtype, quant)
    assert prepared.layers > 0
    lengths, slots = (5, 70, 33), (0, 1, 3)
    wanted, found = decoded(stock, lengths, slots), decoded(fast, lengths, slots)
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm()
    assert float((found - wanted).norm() / spread) < (0.03 if quant == "none" else 0.06)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("quant", "dtype"), KINDS)
def test_a_row_has_the_same_bits_alone_and_beside_others_in_any_slot(
    family: str, quant: Quant, dtype: torch.dtype
) -> None:
    runner, _ = runner_of(family, dtype, quant)
    together = decoded(runner, (5, 70, 33, 12), (0, 1, 2, 3))
    assert torch.equal(decoded(runner, (33,), (2,))[:, 0], together[:, 2])
    assert torch.equal(decoded(runner, (33, 5), (0, 3))[:, 0], together[:, 2])


def test_a_layer_of_another_shape_stays_with_the_models_own_code() -> None:
    for family in ("gemma3", "qwen3_moe"):
        assert runner_of(family, torch.bfloat16, "none")[1].layers == 0


def test_packed_weights_replace_the_unpacked_ones() -> None:
    model = build_random("llama", "tiny", torch.bfloat16).requires_grad_(False).eval()
    before = sum(p.nbytes for p in model.parameters())
    prepared = prepare(model, "int4", {})
    after = sum(p.nbytes for p in model.parameters()) + prepared.nbytes
    assert prepared.packed[4] > 0
    assert after < 0.45 * before  # the embedding stays
