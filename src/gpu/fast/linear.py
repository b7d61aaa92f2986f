"""Linear layers that are fast for a few rows: with weights as they are, or packed.

Rows go through the native kernels, where they do not depend on each other; more than `FEW` of them, where
there is no tile unit, through torch's matrix product, for which packed weights are unpacked for the moment.
Layers that are given the same input (q, k and v; gate and up) are one matrix: the first that is called
computes for all.
"""

import ctypes
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from regrow.gpu.fast import native
from regrow.gpu.fast.native import needed
from regrow.gpu.fast.packing import BLOCK, Codes, floats, tiles

FEW = 32  # rows that the native kernels take anywhere, rounded to 8 bits for packed weights


class Product(Protocol):
    """x [rows, inputs] times a weight, plus its bias: [rows, outputs], in x's type."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @property
    def nbytes(self) -> int: ...


class NativeProduct:
    """Through the native kernels where they take the rows. `native` says what they are given; takes_many:
    more than `FEW` rows, bfloat16, as well.

    kept: the weight, bfloat16 [outputs, inputs] (`bits` 16) or tiles of codes of 4 or 8 bits. With packed
    weights a row of a few is rounded to 8 bits, for each 32 inputs by a scale of its own.
    """

    def __init__(self, kept: torch.Tensor, bits: int, inputs: int, outputs: int, bias: torch.Tensor | None):
        self._library = needed()
        self._kept, self._bias = kept, None if bias is None else bias.float()
        pointer = None if self._bias is None else self._bias.data_ptr()
        self.native = native.Product(kept.data_ptr(), pointer, bits, inputs, outputs)
        self._at = ctypes.addressof(self.native)
        self.takes_many = bool(self._library.regrow_takes_many(self._at))

    @classmethod
    def plain(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> "NativeProduct":
        return cls(weight.contiguous(), 16, weight.shape[1], weight.shape[0], bias)

    @classmethod
    def packed(cls, codes: Codes, bias: torch.Tensor | None) -> "NativeProduct":
        outputs, inputs = codes.codes.shape
        return cls(tiles(codes), codes.bits, inputs, outputs, bias)

    @property
    def nbytes(self) -> int:
        return self._kept.numel() * self._kept.element_size()

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as torch takes it, [outputs, inputs]; a packed one is made anew."""
        if self.native.bits == 16:
            return self._kept
        out = torch.empty(self.native.outputs, self.native.inputs, dtype=dtype)
        self._library.regrow_unpack(self._at, out.data_ptr(), dtype == torch.bfloat16)
        return out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bf16 = x.dtype == torch.bfloat16
        x = x.contiguous()
        y = x.new_empty(len(x), self.native.outputs)
        if len(x) <= FEW and (bf16 or self.native.bits < 16):
            self._library.regrow_linear(self._at, x.data_ptr(), y.data_ptr(), bf16, len(x))
        elif bf16 and self.takes_many:
            self._library.regrow_linear_many(self._at, x.data_ptr(), y.data_ptr(), len(x))
        else:
            return linear(x, self.weight(x.dtype), None if self._bias is None else self._bias.to(x.dtype))
        return y


Kin = tuple[NativeProduct, tuple[str, ...]]  # a product, and the layers that share it, in order


class TorchPackedProduct:
    """With a packed weight through torch's own kernels, where the native ones are missing; bfloat16 only.

    4 bits: the same codes, with scales rounded to bfloat16. 8 bits: one scale for each output.
    """

    def __init__(self, packed: Codes, bias: torch.Tensor | None) -> None:
        self._bias, self._bits = bias, packed.bits
        if packed.bits == 4:
            self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(packed.codes.int(), 1)
            scale, offset = packed.scale.float(), packed.offset.float()
            self._scale = torch.stack([scale.T, (offset + 8 * scale).T], dim=-1).bfloat16().contiguous()
        else:
            weight = floats(packed)
            scale = weight.abs().amax(1).clamp_min(torch.finfo().tiny) / 127
            self._weight = (weight / scale[:, None]).round().to(torch.int8)
            self._scale = scale.bfloat16()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._weight, self._scale))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y: torch.Tensor
        if self._bits == 4:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._weight, BLOCK, self._scale)
        else:
            y = torch.ops.aten._weight_int8pack_mm(x, self._weight, self._scale)
        return y if self._bias is None else y + self._bias


class Shared:
    """One product whose outputs belong to several layers that are called with the same tensor, in turn."""

    def __init__(self, product: Product, layers: int) -> None:
        self._product, self._layers = product, layers
        self._x: torch.Tensor | None = None
        self._y: torch.Tensor | None = None
        self._given = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return all outputs for x [..., inputs]."""
        y = self._y
        if y is None or x is not self._x:
            y = self._product(x.reshape(-1, x.shape[-1]))
            self._x, self._y, self._given = x, y, 0
        self._given += 1
        if self._given == self._layers:
            self._x = self._y = None
        return y.view(*x.shape[:-1], -1)


class FastLinear(nn.Module):
    """In place of a `nn.Linear`: its outputs are those `[start, stop)` of a shared product."""

    def __init__(self, shared: Shared, start: int, stop: int) -> None:
        super().__init__()
        self._shared, self.outputs = shared, slice(start, stop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared(x)[..., self.outputs]
