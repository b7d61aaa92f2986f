"""Experts of a decode step, row by row: a product of a vector and a matrix for each expert that a row chose.

The weights are views, nothing is copied, and no row is gathered with another, so that a row's bits cannot
depend on its neighbours. Of the forms that `transformers` has, `batched_mm` copies the weights of each chosen
expert for each row, and the others gather the rows that chose an expert.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

BY_ROW = "regrow_by_row"


def experts_by_row(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """An experts interface of `transformers`, for a CPU: rows [rows, hidden] through the experts [rows, k]
    that they chose, weighted [rows, k]; returns [rows, hidden]."""
    rows, k = top_k_index.shape
    experts: list[int] = top_k_index.flatten().tolist()
    repeated = [row for row in hidden_states.unbind() for _ in range(k)]
    if self.has_gate:
        inner = self._apply_gate(_products(self, "gate_up_proj", experts, repeated))
    else:
        inner = self.act_fn(_products(self, "up_proj", experts, repeated))
    out = _products(self, "down_proj", experts, inner.unbind())
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    weighted = out * top_k_weights.reshape(-1, 1)
    return weighted.view(rows, k, -1).sum(dim=1).to(hidden_states.dtype)


def _products(self: Any, name: str, experts: Sequence[int], vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return each vector times the weight `name` of its expert, plus the bias: [vectors, outputs]."""
    weights = getattr(self, name)
    if self.is_transposed:
        weights = weights.transpose(1, 2)
    out = torch.stack([torch.mv(weights[e], x) for e, x in zip(experts, vectors, strict=True)])
    return out + getattr(self, f"{name}_bias")[experts] if self.has_bias else out


ALL_EXPERTS_FUNCTIONS.register(BY_ROW, experts_by_row)
