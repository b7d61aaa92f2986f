"""Weights packed into codes of 4 or 8 bits: for each 32 inputs of an output a scale and an offset in float16.

w = scale * code + offset. GGUF's Q4_0, Q4_1 and Q8_0 blocks say the same, so their weights are kept without
loss; others are rounded by `quantize`. The native kernels read `tiles` of them (`native/tiles.h`).
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from regrow.gpu.fast.native import library, needed

Bits = Literal[4, 8]
BLOCK = 32  # inputs that share a scale
OUTPUTS = 16  # of a tile


class Codes(Protocol):
    """A weight matrix [outputs, inputs] as codes, uint8 [outputs, inputs]; scale and offset are float16
    [outputs, inputs / 32]."""

    @property
    def bits(self) -> Bits: ...
    @property
    def codes(self) -> torch.Tensor: ...
    @property
    def scale(self) -> torch.Tensor: ...
    @property
    def offset(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Quantized:
    """What `quantize` gives; see `Codes`."""

    bits: Bits
    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor


def quantize(weight: torch.Tensor, bits: Bits) -> Quantized:
    """Round a weight [outputs, inputs], bfloat16 or float32, to codes; inputs is a multiple of 32.

    8 bits are symmetric about 0. 4 bits span the least to the greatest weight of a block, or a little less
    where that has the smaller squared error; without the native kernels always to the greatest.
    """
    if library() is None:
        return _quantize(weight, bits)
    weight, (outputs, inputs) = weight.contiguous(), weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scale, offset = (torch.empty(outputs, inputs // BLOCK, dtype=torch.float16) for _ in range(2))
    needed().regrow_quantize(
        weight.data_ptr(),
        int(weight.dtype == torch.bfloat16),
        bits,
        outputs,
        inputs,
        *(t.data_ptr() for t in (codes, scale, offset)),
    )
    return Quantized(bits, codes, scale, offset)


def tiles(packed: Codes) -> torch.Tensor:
    """Return uint8 [outputs / 16 rounded up, inputs / 32, bytes of a block]; the last tile is padded. Needs
    the native kernels."""
    outputs, inputs = packed.codes.shape
    size = OUTPUTS * BLOCK * packed.bits // 8 + 2 * OUTPUTS * 2
    out = torch.empty(-(-outputs // OUTPUTS), inputs // BLOCK, size, dtype=torch.uint8)
    given = [t.contiguous() for t in (packed.codes, packed.scale, packed.offset)]
    needed().regrow_tile(*(t.data_ptr() for t in given), packed.bits, outputs, inputs, out.data_ptr())
    return out


def floats(packed: Codes) -> torch.Tensor:
    """Return the weights that the codes stand for, float32 [outputs, inputs]."""
    codes = packed.codes.view(packed.codes.shape[0], -1, BLOCK).float()
    return (codes * packed.scale.float()[..., None] + packed.offset.float()[..., None]).flatten(1)


def _quantize(weight: torch.Tensor, bits: Bits) -> Quantized:
    groups = weight.float().reshape(weight.shape[0], -1, BLOCK)
    low, high = groups.aminmax(dim=-1)
    if bits == 8:
        scale = (torch.maximum(-low, high) / 127).half()
        offset = -128 * scale
    else:
        scale, offset = ((high - low) / 15).half(), low.half()
    by, plus = scale.float()[..., None], offset.float()[..., None]
    codes = ((groups - plus) / torch.where(by == 0, 1.0, by)).round().clamp(0, 2**bits - 1)
    return Quantized(bits, codes.to(torch.uint8).flatten(1), scale, offset)
