"""QSA's indexer (qwen4_exp) for all queries at once: each attends to the blocks of cells that score highest.

A block is a run of `compress_ratio` cells; a query scores the whole blocks that it sees, takes the best, and
sees the cells after the last whole block too. The model's own code does this in a loop over rows and queries.
Here blocks are pooled once a call, and queries that see equally many blocks choose in one call, which chooses
as the loop does, ties included: it is the same operation on the same scores.
"""

import math
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import causal_mask_function

from regrow.gpu.call import Decoding
from regrow.gpu.fast.chosen import Choice, ChosenCells
from regrow.gpu.lazy_mask import LazyMask

_OWN = "Qwen4ExpTextQSAIndexer"
_SCORES = 1 << 22  # float32 scores that are held at once: 16 MiB


def use_fast_indexers(model: nn.Module) -> int:
    """Replace the indexers of `model` in place; return how many there are."""
    indexers = [module for module in model.modules() if type(module).__name__ == _OWN]
    for indexer in indexers:
        indexer.forward = MethodType(_forward, indexer)
    return len(indexers)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    """The interface of the module: returns which cells each query may attend to [batch, 1, n, cells]."""
    if not isinstance(attention_mask, LazyMask) or attention_mask.function is not causal_mask_function:
        stock: torch.Tensor = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, cache
        )
        return stock
    batch, n, _ = hidden_states.shape
    cos, sin = position_embeddings
    sizes = [self.index_n_heads * self.index_head_dim, self.index_kv_heads * self.index_head_dim]
    queries, new = self.index_qk_proj(hidden_states).split(sizes, dim=-1)
    queries = self.q_layernorm(queries.reshape(batch, n, -1, self.index_head_dim))
    queries = _rotated(queries, cos[:, -n:, None], sin[:, -n:, None])
    keys = cache.update_indexer(new, self.layer_idx)
    call = attention_mask.call
    starts = call.lengths if isinstance(call, Decoding) else (int(attention_mask.offset),)
    rows = [
        None if start is None else choose(self, queries[row], keys[row], cos[row], sin[row], start)
        for row, start in enumerate(starts)
    ]
    return ChosenCells.of(attention_mask, rows)


def choose(
    indexer: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: int,
) -> Choice | None:
    """Choose blocks for `queries` [n, heads, dim], the first of them in cell `start`; None where each sees
    no more than it may choose.

    keys: one a cell, as they are stored [cells, dim]. cos, sin: of the cells' positions [cells, rotary].
    """
    size, most, dim = indexer.compress_ratio, indexer.block_topk, indexer.index_head_dim
    n = len(queries)
    blocks = (start + n) // size
    first = max(0, (most + 1) * size - 1 - start)
    if first >= n:
        return None
    ends = blocks * size
    pooled = keys[:ends].view(blocks, size, dim).float().mean(dim=1).to(keys.dtype)
    pooled = _rotated(indexer.k_layernorm(pooled), cos[:ends:size], sin[:ends:size]).float().T
    scaled = math.sqrt(dim)
    chosen = queries.new_empty(n - first, most, dtype=torch.int64)
    piece = max(1, _SCORES // (queries.shape[1] * blocks))
    for a in range(first, n, piece):
        b = min(n, a + piece)
        scores = (queries[a:b].flatten(0, 1).float() @ pooled).relu_().view(b - a, -1, blocks)
        at = a
        while at < b:  # those that see equally many blocks
            seen = (start + at + 1) // size
            end = min(b, (seen + 1) * size - 1 - start)
            totals = scores[at - a : end - a, :, :seen].sum(dim=1) / scaled
            chosen[at - first : end - first] = totals.topk(most).indices
            at = end
    return Choice(start, first, size, chosen.sort(dim=-1).values)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions for the first dimensions of x [..., dim], which cos and sin [..., rotary] have."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1)
