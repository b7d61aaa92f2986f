"""What a model's layers keep, found by running it: a few tokens over arenas that grow at the first sight of a
tensor. Nothing is read from a table of model names."""

from dataclasses import dataclass

import torch

from regrow.errors import ModelRefused
from regrow.gpu.arena import Arenas, CellKey, StateKey
from regrow.gpu.call import Decoding, Reading
from regrow.gpu.forward import SlotModel
from regrow.gpu.slot_cache import SlotCache
from regrow.gpu.types import CellSpec, Geometry, StateSpec

_CHUNKS = (5, 3)  # a fresh read and one that follows; then a decode step of one row beside an idle one
_TOLERANCE = 0.3  # rounding stays far below, in bfloat16 too; a state that is not carried on gives about 1


@dataclass(frozen=True, slots=True)
class Probed:
    """geometry: what the layers keep. row_exact: whether a decode step attends over nothing but arena views,
    so that a row's bits cannot depend on the longest row of the step."""

    geometry: Geometry
    row_exact: bool


class _GrowingArenas(Arenas):
    """Arenas that note each new kind of tensor and make room for it."""

    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        super().__init__(Geometry((), ()), slots, context, device)
        self._cell_specs: list[CellSpec] = []
        self._state_specs: list[StateSpec] = []

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            tuple(sorted(self._cell_specs, key=lambda c: c.layer)),
            tuple(sorted(self._state_specs, key=lambda s: (s.layer, s.kind, s.index))),
        )

    def cell_arena(self, key: CellKey, like: torch.Tensor) -> torch.Tensor:
        if key not in self.cells:
            self._cell_specs.append(CellSpec(*key, heads=like.shape[1], dim=like.shape[3], dtype=like.dtype))
            self._add_cells(self._cell_specs[-1])
        return self.cells[key]

    def ensure_state(self, key: StateKey, like: torch.Tensor, size: int | None = None) -> None:
        if key not in self.rest:
            shape = (*like.shape[1:-1], size or like.shape[-1])
            self._state_specs.append(StateSpec(*key, shape=shape, dtype=like.dtype))
            self._add_state(self._state_specs[-1])


def probe(model: SlotModel) -> Probed:
    """Find what `model` keeps. Raises ModelRefused, with the reason, for one that cannot run over slots: its
    code does not allow it, or reading in pieces gives other logits than reading at once."""
    last = sum(_CHUNKS)
    arenas = _GrowingArenas(slots=2, context=last + 1, device=model.device)
    cache = SlotCache(arenas, model.config.num_hidden_layers)
    positions = torch.arange(last + 1, device=model.device)[None]
    tokens = positions + 1
    start = 0
    try:
        for n in _CHUNKS:
            span = slice(start, start + n)
            model(cache, Reading(0, start, n), tokens[:, span], positions[:, span])
            start += n
        arenas.join(0)
        step = Decoding.of(0, (last, None), arenas.context, model.device)
        pieces = model(cache, step, tokens[:, [last, 0]].T, step.positions[:, None])[0]
        whole = model(cache, Reading(1, 0, last + 1), tokens, positions)[0]
    except (
        NotImplementedError,
        AttributeError,
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        RuntimeError,
    ) as e:
        raise ModelRefused(f"{type(e).__name__} on the probe run: {e}") from e
    if not arenas.cells and not arenas.rest:
        raise ModelRefused("the model keeps nothing between calls")
    difference = float((pieces - whole).float().norm() / (whole - whole.mean()).float().norm())
    if not difference < _TOLERANCE:
        raise ModelRefused(f"read in pieces its logits differ by {difference:.0%} from reading at once")
    return Probed(arenas.geometry, row_exact=step.changed == 0 and step.intact >= step.updates)
