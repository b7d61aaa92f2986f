"""What a run tells its client: one event for each change of a request's life, in order.

queued -> placed -> mounting -> reading -> decoding -> done. `at` is the engine clock in seconds. Every stream
ends with exactly one `Finished` or `Failed`.
"""

from dataclasses import dataclass
from typing import Literal

from regrow.errors import RegrowError
from regrow.policy.place import Source

FinishReason = Literal["stop", "length", "cancelled"]
RepackDecision = Literal["cold", "sticky"]


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits; `ahead` requests are before it."""

    at: float
    ahead: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A slot and a source were chosen: `reused` of `prompt` tokens need not be read."""

    at: float
    slot: int
    source: Source
    reused: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Mounted:
    """The slot holds the first `reused` tokens and the running state there."""

    at: float
    reused: int
    ms: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at its place in a text: the natural logarithm of the probability that the model gave it there,
    None at the start of a prompt, and the most likely tokens there, most likely first.

    bytes: of its text, which may hold a part of a character. `gpu/logprobs.py` says of which distribution.
    """

    id: int
    bytes: bytes
    logprob: float | None
    top: tuple["Logprob", ...] = ()


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """A chunk was read; `position` of `total` prompt tokens are in the slot.

    logprobs: of the prompt's next tokens, where they are asked for; those of all chunks are one for each.
    """

    at: float
    position: int
    reused: int
    total: int
    tokens_per_s: float
    eta_ms: float
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The prompt is read."""

    at: float
    reused: int
    read: int
    ms: float


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer. `text` is what it adds; empty while a character or a stop string is not
    complete. logprob: where it is asked for."""

    at: float
    id: int
    text: str
    logprob: Logprob | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the prompt first differs from the nearest known one, in the request's own text (E1)."""

    position: int
    message: int | None
    role: str | None
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Repacked:
    """What was left out of the prompt, since its conversation was lost before this turn ("cold") or before an
    earlier one ("sticky"). messages: those that were shortened, by so many characters together."""

    decision: RepackDecision
    messages: int
    characters: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """The facts of E1: what was reused, from where, and why not more. Times in milliseconds. digest: of all
    that the slot holds at the end, as hex, where that was asked for (V1)."""

    source: Source
    slot: int | None
    reused: int
    read: int
    queue_ms: float
    mount_ms: float
    read_ms: float
    exact: str
    why: str | None = None
    diverged: Divergence | None = None
    repacked: Repacked | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, of the answer, and of the prompt that were reused."""

    prompt: int
    completion: int
    cached: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. `text` is what was still held back; append it. stop_string: the one that ended
    it, where one did."""

    at: float
    reason: FinishReason
    text: str
    usage: Usage
    reuse: Reuse
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without a complete answer. `usage` counts what was really read and drawn."""

    at: float
    error: RegrowError
    usage: Usage
    reuse: Reuse


Event = Queued | Placed | Mounted | ReadProgress | ReadDone | Token | Finished | Failed
