"""A real model behind the `Runner` protocol: slots are read, joined, stepped, snapshotted and mounted.

Every method belongs to one thread, which has entered `torch.inference_mode` itself. A slot knows how many
cells are valid and, apart from that, where its running state is (R4): a state that a failed pass or an
uncommitted step moved is never taken for the state at the end of the cells.
"""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from regrow.gpu.arena import Arenas
from regrow.gpu.call import Decoding, Reading
from regrow.gpu.copies import Ended, as_cells
from regrow.gpu.digest import digest_slot
from regrow.gpu.fast.layer import reading_layers
from regrow.gpu.forward import SlotModel
from regrow.gpu.lanes import lanes_for
from regrow.gpu.lent import LentCells
from regrow.gpu.logprobs import scores_of
from regrow.gpu.pages import SlotMemory, give_pages
from regrow.gpu.probe import probe
from regrow.gpu.sampling import draw, draw_all
from regrow.gpu.slot_cache import SlotCache
from regrow.gpu.types import (
    CellCopy,
    Chunk,
    Digest,
    Geometry,
    HostCells,
    ReadResult,
    Row,
    Snapshot,
    StateCopy,
    StepResult,
)
from regrow.policy.request import Exactness, SamplingParams

PROBE_TOKENS = 8
_TORN = -1  # the place of a running state that belongs to no position


class ModelRunner:
    """`slots` slots of `context` cells for a `transformers` causal language model.

    context: a number, or a function that chooses it once it is known what the model keeps.
    exact: "full" steps always all slots, so that a row's bits do not depend on load; else a step runs from
    the lowest joined slot to the highest, so that the bits of a lone request do not depend on its slot.
    Raises ModelRefused where the model cannot run over slots.
    """

    def __init__(
        self, model: PreTrainedModel, slots: int, context: int | Callable[[Geometry], int], exact: Exactness
    ) -> None:
        self._model = SlotModel(model)
        self._slots, self._exact = slots, exact
        with torch.inference_mode():
            probed = probe(self._model)
        self._geometry, self._row_exact = probed.geometry, probed.row_exact
        self._context = context if isinstance(context, int) else context(self._geometry)
        readers, cells = reading_layers(model), self._geometry.cells
        self._lends = all(cell.layer in readers and cell.dtype == torch.bfloat16 for cell in cells)
        self.reset()
        if exact == "full" and self._row_exact:
            with torch.inference_mode():
                self._row_exact = self._rows_agree()
            self.reset()

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def context(self) -> int:
        return self._context

    @property
    def row_exact(self) -> bool:
        """Whether the rows of a step leave each other's bits alone. Where not, "full" steps them singly."""
        return self._row_exact

    @property
    def arenas(self) -> Arenas:
        return self._arenas

    @property
    def lane_bytes(self) -> int:
        """Host memory that the copy lanes keep for themselves."""
        return self._lanes.held

    def length(self, slot: int) -> int:
        return self._length[slot]

    def reset(self) -> None:
        self._arenas = Arenas(self._geometry, self._slots, self._context, self._model.device)
        layers = self._model.config.num_hidden_layers
        self._reading, self._stepping = (SlotCache(self._arenas, layers) for _ in range(2))
        self._length = [0] * self._slots
        self._memory = SlotMemory(self._slots, self._geometry.bytes_per_token)
        self._state_at = [0] * self._slots
        self._joined: set[int] = set()
        self._lanes = lanes_for(self._model.device)
        self._loaded: list[Snapshot | None] = [None] * self._slots  # the state that lies in a torn rest row
        self._lent: dict[int, LentCells] = {}  # slot -> cells that are not in it yet

    def fresh(self) -> "ModelRunner":
        sibling = copy.copy(self)
        sibling.reset()
        return sibling

    def empty(self, slot: int) -> None:
        if slot in self._joined:
            self.leave(slot)
        self._forget(slot)

    def mount(self, slot: int, position: int, state: Snapshot | None) -> None:
        self._expect(slot not in self._joined, slot, "is joined")
        self._expect(position <= self._length[slot], slot, f"does not reach position {position}")
        if position < self._length[slot]:
            self._settle(slot)
        live = state is None and position == self._length[slot] == self._state_at[slot]
        if position and self._geometry.hybrid and not live:
            if state is None or state.position != position:
                raise ValueError(f"slot {slot} has no state at {position}")
            if self._loaded[slot] is not state or self._state_at[slot] != _TORN:
                self._expect_fits(slot, state)
                for kept, given in zip(self._arenas.states(slot), state.states, strict=True):
                    kept.copy_(given)
        self._length[slot] = self._state_at[slot] = position
        self._loaded[slot] = None

    def load_state(self, slot: int, state: Snapshot) -> CellCopy:
        self._expect(slot not in self._joined, slot, "is joined")
        self._expect_fits(slot, state)
        self._state_at[slot], self._loaded[slot] = _TORN, state
        rows = as_cells(self._arenas.states(slot)), as_cells(state.states)
        return self._lanes.restore(zip(*rows, strict=True), anew=not self._memory.reaches(slot))

    def copy_cells(self, source: int, slot: int, stop: int, *, lend: bool = False) -> CellCopy:
        self._expect(stop <= self._length[source], source, f"does not reach position {stop}")
        self._settle(source)
        self._claim(slot)
        if lend and self._may_lend(slot, stop):
            cells = HostCells(0, stop, tuple(self._arenas.span(source, 0, stop)))
            self._lent[slot] = LentCells(self._arenas, slot, [cells], source)
            return Ended()
        spans = (self._arenas.span(slot, 0, stop), self._arenas.span(source, 0, stop))
        return self._lanes.mount(zip(*spans, strict=True), anew=stop > self._memory.reaches(slot))

    def load_cells(self, slot: int, cells: Sequence[HostCells], *, lend: bool = False) -> CellCopy:
        edges = [0, *(part.stop for part in cells)]
        self._expect([part.start for part in cells] == edges[:-1], slot, "was given cells with gaps")
        self._expect(edges[-1] <= self._context, slot, f"has no room for {edges[-1]} cells")
        self._claim(slot)
        if lend and cells and self._may_lend(slot, edges[-1]):
            self._lent[slot] = LentCells(self._arenas, slot, cells, None)
            return Ended()
        pairs = (
            pair
            for part in cells
            for pair in zip(self._arenas.span(slot, part.start, part.stop), part.tensors, strict=True)
        )
        return self._lanes.restore(pairs, anew=edges[-1] > self._memory.reaches(slot))

    def save_cells(self, slot: int, start: int, stop: int) -> tuple[HostCells, CellCopy]:
        self._expect(0 <= start < stop <= self._length[slot], slot, f"holds no cells [{start}, {stop})")
        self._settle(slot)
        host, copy = self._lanes.park(self._arenas.span(slot, start, stop))
        return HostCells(start, stop, host), copy

    def filled(self, slot: int, length: int) -> None:
        self._length[slot], self._state_at[slot] = length, _TORN
        self._memory.given(slot, length)

    def _claim(self, slot: int) -> None:
        """Empty a slot before a copy writes to it: a copy is whole or it did not happen (S4)."""
        self._expect(slot not in self._joined, slot, "is joined")
        self._forget(slot)
        self._before_writing(slot, 0)

    def _forget(self, slot: int) -> None:
        self._length[slot] = self._state_at[slot] = 0
        self._loaded[slot] = None
        self._lent.pop(slot, None)

    def _may_lend(self, slot: int, stop: int) -> bool:
        """Whether all layers pass lent cells on, in memory that `slot` has used before."""
        return self._lends and stop <= self._memory.reaches(slot)

    def _settle(self, slot: int) -> None:
        """Copy what is still lent to `slot`."""
        lent = self._lent.pop(slot, None)
        while lent is not None and lent.advance():
            pass

    def _before_writing(self, slot: int, start: int) -> None:
        """Copy what is lent from cells of `slot` from `start` on."""
        for other, lent in list(self._lent.items()):
            if lent.lender == slot and lent.stop > start:
                self._settle(other)

    def read(self, chunk: Chunk, between: Callable[[], None] | None = None) -> ReadResult:
        slot, start = chunk.slot, chunk.start
        n = len(chunk.ids) if chunk.embeddings is None else len(chunk.embeddings)
        self._expect(slot not in self._joined, slot, "is joined")
        self._expect(start == self._length[slot], slot, f"has {self._length[slot]} cells, not {start}")
        self._expect(start == self._state_at[slot], slot, "has lost its running state")
        self._expect(0 < n <= self._context - start, slot, f"has no room for {n} tokens at {start}")
        device = self._model.device
        tokens = torch.tensor(chunk.ids) if chunk.embeddings is None else chunk.embeddings
        positions = (
            torch.arange(start, start + n) if chunk.positions is None else torch.tensor(chunk.positions)
        )
        self._give_memory(slot, start + n)
        self._before_writing(slot, start)
        self._state_at[slot] = _TORN
        logits = self._model(
            self._reading,
            Reading(slot, start, n, between, self._lent.get(slot)),
            tokens.to(device)[None],
            positions.to(device)[None],
            every=chunk.want_logits == "all",
        )
        self._settle(slot)
        self._length[slot] = self._state_at[slot] = start + n
        return ReadResult(None if chunk.want_logits == "none" else logits[0])

    def foresee(self) -> bool:
        for slot, lent in self._lent.items():
            if not lent.advance():
                del self._lent[slot]
            return True
        used = sum(length > 0 for length in self._length)
        wanted = self._memory.wanted(used) if self._model.device.type == "cpu" else None
        if wanted is None:
            return False
        slot, start, stop = wanted
        if not start:
            give_pages(as_cells(self._arenas.states(slot)))
        self._give_memory(slot, stop)
        return True

    def _give_memory(self, slot: int, stop: int) -> None:
        start = self._memory.reaches(slot)
        if self._model.device.type == "cpu" and stop > start:
            give_pages(self._arenas.span(slot, start, stop))
            self._memory.given(slot, stop)

    def snapshot(self, slot: int) -> StateCopy:
        self._expect(slot not in self._joined, slot, "is joined")
        self._expect(self._state_at[slot] == self._length[slot] > 0, slot, "has no running state")
        return self._lanes.snapshot(self._length[slot], self._arenas.states(slot))

    def join(self, slot: int) -> None:
        self._expect(slot not in self._joined, slot, "is joined already")
        self._settle(slot)
        self._arenas.join(slot)
        self._joined.add(slot)

    def leave(self, slot: int) -> None:
        self._expect(slot in self._joined, slot, "is not joined")
        self._arenas.leave(slot)
        self._joined.remove(slot)

    def sample(self, row: Row, logits: torch.Tensor) -> int | None:
        return draw(row, logits)

    def step(self, rows: Sequence[Row]) -> StepResult:
        logits = self.decode(rows)
        drawn = draw_all(rows, logits)
        return StepResult(
            tuple(() if token is None else (token,) for token in drawn),
            tuple(scores_of(row, token, own) for row, token, own in zip(rows, drawn, logits, strict=True)),
        )

    def decode(self, rows: Sequence[Row]) -> torch.Tensor:
        """Feed one token a row and return the logits [rows, vocab]; every joined slot takes part."""
        if {row.slot for row in rows} != self._joined or len(rows) != len(self._joined):
            raise ValueError(f"a step takes one row for each joined slot {sorted(self._joined)}")
        for row in rows:
            self._expect(row.length == self._length[row.slot], row.slot, f"has not {row.length} cells")
            self._expect(row.length < self._context, row.slot, "is full")
            self._expect(row.length == self._state_at[row.slot], row.slot, "has lost its running state")
            self._before_writing(row.slot, row.length)
        if self._exact == "full" and not self._row_exact:
            return torch.cat([self._decode([row], row.slot, row.slot + 1) for row in rows])
        if self._exact == "full":
            return self._decode(rows, 0, self._slots)
        return self._decode(rows, min(self._joined), max(self._joined) + 1)

    def commit(self, slot: int, n: int) -> None:
        fed = self._state_at[slot] - self._length[slot]
        self._expect(0 <= n <= fed, slot, f"was fed {fed} tokens, not {n}")
        self._length[slot] += n
        if not self._geometry.hybrid:
            self._state_at[slot] = self._length[slot]

    def digest(self, slot: int) -> Digest:
        self._settle(slot)
        return digest_slot(self._arenas, slot, self._length[slot], slot in self._joined)

    def _decode(self, rows: Sequence[Row], first: int, end: int) -> torch.Tensor:
        """Run the batch of slots [first, end) and return the logits of `rows` in their order."""
        lengths: list[int | None] = [None] * (end - first)
        tokens = [0] * (end - first)
        for row in rows:
            lengths[row.slot - first], tokens[row.slot - first] = row.length, row.token
            self._state_at[row.slot] = _TORN
        call = Decoding.of(first, tuple(lengths), self._context, self._model.device)
        ids = torch.tensor(tokens, device=self._model.device)[:, None]
        logits = self._model(self._stepping, call, ids, call.positions[:, None])
        for row in rows:
            self._state_at[row.slot] = row.length + 1
        return logits[[row.slot - first for row in rows]]

    def _rows_agree(self) -> bool:
        """Say whether a step gives every row the same bits for the same tokens: some matrix kernels treat the
        last rows of a batch in another way, and then an answer would depend on its slot."""
        ids = np.arange(1, 1 + min(PROBE_TOKENS, self._context - 1))
        rows = []
        for slot in range(self._slots):
            self.read(Chunk(slot, 0, ids))
            self.join(slot)
            rows.append(Row(slot, int(ids[-1]), len(ids), SamplingParams()))
        logits = self.decode(rows)
        for slot in range(self._slots):
            self.leave(slot)
            self._length[slot] = self._state_at[slot]
        parts = {self.digest(slot).parts for slot in range(self._slots)}
        return len(parts) == 1 and all(torch.equal(row, logits[0]) for row in logits)

    def _expect_fits(self, slot: int, state: Snapshot) -> None:
        found = [(tuple(s.shape), s.dtype) for s in state.states]
        wanted = [(s.shape, s.dtype) for s in self._geometry.states]
        self._expect(found == wanted, slot, "was given a state of another model")

    def _expect(self, holds: bool, slot: int, what: str) -> None:
        if not holds:
            raise ValueError(f"slot {slot} {what}")
