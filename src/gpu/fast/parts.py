"""Norms and gated MLPs in one native call each, wherever they stand.

A module is taken for one if it looks like one and gives on random input what its own code gives, up to
rounding.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from regrow.gpu.fast import native
from regrow.gpu.fast.linear import FEW, Kin

_TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}
_MLP = ("gate_proj", "up_proj", "down_proj")


class NativeNorm:
    """A root mean square norm over the last dimension.

    one_more: the weight is 1 + what the module keeps. rounds: see `native/norm.h`.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, *, one_more: bool, rounds: bool) -> None:
        self._library = native.needed()
        self._weight = (weight.detach().float() + one_more).contiguous()
        self._norm = native.Norm(self._weight.data_ptr(), epsilon, rounds)
        self._at = ctypes.addressof(self._norm)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y, size = torch.empty_like(x), x.shape[-1]
        bf16 = x.dtype == torch.bfloat16
        self._library.regrow_norm(self._at, x.data_ptr(), y.data_ptr(), x.numel() // size, size, bf16)
        return y


class NativeMlp:
    """A gated SiLU MLP. Where its products do not take many rows, the gate alone is native for those."""

    def __init__(self, gate_up: Kin, down: Kin) -> None:
        self._library = native.needed()
        self._gate_up, self._down = gate_up[0], down[0]
        self._at = [ctypes.addressof(product.native) for product in (self._gate_up, self._down)]
        self._takes_many = self._gate_up.takes_many and self._down.takes_many

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, bf16 = x.numel() // x.shape[-1], x.dtype == torch.bfloat16
        if rows > FEW and not (bf16 and self._takes_many):
            both = self._gate_up(x.reshape(rows, -1))
            gated = x.new_empty(rows, self._down.native.inputs)
            self._library.regrow_gate(both.data_ptr(), gated.data_ptr(), rows, gated.shape[1], bf16)
            return self._down(gated).view(*x.shape[:-1], -1)
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self._down.native.outputs)
        self._library.regrow_mlp(*self._at, x.data_ptr(), y.data_ptr(), rows, bf16)
        return y


def use_native_parts(model: nn.Module, products: Mapping[str, Kin], dtype: torch.dtype) -> int:
    """Let the norms and MLPs of `model` that can run natively do so; return how many.

    products: those of the linear layers, by name. dtype: of the hidden states.
    """
    found = 0
    for name, module in model.named_modules():
        part = _norm(module) or _mlp(name, module, products, dtype)
        if part is not None:
            module.forward = part
            found += 1
    return found


def _norm(module: nn.Module) -> NativeNorm | None:
    own = dict(module.named_parameters(recurse=False))
    if not type(module).__name__.endswith("RMSNorm") or list(own) != ["weight"]:
        return None
    weight = own["weight"]
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or weight.dim() != 1 or weight.dtype not in _TOLERANCE:
        return None
    for one_more, rounds in ((False, True), (True, False), (False, False)):
        norm = NativeNorm(weight, epsilon, one_more=one_more, rounds=rounds)
        if _agree(module, norm, len(weight), weight.dtype):
            return norm
    return None


def _mlp(name: str, module: nn.Module, products: Mapping[str, Kin], dtype: torch.dtype) -> NativeMlp | None:
    gate, up, down = (f"{name}.{part}" for part in _MLP)
    gate_up, out = products.get(gate), products.get(down)
    if gate_up is None or out is None or gate_up[1] != (gate, up) or out[1] != (down,):
        return None
    mlp, inputs = NativeMlp(gate_up, out), gate_up[0].native.inputs
    same = all(_agree(module, mlp, inputs, dtype, rows) for rows in (3, FEW + 1))
    return mlp if same else None


def _agree(module: nn.Module, part: Any, size: int, dtype: torch.dtype, rows: int = 3) -> bool:
    x = torch.randn(rows, 1, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        try:
            wanted = module(x)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False  # it takes more than its input, as a gated norm does
        found = part(x)
    if not isinstance(wanted, torch.Tensor) or wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    return float((found - wanted).float().norm()) <= _TOLERANCE[dtype] * float(wanted.float().norm())
