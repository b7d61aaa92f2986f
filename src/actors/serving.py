"""The request that a slot serves: how far it is, what was drawn, what is said of it at its end (E1, E2)."""

from dataclasses import dataclass, field
from typing import Literal

import structlog

from regrow.actors.events import Failed, Finished, FinishReason, Reuse, Usage
from regrow.actors.messages import Admit
from regrow.errors import RegrowError
from regrow.models.detokenize import Detokenizer
from regrow.policy.place import Source
from regrow.policy.request import Exactness
from regrow.policy.stops import StopMatcher

log = structlog.get_logger(__name__)
Phase = Literal["mounting", "reading", "decoding", "stopping"]


@dataclass(slots=True)
class Serving:
    """The request in progress.

    position: prompt tokens that are in the slot, `reused` ones included. leases: position -> the lease of a
    checkpoint to be taken there. answer: every token that was drawn; shown: how many were told. reason and
    error: how it will end, once that is known. tail: text that was held back to the end. distrusted: what it
    went on from is in doubt, so nothing of it is kept.
    """

    admit: Admit
    epoch: int
    text: Detokenizer
    stops: StopMatcher
    placed_at: float
    source: Source
    phase: Phase = "mounting"
    reused: int = 0
    position: int = 0
    mount_ms: float = 0.0
    read_began: float = 0.0
    read_ms: float = 0.0
    leases: dict[int, int] = field(default_factory=dict)
    answer: list[int] = field(default_factory=list)
    shown: int = 0
    reason: FinishReason | None = None
    error: RegrowError | None = None
    tail: str = ""
    distrusted: bool = False

    @property
    def read(self) -> int:
        """Prompt tokens that were really read."""
        return self.position - self.reused

    def ended(self, slot: int, exact: Exactness, now: float) -> Finished | Failed:
        """Return the terminal event, and log the same facts in one line."""
        admit = self.admit
        usage = Usage(len(admit.prepared.keys), self.shown, self.reused)
        reuse = Reuse(
            source=self.source if self.reused else "none",
            slot=slot,
            reused=self.reused,
            read=self.read,
            queue_ms=(self.placed_at - admit.submitted_at) * 1e3,
            mount_ms=self.mount_ms,
            read_ms=self.read_ms,
            exact=exact,
            why=admit.why,
            diverged=admit.diverged,
        )
        log.info(
            "request",
            request=admit.request,
            slot=slot,
            ended=type(self.error).__name__ if self.error else self.reason,
            prompt=usage.prompt,
            answer=usage.completion,
            total_ms=round((now - admit.submitted_at) * 1e3),
            **{k: getattr(reuse, k) for k in ("source", "reused", "read", "exact", "why")},
            queue_ms=round(reuse.queue_ms, 1),
            mount_ms=round(reuse.mount_ms, 1),
            read_ms=round(reuse.read_ms, 1),
        )
        if self.error is not None:
            return Failed(now, self.error, usage, reuse)
        return Finished(now, self.reason or "stop", self.tail, usage, reuse)
