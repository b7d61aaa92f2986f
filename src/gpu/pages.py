"""Memory that is given by the system when it is first written to, page by page, each with a trap of its own:
asked for at once it costs a fraction of that."""

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache

import torch

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


@cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    library = ctypes.CDLL(None)
    if not hasattr(library, "madvise"):
        return None
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library.madvise


def give_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Have the system give the memory under tensors [heads, cells, dim] on the CPU, contiguous within a head,
    before they are written to. Their contents stay; a system that cannot leaves it as it is."""
    madvise = _madvise()
    if madvise is None:
        return
    for tensor in tensors:
        size, stride = tensor[:1].nbytes, tensor.stride(0) * tensor.element_size()
        for head in range(len(tensor) if size else 0):
            start = tensor.data_ptr() + head * stride
            first = start - start % mmap.PAGESIZE
            madvise(first, start + size - first, _POPULATE_WRITE)
