"""Decoder layers in one native call, for one token of each of a few slots, or for a chunk of one.

For layers of the common shape: norm, rotary attention with grouped queries (and norms of queries and keys),
norm, gated SiLU MLP. A layer is taken for one if it has those parts, and if the call gives on random cells
what the layer's own code gives, up to rounding; others stay with that code. A long chunk is taken in bfloat16
where the processor has a tile unit. Layers that follow each other go in one call, unless something is to be
done between the layers of a chunk.
"""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from regrow.gpu.arena import Arenas
from regrow.gpu.call import Decoding
from regrow.gpu.fast import native
from regrow.gpu.fast.attention import native_lent
from regrow.gpu.fast.linear import FEW, Kin, NativeProduct
from regrow.gpu.lazy_mask import LazyMask
from regrow.gpu.lent import LentCells, LentLayer
from regrow.gpu.slot_cache import SlotCache

_PAST = 9  # cells of the trial
_TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # of what a layer adds to its input
_PARTS = {
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
_QUERY_NORM, _KEY_NORM = "self_attn.q_norm", "self_attn.k_norm"
_Strides = ctypes.c_int64 * 3


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, native.Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, native.Norm) for name in ("before", "after", "query", "key")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "dim", "rotary")),
        ("scale", ctypes.c_float),
    )


class _Cells(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_strides", _Strides),
        ("value_strides", _Strides),
        ("lent", native.Lent),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "out", "cos", "sin", "cells", "runs")),
        *((name, ctypes.c_int32) for name in ("first", "slots", "tokens", "context", "is_bf16")),
    )


@dataclass(frozen=True, slots=True)
class Products:
    """The products of a layer's linear layers."""

    qkv: NativeProduct
    out: NativeProduct
    gate_up: NativeProduct
    down: NativeProduct


class NativeLayer:
    """What the native call of one layer is given. Raises AttributeError where `layer` lacks a part."""

    def __init__(self, layer: nn.Module, products: Products, rotary: int) -> None:
        attention: Any = layer.self_attn
        dim = int(attention.head_dim)
        self._kept: list[torch.Tensor] = []  # what the structure points to
        self._products = products
        self.takes_many = all(
            p.takes_many for p in (products.qkv, products.out, products.gate_up, products.down)
        )
        outputs, heads = products.qkv.native.outputs, products.out.native.inputs // dim
        self._layer = _Layer(
            *(p.native for p in (products.qkv, products.out, products.gate_up, products.down)),
            *(
                self._norm(layer.get_submodule(name) if name in _submodules(layer) else None)
                for name in ("input_layernorm", "post_attention_layernorm", _QUERY_NORM, _KEY_NORM)
            ),
            heads,
            (outputs // dim - heads) // 2,
            dim,
            rotary,
            float(attention.scaling),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._layer)

    @property
    def kv_heads(self) -> int:
        return int(self._layer.kv_heads)

    @property
    def dim(self) -> int:
        return int(self._layer.dim)

    @property
    def rotary(self) -> int:
        return int(self._layer.rotary)

    def _norm(self, module: nn.Module | None) -> native.Norm:
        if module is None:
            return native.Norm(None, 0.0, 1)
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        self._kept.append(weight.detach().float().contiguous())
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
        return native.Norm(self._kept[-1].data_ptr(), float(epsilon), 1)


class NativeLayers:
    """Layers that follow each other, in one call."""

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        self._library = native.needed()
        self._layers = layers
        self._pointers = (ctypes.c_void_p * len(layers))(*(layer.address for layer in layers))
        self._cells = (_Cells * len(layers))()
        self._call = _Call()
        self._at = ctypes.addressof(self._call)

    def store_in(self, arenas: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keys and values go to these arenas [slots, kv_heads, cells, dim] from now on, a pair a layer; the
        caller keeps them alive."""
        for cells, (keys, values) in zip(self._cells, arenas, strict=True):
            cells.keys, cells.values = keys.data_ptr(), values.data_ptr()
            cells.key_strides[:], cells.value_strides[:] = keys.stride()[:3], values.stride()[:3]
        self._call.context = arenas[0][0].shape[2]

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        first: int,
        cells: torch.Tensor,
        runs: torch.Tensor,
        lent: Sequence[LentLayer | None] = (),
    ) -> torch.Tensor:
        """Hidden states [slots, n, size], cos and sin [slots, n, rotary], slots from `first` on; cells int64
        [slots, n]: where each token's own goes; runs int32 [2, slots, n]: what it sees. lent: what each layer
        is lent, of the only slot there is; it is in the arenas afterwards."""
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        out, call = torch.empty_like(hidden), self._call
        call.hidden, call.out = hidden.data_ptr(), out.data_ptr()
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        call.cells, call.runs = cells.data_ptr(), runs.data_ptr()
        call.first, (call.slots, call.tokens) = first, hidden.shape[:2]
        call.is_bf16 = hidden.dtype == torch.bfloat16
        for kept, layer in zip(self._cells, lent, strict=False):
            kept.lent = native.Lent() if layer is None else native_lent(layer)
        refused = self._library.regrow_layers(self._pointers, self._cells, len(self._layers), self._at)
        for kept, _ in zip(self._cells, lent, strict=False):
            kept.lent.stop = 0
        if refused:
            raise ValueError("a token sees cells that its arena does not have")
        return out


class _Run:
    """Layers that follow each other, by their indices, on the arenas that they were last called with."""

    def __init__(self, layers: Mapping[int, NativeLayer]) -> None:
        self._indices, self._layers = list(layers), NativeLayers(list(layers.values()))
        self._arenas: Callable[[], Arenas | None] = lambda: None

    def __len__(self) -> int:
        return len(self._indices)

    def __call__(
        self,
        hidden: torch.Tensor,
        embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
        runs: torch.Tensor,
    ) -> torch.Tensor:
        call, arenas = cache.call, cache.arenas
        lent: Sequence[LentLayer | None] = ()
        if self._arenas() is not arenas:
            self._layers.store_in([(arenas.cells[i, "k"], arenas.cells[i, "v"]) for i in self._indices])
            self._arenas = weakref.ref(arenas)
        if isinstance(call, Decoding):
            first, cells = call.first, call.cells
            call.updates += len(self)
            call.intact += len(self)
        else:
            first, cells = call.slot, torch.arange(call.start, call.end)
            if call.lent is not None:
                lent = self._take(call.lent, runs)
        return self._layers(hidden, *embeddings, first, cells, runs, lent)

    def _take(self, lent: LentCells, runs: torch.Tensor) -> Sequence[LentLayer | None]:
        """Return what each layer is lent, where every token sees all of it; else have it copied."""
        if not runs[0].any():
            return [lent.take(index) for index in self._indices]
        for index in self._indices:
            lent.settle(index)
        return ()


class NativeOrStock:
    """A layer's forward: the native call for decode steps and chunks, the model's own code for the rest.

    The first layer of a run computes for all of it; the others hand on what they are given.
    """

    def __init__(self, stock: Any, layer: NativeLayer, index: int) -> None:
        self._stock, self._layer, self.index = stock, layer, index
        self.takes_many = layer.takes_many
        self._alone = self._run = _Run({index: layer})
        self._head = self
        self._ran: tuple[Any, ...] = ()  # the call, the mask and the result of the run's last computation

    @classmethod
    def join(cls, members: Sequence["NativeOrStock"]) -> None:
        """Let these be computed in one call."""
        members[0]._run = _Run({member.index: member._layer for member in members})
        for member in members:
            member._head = members[0]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache, mask = kwargs.get("cache"), kwargs.get("attention_mask")
        if not isinstance(cache, SlotCache) or not isinstance(mask, LazyMask) or args:
            return self._stock(hidden_states, *args, **kwargs)
        call, head = cache.call, self._head
        if head is not self and head._ran and head._ran[0] is call and head._ran[2] is hidden_states:
            if head._ran[1] is not mask:
                raise RuntimeError("layers that were taken for one run have masks of their own")
            return hidden_states
        if isinstance(call, Decoding):
            runs, together = _step_runs(call, mask), head is self
        else:
            runs = self._chunk_runs(hidden_states, mask)
            together = head is self and call.between is None
        if runs is None or (self.index, "k") not in cache.arenas.cells:  # which probing has yet to find
            return self._stock(hidden_states, **kwargs)
        cache.come_to(self.index)
        run = self._run if together else self._alone
        out = run(hidden_states, kwargs["position_embeddings"], cache, runs)
        self._ran = (call, mask, out) if together else ()
        return out

    def _chunk_runs(self, hidden: torch.Tensor, mask: LazyMask) -> torch.Tensor | None:
        """Return the cells that a chunk's tokens see, None where the layer is not to take it."""
        few = hidden.shape[1] <= FEW
        if hidden.dtype != torch.bfloat16 or not (few or self._layer.takes_many):
            return None
        return mask.chunk_runs()


def reading_layers(model: PreTrainedModel) -> set[int]:
    """Return the layers that take chunks of any length natively."""
    forwards = (getattr(m, "forward", None) for m in model.modules())
    return {f.index for f in forwards if isinstance(f, NativeOrStock) and f.takes_many}


def _step_runs(call: Decoding, mask: LazyMask) -> torch.Tensor | None:
    """Return the cells that the rows of a step see, None where those of one are not a run."""
    starts = mask.row_starts(call.lengths)
    if len(starts) > FEW or any(
        s is None and n is not None for s, n in zip(starts, call.lengths, strict=True)
    ):
        return None
    return mask.row_runs(call.lengths)


def use_native_layers(model: PreTrainedModel, products: Mapping[str, Kin]) -> int:
    """Let the layers of `model` that can run natively do so; return how many.

    products: those of the linear layers, by name.
    """
    runs: list[list[NativeOrStock]] = []
    last: tuple[Any, ...] = (None,) * 4
    for name, (hidden, kwargs, out) in _calls(model).items():
        layer = model.get_submodule(name)
        own = _products(name, products)
        attention = getattr(layer, "self_attn", None)
        index, window = (getattr(attention, field, None) for field in ("layer_idx", "sliding_window"))
        embeddings = kwargs.get("position_embeddings")
        if own is None or index is None or not isinstance(embeddings, tuple):
            continue
        fast = NativeLayer(layer, own, embeddings[0].shape[-1])
        chunks = fast.takes_many and hidden.dtype == torch.bfloat16
        step = hidden[:, -1:], embeddings[0][:, -1:], embeddings[1][:, -1:]
        trials = ((*step, _PAST), (hidden, *embeddings, 0))[: 1 + chunks]
        if fast.rotary > fast.dim or not all(_agree(layer, fast, *trial) for trial in trials):
            continue
        taken = NativeOrStock(layer.forward, fast, index)
        layer.forward = taken
        same = embeddings, kwargs.get("attention_mask"), window
        if all(a is b for a, b in zip(last, (hidden, *same), strict=True)):
            runs[-1].append(taken)
        else:
            runs.append([taken])
        last = (out, *same)
    for run in runs:
        NativeOrStock.join(run)
    return sum(map(len, runs))


def _is_common(layer: nn.Module) -> bool:
    parts = _submodules(layer) if hasattr(layer, "self_attn") else set()
    return _PARTS <= parts <= {*_PARTS, _QUERY_NORM, _KEY_NORM}


def _submodules(layer: nn.Module) -> set[str]:
    """Return the names of the parts of a layer that have weights of their own or are products."""
    return {
        name
        for name, part in layer.named_modules()
        if name and not list(part.children()) and (list(part.parameters(False)) or name in _PARTS)
    }


def _calls(model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, dict[str, Any], Any]]:
    """Return what the layers of the common shape are called with and what they give, by name, for more than
    `FEW` tokens."""
    seen: dict[str, tuple[torch.Tensor, dict[str, Any], Any]] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            seen[name] = args[0], kwargs, out

        return hook

    layers = {name: m for name, m in model.named_modules() if _is_common(m)}
    hooks = [m.register_forward_hook(note(name), with_kwargs=True) for name, m in layers.items()]
    if hooks:
        with torch.inference_mode():
            model(input_ids=torch.arange(FEW + 1)[None] % 3 + 1, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: call for name, call in seen.items() if isinstance(call[0], torch.Tensor)}


def _products(name: str, products: Mapping[str, Kin]) -> Products | None:
    groups = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    )
    found = []
    for group in groups:
        names = tuple(f"{name}.{part}" for part in group)
        product, shared = products.get(names[0], (None, ()))
        if product is None or shared != names:
            return None
        found.append(product)
    return Products(*found)


class _Past:
    """A cache for a trial: what is stored goes behind given keys and values."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        return self.keys, self.values


def _agree(
    layer: nn.Module, fast: NativeLayer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: int
) -> bool:
    """Whether the native layer gives and stores what the model's own code does, with `past` cells before."""
    draw = torch.Generator().manual_seed(0)
    n = hidden.shape[1]
    shape = (1, fast.kv_heads, past, fast.dim)
    keys, values = (torch.randn(shape, generator=draw).to(hidden.dtype) for _ in range(2))
    stored = _Past(keys, values)
    arenas = [
        torch.cat([cells, cells.new_zeros(1, fast.kv_heads, n, fast.dim)], 2) for cells in (keys, values)
    ]
    cells = torch.arange(past, past + n)
    runs = torch.stack([torch.zeros_like(cells), cells + 1]).int()[:, None]
    with torch.inference_mode():
        try:
            wanted = layer(hidden, attention_mask=None, position_embeddings=(cos, sin), cache=stored)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False
        alone = NativeLayers([fast])
        alone.store_in([(arenas[0], arenas[1])])
        found = alone(hidden, cos, sin, 0, cells, runs)
    if not isinstance(wanted, torch.Tensor) or wanted.shape != found.shape:
        return False
    pairs = ((found - hidden, wanted - hidden), (arenas[0], stored.keys), (arenas[1], stored.values))
    most = _TOLERANCE[hidden.dtype]
    return all(float((a - b).float().norm()) <= most * float(b.float().norm()) for a, b in pairs)
