"""Attention on the CPU in one native call: all rows of a step, or a chunk with all that is before it.

Each query sees one run of cells, read where they lie: nothing is gathered, repeated or masked, and cells that
no query sees are not touched. A row's bits depend on its own cells alone, not on other rows or threads.
"""

import ctypes

import torch

from regrow.gpu.fast import native
from regrow.gpu.lent import LentLayer

MAX_DIM = 256


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `attend` takes these: bfloat16 or float32 on the CPU, heads of up to 256 side by side."""
    dtype = query.dtype
    return (
        dtype in (torch.bfloat16, torch.float32)
        and dtype == key.dtype == value.dtype
        and query.device.type == "cpu"
        and len(query) == len(key) == len(value)
        and max(query.shape[3], value.shape[3]) <= MAX_DIM
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and native.library() is not None
    )


def native_lent(layer: LentLayer) -> native.Lent:
    """Return what the native kernels are given of a layer, which the caller keeps alive."""
    tensors = layer.keys, layer.values
    cell_0 = (t.data_ptr() - layer.start * t.stride(1) * t.element_size() for t in tensors)
    return native.Lent(*cell_0, *(t.stride()[:2] for t in tensors), layer.start, layer.stop)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: torch.Tensor,
    scale: float | None,
    lent: native.Lent | None = None,
) -> torch.Tensor:
    """Queries [batch, heads, n, dim] over keys [batch, kv_heads, cells, dim]; returns [batch, heads, n,
    value_dim], which lies as [batch, n, heads, value_dim].

    runs: int32 [2, batch, n], side by side; a query sees the cells [runs[0], runs[1]). Where runs[1] is 0 it
    sees none, and its result is zero. lent: cells of a batch of one that all its queries see; they are in key
    and value afterwards. Raises ValueError where any of these do not fit each other.
    """
    batch, heads, n, dim = query.shape
    kv_heads, cells, value_dim = value.shape[1:]
    fit = key.shape == (batch, kv_heads, cells, dim) and len(value) == batch and runs.shape == (2, batch, n)
    out = query.new_empty(batch, n, heads, value_dim)
    if not fit or native.needed().regrow_attention(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        runs.data_ptr(),
        (ctypes.c_int64 * 9)(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        (ctypes.c_int32 * 7)(batch, n, heads, kv_heads, dim, value_dim, cells),
        dim**-0.5 if scale is None else scale,
        query.dtype == torch.bfloat16,
        None if lent is None else ctypes.addressof(lent),
    ):
        shapes = (tuple(x.shape) for x in (query, key, value, runs))
        raise ValueError("queries {}, keys {}, values {} and runs {} do not fit".format(*shapes))
    return out.transpose(1, 2)
