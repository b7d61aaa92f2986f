"""What a model of a configuration would keep, found without weights or memory: the probe's first read, run on
tensors that have shapes and no contents."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from regrow.gpu.call import Reading
from regrow.gpu.probe import GrowingArenas
from regrow.gpu.slot_cache import SlotCache
from regrow.gpu.types import Geometry

_TOKENS = 8


class _AllNonzero(TorchDispatchMode):
    """Answers what only contents could tell: every element is nonzero."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.nonzero.default:
            (tensor,) = args
            return tensor.new_zeros(tensor.numel(), tensor.ndim, dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def outline(config: PreTrainedConfig, dtype: torch.dtype) -> Geometry:
    """Return what the layers of a model of `config` in `dtype` keep."""
    meta = torch.device("meta")
    with torch.inference_mode(), meta:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")
        arenas = GrowingArenas(1, _TOKENS, meta)
        cache = SlotCache(arenas, config.get_text_config(decoder=True).num_hidden_layers)
        cache.begin(Reading(0, 0, _TOKENS))
        positions = torch.arange(_TOKENS)[None]
        with _AllNonzero():
            model(input_ids=positions, position_ids=positions, cache=cache, use_cache=True)
    return arenas.geometry
