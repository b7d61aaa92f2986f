"""The request that a slot serves: how far it is, what it has shown, and how it is told to its client."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import structlog

from regrow.actors.events import Failed, Finished, FinishReason, Logprob, Reuse, Usage
from regrow.actors.messages import Admit
from regrow.actors.mounting import SlotWiring
from regrow.errors import RegrowError
from regrow.gpu.device_loop import EndReason
from regrow.gpu.types import Scored
from regrow.models.detokenize import Detokenizer
from regrow.policy.stops import StopMatcher

log = structlog.get_logger(__name__)
Phase = Literal["mounting", "reading", "decoding", "stopping"]


@dataclass(slots=True)
class Serving:
    """leases: position -> lease of a state to be taken there. there: positions whose state the cache has
    already. shown: tokens of the answer that the client was given.
    distrusted: what it went on from is in doubt, so nothing of it is kept."""

    admit: Admit
    epoch: int
    text: Detokenizer
    spell: Callable[[int], bytes]
    stops: StopMatcher
    placed_at: float
    phase: Phase = "mounting"
    reused: int = 0
    position: int = 0
    mount_ms: float = 0.0
    read_began: float = 0.0
    read_ms: float = 0.0
    leases: dict[int, int] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    answer: list[int] = field(default_factory=list)
    shown: int = 0
    reason: FinishReason | None = None
    error: RegrowError | None = None
    tail: str = ""
    distrusted: bool = False
    digest: str | None = None

    @classmethod
    def of(cls, admit: Admit, epoch: int, wiring: SlotWiring) -> "Serving":
        stops = StopMatcher(admit.prepared.stops.strings)
        return cls(admit, epoch, wiring.detokenizer(), wiring.spell, stops, wiring.now())

    @property
    def reads(self) -> bool:
        """Whether its prompt is being read. A read that is to stop goes on until its job has ended: who waits
        for it is to find what it leaves (S6)."""
        unread = self.position < len(self.admit.prepared.keys) - 1
        return self.phase in ("mounting", "reading") or (self.phase == "stopping" and unread)

    @property
    def usage(self) -> Usage:
        """What was really read and drawn; the last token of a prompt is read with the first step."""
        prompt = len(self.admit.prepared.keys)
        return Usage(prompt if self.position >= prompt - 1 else self.position, self.shown, self.reused)

    def show(self, token: int) -> tuple[str, bool]:
        """Return the text that a token adds, and whether a stop string is complete."""
        self.shown += 1
        return self.stops.feed(self.text.push(token))

    def logprob(self, score: Scored) -> Logprob:
        """Return a score as the client is told it: with the bytes of the tokens."""
        top = tuple(Logprob(token, self.spell(token), logprob) for token, logprob in score.top)
        return Logprob(score.token, self.spell(score.token), score.logprob, top)

    def finish(self, reason: EndReason) -> None:
        """Note how the answer ended, and what was still held back of it."""
        if self.reason is not None:
            return
        text, stopped = self.stops.feed(self.text.flush())
        self.tail = text if stopped else text + self.stops.flush()
        self.reason = "stop" if stopped or reason == "stop" else "length"

    def close(self, slot: int, wiring: SlotWiring) -> None:
        """Log the request in one line (E2) and give the client its terminal event."""
        admit, now, usage = self.admit, wiring.now(), self.usage
        reuse = Reuse(
            source=admit.source if self.reused else "none",
            slot=slot,
            reused=self.reused,
            read=self.position - self.reused,
            queue_ms=(self.placed_at - admit.submitted_at) * 1e3,
            mount_ms=self.mount_ms,
            read_ms=self.read_ms,
            exact=wiring.exact,
            why=admit.why.sentence if admit.why else None,
            diverged=admit.diverged,
            repacked=admit.prepared.repacked,
            digest=self.digest,
        )
        log.info(
            "request",
            request=admit.request,
            slot=slot,
            ended=type(self.error).__name__ if self.error else self.reason,
            prompt=usage.prompt,
            answer=usage.completion,
            source=reuse.source,
            reused=reuse.reused,
            read=reuse.read,
            queue_ms=round(reuse.queue_ms, 1),
            mount_ms=round(reuse.mount_ms, 1),
            read_ms=round(reuse.read_ms, 1),
            total_ms=round((now - admit.submitted_at) * 1e3),
            exact=reuse.exact,
            why=reuse.why,
            left_out=reuse.repacked.characters if reuse.repacked else 0,
        )
        if self.error is not None:
            admit.run.end(Failed(now, self.error, usage, reuse))
        else:
            stop_string = self.stops.found if self.reason == "stop" else None
            admit.run.end(Finished(now, self.reason or "stop", self.tail, usage, reuse, stop_string))
