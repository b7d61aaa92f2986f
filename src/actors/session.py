"""What one slot holds: keys, how far they were read by the plan, and the chain of checkpoints."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from regrow.actors.messages import Prepared
from regrow.actors.parking import Parkable
from regrow.policy.chain import Chain
from regrow.policy.checkpoints import last_start
from regrow.policy.directory import Holder, HolderId
from regrow.policy.keys import Keys, Namespace, as_keys, common_prefix
from regrow.policy.plan import ReadPlan

NO_KEYS = as_keys(())
NO_PLAN = ReadPlan(0, ())


@dataclass(slots=True)
class Session:
    """A slot's conversation. Invariant: `keys` is exactly what the first `len(keys)` cells hold.

    pure: positions below it were read by `plan`, never decoded (R5). live: the slot's running state is the
    one at the end of `keys`, so that it can go on from there without a checkpoint. hashes: the prefix hash at
    each cut of the plan. marks: the cuts where a later prompt is likely to rejoin. public: what lies above it
    may not be used by another request (S9).
    """

    namespace: Namespace | None = None
    keys: Keys = field(default_factory=lambda: NO_KEYS)
    plan: ReadPlan = NO_PLAN
    pure: int = 0
    live: bool = False
    public: int = sys.maxsize
    chain: Chain = field(default_factory=Chain)
    hashes: Mapping[int, bytes] = field(default_factory=dict)
    marks: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.keys)

    def begins(self, prepared: Prepared, position: int) -> bool:
        """Say whether this session's cells are the first `position` keys of the prompt (S5)."""
        return position == 0 or (
            self.namespace == prepared.namespace
            and position <= self.length
            and common_prefix(self.keys[:position], prepared.keys[:position]) == position
        )

    def resumable(self, *, hybrid: bool) -> int:
        """Return the deepest position at which this session can be resumed by the plan, or 0."""
        if hybrid:
            return max(self.chain.positions, default=0)
        return self.plan.last_cut_at_or_below(min(self.pure, self.public))

    def serve(self, position: int, prepared: Prepared, marks: tuple[int, ...]) -> None:
        """Start serving a prompt from its first `position` keys, which the cells hold now."""
        self.namespace = prepared.namespace
        self.keys = prepared.keys[:position]
        self.plan = prepared.plan
        self.hashes = dict(zip(prepared.plan.cuts, prepared.hashes, strict=True))
        self.pure = min(self.pure, position)
        self.marks = marks
        self.public = prepared.public(position)
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

    def holder(self, slot: int, version: int, *, busy: bool) -> Holder:
        """Return what the directory should know of this session."""
        upto = min(self.length, self.public)
        cuts = tuple((p, self.hashes[p]) for p in self.plan.cuts if p <= upto)
        return Holder(
            id=HolderId("slot", slot),
            length=self.length,
            cuts=cuts,
            pure_length=self.pure,
            last_start=last_start(self.plan),
            used=version,
            busy=busy,
            version=version,
        )

    def parkable(self, slot: int, upto: int) -> Parkable | None:
        """Return the cells [0, upto) as something to park, cut into spans where it may be rejoined (K4)."""
        if self.namespace is None:
            return None
        whole = self.holder(slot, 0, busy=False)
        edges = sorted({p for p in (*self.marks, *self.chain.positions) if p < upto} | {upto})
        return Parkable(
            holder=replace(whole, cuts=tuple(cut for cut in whole.cuts if cut[0] <= upto)),
            namespace=self.namespace,
            keys=self.keys[:upto],
            edges=tuple((p, self.hashes[p]) for p in edges),
            states=tuple(e.entry_id for e in self.chain.entries if e.position <= upto),
        )
