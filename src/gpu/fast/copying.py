"""Copies of cells by the native kernels."""

import ctypes
from collections.abc import Sequence

import torch

from regrow.gpu.fast import native
from regrow.gpu.kernels.spans import Pair


class _Copy(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("to", "source")),
        *((name, ctypes.c_int64) for name in ("to_stride", "source_stride", "rows", "size")),
    )


def copy_cells(pairs: Sequence[Pair]) -> None:
    """Copy each (target, source), both [heads, cells, dim]: past the caches where both lie on the CPU with
    one dtype, each head contiguous."""
    library = native.library()
    taken = []
    for target, source in pairs:
        if library is None or target.dtype != source.dtype or not (_by_head(target) and _by_head(source)):
            target.copy_(source)
            continue
        heads, cells, dim = target.shape
        width = target.element_size()
        strides = target.stride(0) * width, source.stride(0) * width
        taken.append(_Copy(target.data_ptr(), source.data_ptr(), *strides, heads, cells * dim * width))
    if library is not None and taken:
        library.regrow_copy((_Copy * len(taken))(*taken), len(taken))


def _by_head(tensor: torch.Tensor) -> bool:
    _, cells, dim = tensor.shape
    _, cell, one = tensor.stride()
    return tensor.device.type == "cpu" and (one == 1 or dim <= 1) and (cell == dim or cells <= 1)
