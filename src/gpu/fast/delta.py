"""A gated delta net in one native call, for one token of each of a few rows.

Its states are changed where they lie in the arenas: nothing is copied. A module is taken for one if it has
the parts, and if the call gives, and leaves of random states, what its own code does, up to rounding;
others, and all reading, stay with that code.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from regrow.gpu.arena import StateKey
from regrow.gpu.call import Decoding
from regrow.gpu.fast import native
from regrow.gpu.fast.linear import FEW, Kin
from regrow.gpu.slot_cache import SlotCache

MAX_HEAD = 256
_PARTS = (
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "conv1d",
    "norm",
    "A_log",
    "dt_bias",
)
_TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 0.01}


class _Delta(ctypes.Structure):
    _fields_ = (
        ("into", native.Product),
        ("out", native.Product),
        ("norm", native.Norm),
        *((name, ctypes.c_void_p) for name in ("rates", "convolution", "decay", "bias")),
        *((name, ctypes.c_int32) for name in ("k_heads", "v_heads", "k_dim", "v_dim", "width")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "out", "columns", "state")),
        ("columns_stride", ctypes.c_int64),
        ("state_stride", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
    )


class NativeDelta:
    """What the native call of one module is given.

    rates: the weights of beta and of the decay, float32 [2 x v_heads, inputs].
    """

    def __init__(self, module: Any, into: Kin, out: Kin, rates: torch.Tensor) -> None:
        convolution = module.conv1d.weight.detach().float().squeeze(1).contiguous()
        decay, bias = -module.A_log.detach().float().exp(), module.dt_bias.detach().float().contiguous()
        weight = module.norm.weight.detach().float().contiguous()
        self.width, self.channels = convolution.shape[1], convolution.shape[0]
        self.state_shape = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
        self._kept = into, out, rates.contiguous(), convolution, decay, bias, weight
        self._delta = _Delta(
            into[0].native,
            out[0].native,
            native.Norm(weight.data_ptr(), module.norm.variance_epsilon, 1),
            *(tensor.data_ptr() for tensor in self._kept[2:6]),
            module.num_k_heads,
            *self.state_shape,
            self.width,
        )
        self._step = _Step()
        self._at = ctypes.addressof(self._delta), ctypes.addressof(self._step)
        self._library = native.needed()

    def serves(self, hidden: torch.Tensor, columns: torch.Tensor, state: torch.Tensor) -> bool:
        return (
            len(hidden) <= FEW
            and columns.dtype == hidden.dtype
            and state.dtype == torch.float32
            and columns.shape[1:] == (self.channels, self.width)
            and state.shape[1:] == self.state_shape
            and columns[0].is_contiguous()
            and state[0].is_contiguous()
        )

    def __call__(self, hidden: torch.Tensor, columns: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, 1, size]; the rows' states are changed: columns [rows, channels, width], state
        float32 [rows, v_heads, k_dim, v_dim]."""
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        step = self._step
        step.hidden, step.out = hidden.data_ptr(), out.data_ptr()
        step.columns, step.state = columns.data_ptr(), state.data_ptr()
        step.columns_stride, step.state_stride = columns.stride(0), state.stride(0)
        step.rows, step.is_bf16 = len(hidden), hidden.dtype == torch.bfloat16
        self._library.regrow_delta(*self._at)
        return out


class StepOrStock:
    """A module's forward: the native call for decode steps, the module's own code for everything else."""

    def __init__(self, stock: Callable[..., Any], delta: NativeDelta, layer: int) -> None:
        self._stock, self._delta = stock, delta
        self._columns: StateKey = (layer, "conv", 0)
        self._state: StateKey = (layer, "recurrent", 0)

    def __call__(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
        if isinstance(cache, SlotCache) and isinstance(cache.call, Decoding):
            rows = cache.call.rows
            columns, state = cache.arenas.decode[self._columns][rows], cache.arenas.decode[self._state][rows]
            if self._delta.serves(hidden_states, columns, state):
                return self._delta(hidden_states, columns, state)
        return self._stock(hidden_states, cache=cache, **kwargs)


def use_native_deltas(model: nn.Module, products: Mapping[str, Kin], dtype: torch.dtype) -> int:
    """Let the gated delta nets of `model` that can run natively in decode steps do so; return how many.

    products: those of the linear layers, by name. dtype: of the hidden states.
    """
    found = 0
    for name, module in model.named_modules():
        if not all(hasattr(module, part) for part in _PARTS):
            continue
        into, out = products.get(f"{name}.in_proj_qkv"), products.get(f"{name}.out_proj")
        if into is None or out is None or into[1][:2] != (f"{name}.in_proj_qkv", f"{name}.in_proj_z"):
            continue
        if max(module.head_k_dim, module.head_v_dim) > MAX_HEAD or module.conv1d.bias is not None:
            continue
        rates = torch.cat([_weight(module, name, part, products) for part in ("in_proj_b", "in_proj_a")])
        delta = NativeDelta(module, into, out, rates)
        if _agree(module, delta, into[0].native.inputs, dtype):
            module.forward = StepOrStock(module.forward, delta, module.layer_idx)
            found += 1
    return found


def _weight(module: nn.Module, name: str, part: str, products: Mapping[str, Kin]) -> torch.Tensor:
    """Return the weight of a linear layer, float32, from its product or from itself."""
    product, _ = products.get(f"{name}.{part}", (None, ()))
    layer: Any = module.get_submodule(part)
    if product is None:
        weight: torch.Tensor = layer.weight.detach().float()
        return weight
    return product.weight(torch.float32)[layer.outputs].float()


class _States:
    """A cache for a trial: it has given states, and keeps what becomes of them."""

    def __init__(self, columns: torch.Tensor, state: torch.Tensor) -> None:
        self.columns, self.state = columns, state

    def get_conv_state(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.columns

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.state

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.state = state
        return state

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return True

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False


def _agree(module: Any, delta: NativeDelta, size: int, dtype: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 1, size, generator=draw).to(dtype)
    columns = torch.randn(2, delta.channels, delta.width, generator=draw).to(dtype)
    state = torch.randn(2, *delta.state_shape, generator=draw)
    own = _States(columns.clone(), state.clone())
    with torch.inference_mode():
        try:
            wanted = module(hidden, cache=own)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False
        found = delta(hidden, columns, state)
    if not isinstance(wanted, torch.Tensor) or wanted.shape != found.shape:
        return False
    pairs = ((found, wanted), (columns, own.columns), (state, own.state))
    return all(float((a - b).float().norm()) <= _TOLERANCE[dtype] * float(b.float().norm()) for a, b in pairs)
