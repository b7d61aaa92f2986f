"""A gated delta net in one native call gives, and leaves in the arenas, what the model's own code does."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from regrow.gpu.fast.native import library, state
from regrow.gpu.fast.prepare import Quant, prepare
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, Row
from regrow.models.random_models import build_random
from regrow.policy.request import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason=f"the native kernels are {state()}")
SLOTS, CONTEXT, STEPS = 4, 128, 6
FAMILIES = pytest.mark.parametrize("family", ["qwen3_5", "qwen4_exp"])


def runner_of(family: str, dtype: torch.dtype, quant: Quant | None) -> tuple[ModelRunner, int]:
    model = build_random(family, "tiny", dtype).requires_grad_(False).eval()
    layers = 0 if quant is None else prepare(model, quant, {}).layers
    return ModelRunner(model, SLOTS, CONTEXT, "full"), layers


@torch.inference_mode()
def lived(
    runner: ModelRunner, lengths: Sequence[int], slots: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Read so many tokens into each of `slots`, decode, and return all logits [steps, slots, vocab] and the
    states of the first of them."""
    runner.reset()
    for slot, length in zip(slots, lengths, strict=True):
        runner.read(Chunk(slot, 0, np.random.default_rng(length).integers(1, 400, length)))
        runner.join(slot)
    out = []
    for i in range(STEPS):
        rows = [Row(s, 7 * i + n, n + i, SamplingParams()) for s, n in zip(slots, lengths, strict=True)]
        out.append(runner.decode(rows))
        for slot in slots:
            runner.commit(slot, 1)
    for slot in slots:
        runner.leave(slot)
    return torch.stack(out).float(), [kept.clone().float() for kept in runner.arenas.states(slots[0])]


@FAMILIES
def test_logits_and_states_are_those_of_the_models_own_code(family: str) -> None:
    stock, _ = runner_of(family, torch.bfloat16, None)
    fast, layers = runner_of(family, torch.bfloat16, "none")
    assert layers > 0
    (wanted, states), (found, own) = (lived(runner, (5, 70, 33), (0, 1, 3)) for runner in (stock, fast))
    assert float((found - wanted).norm()) <= 0.05 * float(wanted.norm())
    for a, b in zip(own, states, strict=True):
        assert float((a - b).norm()) <= 0.05 * float(b.norm())


@FAMILIES
@pytest.mark.parametrize(("quant", "dtype"), [("none", torch.bfloat16), ("int8", torch.float32)])
def test_a_row_has_the_same_bits_and_leaves_the_same_states_alone_and_beside_others(
    family: str, quant: Quant, dtype: torch.dtype
) -> None:
    runner, _ = runner_of(family, dtype, quant)
    together, states = lived(runner, (33, 70, 5, 12), (2, 1, 0, 3))
    alone, own = lived(runner, (33,), (0,))
    assert torch.equal(alone[:, 0], together[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(own, states, strict=True))
