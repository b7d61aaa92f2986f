"""What a model's layers keep, found by running it: a few tokens over arenas that grow at the first sight of a
tensor. Nothing is read from a table of model names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regrow.errors import ModelRefused
from regrow.gpu.arena import Arenas, CellKey, StateKey
from regrow.gpu.call import Decoding, Reading
from regrow.gpu.forward import SlotModel
from regrow.gpu.slot_cache import SlotCache
from regrow.gpu.types import CellSpec, Geometry, StateKind, StateSpec

_CHUNKS = (5, 3)  # a fresh read and one that follows; then a decode step of one row beside an idle one
_TOLERANCE = 0.3  # of the logits' spread; rounding stays far below, in bfloat16 too


@dataclass(frozen=True, slots=True)
class Probed:
    """geometry: what the layers keep. row_exact: whether a row's bits leave the other rows of a decode step
    alone: it attends over nothing but arena views, so that the longest row does not matter, and computes with
    shapes that no token changes, so that it does not matter which rows share an expert."""

    geometry: Geometry
    row_exact: bool


class GrowingArenas(Arenas):
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


class _Shapes(TorchDispatchMode):
    """Notes every operation with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.seen.append((func, *(tuple(tensor.shape) for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def probe(model: SlotModel) -> Probed:
    """Find what `model` keeps. Raises ModelRefused, with the reason, for one that cannot run over slots: its
    code does not allow it, its states are not what later reading goes on from, or reading in pieces gives
    other logits than reading at once."""
    last = sum(_CHUNKS)
    arenas = GrowingArenas(slots=2, context=last + 2, device=model.device)
    cache = SlotCache(arenas, model.config.num_hidden_layers)
    positions = torch.arange(last + 1, device=model.device)[None]
    tokens = positions + 1

    def read(slot: int, start: int, end: int) -> torch.Tensor:
        span = slice(start, end)
        return model(cache, Reading(slot, start, end - start), tokens[:, span], positions[:, span])[0]

    try:
        read(0, 0, _CHUNKS[0])
        flaw = _flaw(arenas, lambda: read(0, _CHUNKS[0], last), lambda: read(1, 0, last))
        arenas.join(0)
        step = Decoding.of(0, (last, None), arenas.context, model.device)
        pieces = model(cache, step, tokens[:, [last, 0]].T, step.positions[:, None])[0]
        whole = read(1, 0, last + 1)
        arenas.join(1)
        alike, apart = (_shapes_of_step(model, cache, last + 1, pair) for pair in ((1, 1), (1, 2)))
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
    if flaw is not None:
        raise ModelRefused(flaw)
    difference = float((pieces - whole).float().norm() / (whole - whole.mean()).float().norm())
    if not difference < _TOLERANCE:
        raise ModelRefused(f"read in pieces its logits differ by {difference:.0%} from reading at once")
    row_exact = step.changed == 0 and step.intact >= step.updates and alike == apart
    return Probed(arenas.geometry, row_exact)


def _flaw(
    arenas: Arenas, read: Callable[[], torch.Tensor], read_elsewhere: Callable[[], torch.Tensor]
) -> str | None:
    """Return what is wrong with the states of slot 0, whose next chunk `read` reads; None where nothing is.

    Losing a kind of state must change the logits; reading another slot in between must not. At the end `read`
    has gone on from the whole state.
    """
    before = [state.clone() for state in arenas.states(0)]

    def read_without(lost: tuple[StateKind, int] | None) -> torch.Tensor:
        for (_, *kind), state, kept in zip(arenas.rest, arenas.states(0), before, strict=True):
            state.copy_(kept * 0 if tuple(kind) == lost else kept)
        return read()

    without = {kind: read_without(kind) for kind in {(kind, index) for _, kind, index in arenas.rest}}
    whole = read_without(None)
    read_elsewhere()
    if not torch.equal(read_without(None), whole):
        return "what one slot reads changes what another reads: there is a state outside of the cache"
    for (kind, _), logits in without.items():
        if torch.equal(logits, whole):
            return f"a chunk of several tokens is read without the {kind} state before it"
    return None


def _shapes_of_step(model: SlotModel, cache: SlotCache, length: int, tokens: tuple[int, int]) -> list[object]:
    step = Decoding.of(0, (length, length), cache.arenas.context, model.device)
    shapes = _Shapes()
    with shapes:
        model(cache, step, torch.tensor(tokens, device=model.device)[:, None], step.positions[:, None])
    return shapes.seen
