"""The `transformers` cache whose layers are views of the slot arenas.

One generic layer answers every cache call of every kind of layer; what it keeps was found by probing. In a
read the batch is one slot on its rest row; in a decode step row i is slot i on its decode row. State getters
return views, since some models update a state in place and never hand it back. A fresh read (start 0) is
told that there is no state, so that the model's own first call makes the initial one.
"""

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from regrow.gpu.arena import Arenas, StateKey
from regrow.gpu.call import Call, Decoding, Reading, mark
from regrow.gpu.types import StateKind


class SlotLayer:
    """What one model layer keeps: cells by name, running state by (kind, index)."""

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: "SlotCache", index: int) -> None:
        self._cache = cache
        self._index = index

    def __reduce__(self) -> str:
        raise NotImplementedError("layers of the cache are views of the arenas and cannot be copied")

    def write_cells(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """Store cells `new` [batch, heads, n, dim] and return all cells up to the longest row's end."""
        call = self._cache.entered(self._index)
        arena = self._cache.arenas.cell_arena((self._index, name), new)
        if isinstance(call, Reading):
            arena[call.slot, :, call.start : call.end] = new[0]
        else:
            arena[call.slots, :, call.cells] = new[:, :, 0]
        return arena[_rows(call), :, : call.end]

    def past_cells(self, name: str) -> torch.Tensor | None:
        """Return the cells before this call's own; None where there are none."""
        call = self._cache.entered(self._index)
        arena = self._cache.arenas.cells.get((self._index, name))
        past = call.start if isinstance(call, Reading) else call.end - 1
        return None if arena is None or past == 0 else arena[_rows(call), :, :past]

    def state(self, kind: StateKind, index: int) -> torch.Tensor | None:
        """Return the rows' running state as a view, None where a fresh read has not made it yet."""
        call = self._cache.entered(self._index)
        key: StateKey = (self._index, kind, index)
        if isinstance(call, Decoding):
            arena = self._cache.arenas.decode.get(key)
        elif call.start == 0 and key not in self._cache.made:
            arena = None
        else:
            arena = self._cache.arenas.rest.get(key)
        return None if arena is None else arena[_rows(call)]

    def make_state(self, kind: StateKind, index: int, like: torch.Tensor, size: int | None) -> torch.Tensor:
        """Return the rows' running state as a view to be written."""
        self._cache.entered(self._index)
        key: StateKey = (self._index, kind, index)
        self._cache.arenas.ensure_state(key, like, size)
        self._cache.made.add(key)
        view = self.state(kind, index)
        assert view is not None
        return view

    def update_conv_state(self, new: torch.Tensor, index: int, kernel: int | None) -> torch.Tensor:
        """Append the columns `new` [batch, channels, n]; keep the last `kernel`; return old and new ones."""
        old = self.state("conv", index)
        kept = self.make_state("conv", index, new, kernel)
        width = kept.shape[-1]
        full = pad(new, (max(0, width - new.shape[-1]), 0)) if old is None else torch.cat([old, new], dim=-1)
        kept.copy_(full[..., -width:])
        return full

    def update_recurrent_state(self, new: torch.Tensor, index: int) -> torch.Tensor:
        """Replace the state by `new` [batch, ...]."""
        return self.make_state("recurrent", index, new, None).copy_(new)

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """The positions [kinds, batch, cells] that an indexed model keeps beside its cells."""
        past = self.past_cells("positions")
        return None if past is None else past[..., 0].transpose(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        call = self._cache.call
        n = call.n if isinstance(call, Reading) else 1
        self.write_cells("positions", positions[..., -n:].transpose(0, 1).unsqueeze(-1))


class SlotCache(Cache):
    """A cache over `arenas` for a model of `layers` layers; `begin` says what the next forward pass does."""

    is_compileable = False

    def __init__(self, arenas: Arenas, layers: int) -> None:
        super().__init__(layers=[SlotLayer(self, i) for i in range(layers)])
        self.arenas = arenas
        self.made: set[StateKey] = set()  # states that this fresh read has made
        self.call: Call = Reading(0, 0, 0)
        self._layer: int | None = None  # whose cells or states the pass came to last

    def begin(self, call: Call) -> None:
        self.call = call
        self.made.clear()
        self._layer = None

    def entered(self, layer: int) -> Call:
        """Return the call, for the cells or states of `layer`, which are all there; what is to be done
        between two layers is done first."""
        self.come_to(layer)
        if isinstance(self.call, Reading) and self.call.lent is not None:
            self.call.lent.settle(layer)
        return self.call

    def come_to(self, layer: int) -> None:
        """Do what is to be done between two layers; cells that are lent to `layer` stay where they lie."""
        if layer != self._layer:
            self._layer = layer
            if isinstance(self.call, Reading) and self.call.between is not None:
                self.call.between()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        keys, values = layer.write_cells("k", key_states), layer.write_cells("v", value_states)
        if isinstance(self.call, Decoding):
            self.call.updates += 1
            mark(keys, self.call)
            mark(values, self.call)
        return keys, values

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        cells: torch.Tensor = self.layers[layer_idx].write_cells("indexer", indexer_key_states.unsqueeze(1))
        return cells.squeeze(1)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state: torch.Tensor | None = self.layers[layer_idx].state("conv", state_idx)
        return state

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        full: torch.Tensor = self.layers[layer_idx].update_conv_state(
            conv_states, state_idx, conv_kernel_size
        )
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state: torch.Tensor | None = self.layers[layer_idx].state("recurrent", state_idx)
        return state

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        state: torch.Tensor = self.layers[layer_idx].update_recurrent_state(recurrent_states, state_idx)
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return isinstance(self.call, Decoding) or self.call.start > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor | int:
        """Return the cell of the first query: per row in a decode step, so that masks are ragged."""
        call = self.call
        return call.start if isinstance(call, Reading) else mark(call.positions.view(-1), call)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.call.start if isinstance(self.call, Reading) else self.call.end - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.call.end, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.arenas.context


def _rows(call: Call) -> slice:
    return slice(call.slot, call.slot + 1) if isinstance(call, Reading) else call.rows
