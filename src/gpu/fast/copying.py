"""Copies of cells by the native kernels."""

import torch

from regrow.gpu.fast import native


def copy_cells(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target`, both [heads, cells, dim]: past the caches where both lie on the CPU with one
    dtype, each head contiguous."""
    library = native.library()
    if library is None or target.dtype != source.dtype or not (_by_head(target) and _by_head(source)):
        target.copy_(source)
        return
    library.regrow_copy(
        *(tensor.data_ptr() for tensor in (target, source)),
        *(tensor.stride(0) * tensor.element_size() for tensor in (target, source)),
        len(target),
        target[:1].nbytes,
    )


def _by_head(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor[0].is_contiguous()
