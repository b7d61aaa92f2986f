"""How long copies may take beside running streams, where both need the same cores.

Copies get a share of the time, and what they did not need is saved up to a burst, so that the beginning of a
prompt of some thousand tokens is mounted at once. Over any two seconds they take less than 8 % of it, so that
streams, whose steps are slower beside them, lose less than a tenth of their pace; never more than a burst
between two tokens; a piece that took longer is paid back first.
"""

from dataclasses import dataclass

SHARE = 0.05
BURST_S = 0.05


@dataclass(frozen=True, slots=True)
class CopyShare:
    """left: seconds that copies may take; below 0 where they took more. gained: since the work before. at:
    when that was, None before the first time."""

    left: float = BURST_S
    gained: float = 0.0
    at: float | None = None

    def seconds(self, *, urgent: bool, decoding: bool) -> float:
        """Return how long copies may take now: those that a request waits for what is saved up, or a burst
        where only prompts are read; others what came in since the work before."""
        if not urgent:
            return min(self.left, self.gained)
        return self.left if decoding else BURST_S


def at(share: CopyShare, now: float) -> CopyShare:
    """Return the share at a later time."""
    gained = 0.0 if share.at is None else SHARE * (now - share.at)
    return CopyShare(min(share.left + gained, BURST_S), gained, now)


def after_copies(share: CopyShare, seconds: float) -> CopyShare:
    """Return the share after copies took so long."""
    return CopyShare(share.left - seconds, share.gained, share.at)
