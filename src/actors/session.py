"""What one slot holds: keys, how far they were read by the plan, and the chain of checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from regrow.actors.messages import Prepared
from regrow.policy.chain import Chain
from regrow.policy.keys import Keys, Namespace, as_keys
from regrow.policy.plan import ReadPlan

NO_KEYS = as_keys(())
NO_PLAN = ReadPlan(0, ())


@dataclass(slots=True)
class Session:
    """A slot's conversation. Invariant: `keys` is exactly what the first `len(keys)` cells hold.

    pure: positions below it were read by `plan`, never decoded (R5). live: the slot's running state is the
    one at the end of `keys`, so that it can go on from there without a checkpoint. hashes: the prefix hash at
    each cut of the plan.
    """

    namespace: Namespace | None = None
    keys: Keys = field(default_factory=lambda: NO_KEYS)
    plan: ReadPlan = NO_PLAN
    pure: int = 0
    live: bool = False
    chain: Chain = field(default_factory=Chain)
    hashes: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.keys)

    @property
    def states(self) -> frozenset[int]:
        """The positions at which a running state is at hand: those of the checkpoints, and the live end where
        it is a cut that was read (so a cancelled read goes on where it stopped)."""
        live = self.live and self.pure == self.length and self.plan.is_cut(self.length)
        return frozenset((*self.chain.positions, self.length) if live else self.chain.positions)

    def cut_back(self, position: int, prepared: Prepared) -> None:
        """Start serving a prompt from its first `position` keys, which this session shares."""
        self.namespace = prepared.namespace
        self.keys = prepared.keys[:position]
        self.plan = prepared.plan
        self.hashes = dict(zip(prepared.plan.cuts, prepared.hashes, strict=True))
        self.pure = min(self.pure, position)
        self.live = True

    def forget_beyond(self, position: int) -> None:
        """Give up the keys beyond `position`: nobody goes on from there."""
        if position < self.length:
            self.keys = self.keys[:position]
            self.pure = min(self.pure, position)
            self.live = False

    def extend(self, prompt: Keys, position: int, answer: Sequence[int]) -> None:
        """Hold the first `position` keys of the prompt followed by the answer."""
        self.keys = prompt if position == len(prompt) else prompt[:position]
        if answer:
            self.keys = np.concatenate([self.keys, as_keys(answer)])
            self.keys.setflags(write=False)
