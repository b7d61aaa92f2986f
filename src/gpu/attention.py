"""Attention over slot arenas, registered with `transformers` under one name for attention and masks alike.

A query mostly sees one run of cells. Then, on the CPU, `gpu/fast/attention.py` does a chunk, or all rows of a
step, in one call. Otherwise torch does it in two forms. `attend_chunk` serves reading: one slot, a chunk of
queries over the cells [0, start + n). `attend_row` serves decoding: one token of one row over exactly its own
cells, an arena view; a step loops over its rows, since batched attention makes a row's bits depend on its
number and on the longest row.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regrow.gpu.call import Decoding, marked
from regrow.gpu.fast import attention as fast
from regrow.gpu.fast.chosen import ChosenCells, attend_chosen
from regrow.gpu.lazy_mask import LazyMask, lazy_mask

NAME = "regrow"

_WITHOUT_EFFECT = {  # here: no training, and a sliding window is in the mask
    "dropout",
    "output_attentions",
    "output_router_logits",
    "position_ids",
    "sliding_window",
    "use_cache",
}


def attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Queries [b, heads, n, dim] over keys [b, kv_heads, cells, dim]; returns [b, heads, n, value_dim].

    mask: boolean [b, 1 or heads, n, cells]; None means causal from cell 0. A fresh chunk needs no dense mask.
    """
    n, cells = query.shape[2], key.shape[2]
    if isinstance(mask, LazyMask):
        runs = mask.chunk_runs() if fast.serves(query, key, value) else None
        if runs is not None:
            return fast.attend(query, key, value, runs, scale)
        mask = None if mask.is_plain_causal() else mask.dense()
    if mask is None and n != cells:
        raise NotImplementedError("a chunk with a past came without a mask")
    return scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """One query [1, heads, 1, dim] over keys [1, kv_heads, cells, dim]; returns [1, heads, 1, value_dim].

    The heads that share a key head become its queries, so that no key is repeated.
    """
    if mask is None and fast.serves(query, key, value):
        every = torch.tensor([[[0]], [[key.shape[2]]]], dtype=torch.int32)
        return fast.attend(query, key, value, every, scale)
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = (1, kv_heads, heads // kv_heads, -1)
    if mask is not None and mask.shape[1] != 1:
        mask = mask.reshape(grouped)
    out = scaled_dot_product_attention(query.reshape(grouped), key, value, mask, scale=scale)
    return out.reshape(1, heads, 1, -1)


def _attend_rows(
    call: Decoding,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    lazy = mask if isinstance(mask, LazyMask) else None
    starts = [0] * len(query) if lazy is None else lazy.row_starts(call.lengths)
    left = list(range(len(query)))
    if lazy is not None and fast.serves(query, key, value):
        out = fast.attend(query, key, value, lazy.row_runs(call.lengths), scale)
        left = [i for i in left if starts[i] is None]
    else:
        out = query.new_zeros(*query.shape[:3], value.shape[3])  # idle rows stay zero
    for i in left:
        length, start = call.lengths[i], starts[i]
        if length is None:
            continue
        row_mask = mask if lazy is None or start is None else None
        cells = slice(start or 0, length + 1)
        out[i] = attend_row(
            query[i : i + 1],
            key[i : i + 1, :, cells],
            value[i : i + 1, :, cells],
            None if row_mask is None else row_mask[i : i + 1, ..., cells],
            scale,
        )[0]
    return out


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention interface of `transformers`: returns ([batch, n, heads, value_dim], no weights).

    indices: int [batch, n, k], the only cells that each query may attend to (sparse attention).
    Raises NotImplementedError for what it would otherwise leave out silently.
    """
    left_out = [name for name, value in kwargs.items() if value is not None and name not in _WITHOUT_EFFECT]
    if left_out or is_causal is False:
        raise NotImplementedError(f"attention with {', '.join(left_out) or 'is_causal=False'} is not served")
    if indices is not None:
        assert attention_mask is not None
        chosen = torch.zeros_like(attention_mask, dtype=torch.bool)
        attention_mask = attention_mask & chosen.scatter_(-1, indices[:, None].long(), True)
    intact = marked(key) is not None and marked(value) is not None
    call = marked(key) or (attention_mask.call if isinstance(attention_mask, LazyMask) else None)
    if call is not None:
        call.intact += intact
        call.changed += not intact
    if isinstance(attention_mask, ChosenCells):
        out = attend_chosen(query, key, value, attention_mask, scaling, attend_chunk, attend_row)
    elif call is None:
        out = attend_chunk(query, key, value, attention_mask, scaling)
    else:
        out = _attend_rows(call, query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lazy_mask)
