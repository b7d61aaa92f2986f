"""What crosses the edge between the actors and the tensors: chunks, rows, results, and the `Runner` protocol.

The actors touch a tensor only through these types. `gpu/runner.py` implements `Runner` with a real model,
`tests/world/fake_runner.py` with scripted tokens and durations.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from regrow.policy.keys import Keys
from regrow.policy.request import SamplingParams

StateKind = Literal["conv", "recurrent"]
WantLogits = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One per-position tensor of one layer. Its arena is [slots, heads, max_context + 1, dim]."""

    layer: int
    name: str  # "k", "v", or another per-position tensor the layer keeps, e.g. "indexer"
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One running-state tensor of one layer. Its arenas are [slots, *shape]."""

    layer: int
    kind: StateKind
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the model's layers keep, as found by probing; never read from a table of model names."""

    cells: tuple[CellSpec, ...]
    states: tuple[StateSpec, ...]

    @property
    def hybrid(self) -> bool:
        return bool(self.states)

    @property
    def bytes_per_token(self) -> int:
        return sum(cell.bytes_per_token for cell in self.cells)

    @property
    def bytes_per_checkpoint(self) -> int:
        return sum(state.nbytes for state in self.states)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one slot to be read in one piece: cells [start, start + n).

    ids: int64 [n]. positions: int64 [n], where a position is not the cell index (pictures); None means
    start, start + 1, ... want_logits: also return the logits of the last token (a prompt of one token), or
    those of all (log-probabilities of the prompt).
    """

    slot: int
    start: int
    ids: Keys
    embeddings: torch.Tensor | None = None
    positions: npt.NDArray[np.int64] | None = None
    want_logits: WantLogits = "none"


class LogitsMask(Protocol):
    """A constraint on the next token, run on the device thread (grammars)."""

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits [vocab] of forbidden tokens to -inf, in place."""

    def accept(self, token: int) -> None:
        """Advance by the token that was drawn."""


@dataclass(slots=True)
class Row:
    """One slot's part in a decode step: `token` goes into cell `length` of `slot`.

    counter: how many tokens of this answer were drawn before (the sampler's counter). prompt_ids and
    answer_ids feed the penalties. banned: token ids that may not be drawn in this step.
    """

    slot: int
    token: int
    length: int
    sampling: SamplingParams
    counter: int = 0
    prompt_ids: Keys | None = None
    answer_ids: Sequence[int] = ()
    banned: frozenset[int] = frozenset()
    mask: LogitsMask | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probability of a token at its place, None at the start of a prompt, which nothing comes before;
    `top` are (token, log-probability) of the most likely ones there, most likely first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens drawn by one decode step: for row i, `tokens[i]` holds 1..k of them (more than one with
    drafts), or none where its logits were not finite. The caller says with `commit` how many it keeps.

    scores: for each of `tokens[i]` its score where the row asks for log-probabilities, else nothing."""

    tokens: tuple[tuple[int, ...], ...]
    scores: tuple[tuple[Scored, ...], ...]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a chunk gave where it was wanted: the logits [vocab] of its last token, or [n, vocab] of all."""

    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of one slot's running state at `position` (R4). Owned memory: never a view of an arena."""

    position: int
    states: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)


@dataclass(frozen=True, slots=True)
class Digest:
    """A hash (hex) of every part of a session (V1): part name -> hash; names say kind, layer and index."""

    length: int
    parts: tuple[tuple[str, str], ...]

    @property
    def value(self) -> str:
        """One hash over all parts and the length."""
        return hashlib.blake2b(repr((self.length, self.parts)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class HostCells:
    """A copy in host memory of the cells [start, stop) of some slot: one tensor [heads, stop - start, dim]
    for each `CellSpec`, in the order of the geometry. Owned memory, never written after it was filled."""

    start: int
    stop: int
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def upto(self, stop: int) -> "HostCells":
        """Return a view of the cells below `stop`."""
        return HostCells(self.start, stop, tuple(t[:, : stop - self.start] for t in self.tensors))


class CellCopy(Protocol):
    """A copy that goes on in pieces between the steps, or by itself on a lane of its own."""

    @property
    def ended(self) -> bool:
        """Whether everything is copied, or has failed; `advance` then says so."""
        ...

    def advance(self, seconds: float) -> bool:
        """Go on for about `seconds`, at least one piece, and for a while only where they are infinite; True
        once everything is copied. Raises what went wrong."""
        ...


class StateCopy(CellCopy, Protocol):
    """A running state on its way into a snapshot."""

    @property
    def snapshot(self) -> Snapshot | None:
        """The copy once it has ended; None where the state is not finite."""
        ...


class Runner(Protocol):
    """A model with its slot arenas. Every method is called on the device thread, one at a time.

    A slot is reading (its running state is in its rest row) or joined (in its decode row).
    """

    @property
    def geometry(self) -> Geometry: ...

    @property
    def slots(self) -> int: ...

    @property
    def context(self) -> int:
        """Cells a slot can hold."""
        ...

    def length(self, slot: int) -> int:
        """Return how many cells of `slot` are valid."""
        ...

    def empty(self, slot: int) -> None:
        """Forget what `slot` holds: its length becomes 0 and the next chunk starts fresh."""
        ...

    def mount(self, slot: int, position: int, state: Snapshot | None) -> None:
        """Cut `slot` back to `position` and restore the running state there.

        `state` is None for a model without running state, or where the slot's own is the one at `position`.
        Raises ValueError where the state's position differs (R4) or the cells do not reach `position`.
        """
        ...

    def load_state(self, slot: int, state: Snapshot) -> CellCopy:
        """Begin to copy `state` into `slot`, which has none until it is mounted with this very state."""
        ...

    def copy_cells(self, source: int, slot: int, stop: int, *, lend: bool = False) -> CellCopy:
        """Begin to copy the cells [0, stop) of `source`, which may be joined, into `slot`.

        lend: `slot` reads a chunk next, so the copy may end at once and be made while that is read.
        """
        ...

    def load_cells(self, slot: int, cells: Sequence[HostCells], *, lend: bool = False) -> CellCopy:
        """Begin to copy host cells, contiguous from 0 on, into `slot`; lend: as for `copy_cells`."""
        ...

    def save_cells(self, slot: int, start: int, stop: int) -> tuple[HostCells, CellCopy]:
        """Begin to copy the cells [start, stop) of `slot` to host memory; they are there once the copy is
        done."""
        ...

    def filled(self, slot: int, length: int) -> None:
        """Say that a copy has filled the cells [0, length) of `slot`; its running state is not there yet."""
        ...

    def read(self, chunk: Chunk, between: Callable[[], None] | None = None) -> ReadResult:
        """Read one chunk into cells [start, start + n) and advance the running state.

        between: called now and then while the chunk is on its way. Other slots may be stepped, committed and
        left in it; nothing else of the runner may be called.
        """
        ...

    def foresee(self) -> bool:
        """Do a little of what will make the next use of a slot fast; False where there is nothing to do. For
        when nothing else is."""
        ...

    def snapshot(self, slot: int) -> StateCopy:
        """Begin to copy the running state of a slot that is not joined, as it is now."""
        ...

    def join(self, slot: int) -> None:
        """Move the running state from the rest row to the decode row."""
        ...

    def leave(self, slot: int) -> None:
        """Move the running state back to the rest row."""
        ...

    def sample(self, row: Row, logits: torch.Tensor) -> int | None:
        """Draw a token from `logits` [vocab] as a step would; None where they are not finite."""
        ...

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Feed one token a row (joined slots), in one batch, and draw the next tokens."""
        ...

    def commit(self, slot: int, n: int) -> None:
        """Keep n of the tokens that the last step fed for `slot`: its length grows by n."""
        ...

    def digest(self, slot: int) -> Digest:
        """Hash every part of what `slot` holds."""
        ...

    def fresh(self) -> "Runner":
        """Return a runner over the same weights with arenas of its own; from any thread, while a call of
        this one may hang."""
        ...

    def reset(self) -> None:
        """Start again with fresh arenas: every slot is empty."""
        ...
