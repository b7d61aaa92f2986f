"""One forward pass of a `transformers` model over a slot cache."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from regrow.errors import ModelRefused
from regrow.gpu.attention import NAME
from regrow.gpu.call import Call, Decoding
from regrow.gpu.fast.experts import BY_ROW
from regrow.gpu.fast.indexer import use_fast_indexers
from regrow.gpu.fast.stock import left_stock
from regrow.gpu.slot_cache import SlotCache

_READING_EXPERTS = "grouped_mm"
_DECODING_EXPERTS = BY_ROW
_STOCK_DECODING_EXPERTS = "batched_mm"


class SlotModel:
    """A model made ready for slot arenas, and its only way in.

    Attention goes through `gpu/attention.py`, an indexer through `gpu/fast/indexer.py`. Experts run row by
    row in decode steps (`gpu/fast/experts.py`; on a GPU as `batched_mm`), so that rows do not depend on each
    other; reading takes `grouped_mm`, which does not copy weights per token.
    Raises ModelRefused for a model whose attention cannot be replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.device
        model.eval()
        model.set_attn_implementation(NAME)
        if self.config._attn_implementation != NAME:
            raise ModelRefused(f"{type(model).__name__} has an attention of its own that cannot be replaced")
        if not left_stock("indexer"):
            use_fast_indexers(model)
        self._has_experts = model._can_set_experts_implementation()
        self._experts = ""
        by_row = self.device.type == "cpu" and not left_stock("experts")
        self._decoding_experts = _DECODING_EXPERTS if by_row else _STOCK_DECODING_EXPERTS
        self._pass: str | None = None  # how the experts of the pass under way run
        self._keeps_some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self,
        cache: SlotCache,
        call: Call,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        every: bool = False,
    ) -> torch.Tensor:
        """Run `tokens`, ids [batch, n] or embeddings [batch, n, hidden], at `positions` [batch, n].

        Returns the logits [batch, vocab] of each row's last token, or [batch, n, vocab] of `every` one.
        """
        name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
        keep: dict[str, Any] = {}
        if self._keeps_some_logits and not every:
            # An index, since torch copies the whole head to multiply it by what a slice of a chunk is.
            n = tokens.shape[1]
            keep["logits_to_keep"] = 1 if n == 1 else torch.tensor([n - 1], device=self.device)
        with self._experts_for(call):
            cache.begin(call)
            out = self._model(**{name: tokens}, position_ids=positions, cache=cache, use_cache=True, **keep)
        logits: torch.Tensor = out.logits
        return logits if every else logits[:, -1]

    @contextmanager
    def _experts_for(self, call: Call) -> Iterator[None]:
        """Have the experts run as `call` needs it, and afterwards as the pass does between whose layers this
        one runs."""
        experts = self._decoding_experts if isinstance(call, Decoding) else _READING_EXPERTS
        outer, self._pass = self._pass, experts
        self._use_experts(self._pass)
        try:
            yield
        finally:
            self._pass = outer
            if outer is not None:
                self._use_experts(outer)

    def _use_experts(self, experts: str) -> None:
        if self._has_experts and experts != self._experts:
            self._model.set_experts_implementation(experts)
            self._experts = experts
