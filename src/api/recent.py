"""The last answers, with their times, for those who look at the monitor; no text of theirs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from regrow.actors.events import Event, Failed, Finished, Queued, Token
from regrow.policy.place import Source

KEPT = 64


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. ended_at: the engine clock. ttft_s: from arrival to its first token; gap_s: the longest
    time between two tokens; None where it had none. prompt, reused, drawn: tokens."""

    ended_at: float
    ended: str
    ttft_s: float | None
    gap_s: float | None
    prompt: int
    reused: int
    drawn: int
    source: Source


@dataclass(slots=True)
class _Life:
    """A run that has not ended."""

    queued_at: float
    first_at: float | None = None
    last_at: float = 0.0
    gap_s: float | None = None


class Recent:
    """Hears the events of all runs; `answers` are the last `KEPT` of them, the newest last."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._answers: deque[Answered] = deque(maxlen=KEPT)

    @property
    def answers(self) -> Sequence[Answered]:
        return tuple(self._answers)

    def heard(self, run: str, event: Event) -> None:
        """Take note of an event of a run."""
        if isinstance(event, Queued):
            self._lives[run] = _Life(event.at)
        elif life := self._lives.get(run):  # else it was queued before anybody listened
            if isinstance(event, Token):
                _note(life, event.at)
            elif isinstance(event, Finished | Failed):
                del self._lives[run]
                self._answers.append(_answered(life, event))


def _note(life: _Life, at: float) -> None:
    if life.first_at is None:
        life.first_at = at
    else:
        life.gap_s = max(life.gap_s or 0.0, at - life.last_at)
    life.last_at = at


def _answered(life: _Life, end: Finished | Failed) -> Answered:
    return Answered(
        ended_at=end.at,
        ended=end.reason if isinstance(end, Finished) else type(end.error).__name__,
        ttft_s=None if life.first_at is None else life.first_at - life.queued_at,
        gap_s=life.gap_s,
        prompt=end.usage.prompt,
        reused=end.usage.cached,
        drawn=end.usage.completion,
        source=end.reuse.source,
    )
