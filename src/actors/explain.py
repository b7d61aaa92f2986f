"""Why not more of a prompt was reused, with the place where it first differs, as text (E1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from regrow.actors.events import Divergence
from regrow.actors.messages import Prepared, SessionChanged
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.explain import Known, divergence_message, why
from regrow.policy.keys import common_prefix
from regrow.policy.request import Exactness
from regrow.policy.resume import resume_point

SNIPPET = 60  # characters on each side
SNIPPET_TOKENS = 64  # enough for them, however short the tokens are


@dataclass(frozen=True, slots=True)
class Explainer:
    """Compares a prompt with what the slots hold. chunk: tokens of a read chunk."""

    tokenizer: ChatTokenizer
    exact: Exactness
    chunk: int

    def __call__(
        self, prepared: Prepared, reused: int, sessions: Sequence[SessionChanged]
    ) -> tuple[str | None, Divergence | None]:
        """Return the reason in one sentence, and the place where the prompt leaves the nearest known one.

        Both are None where what was reused lacks at most two chunks of what was known.
        """
        holding = [s for s in sessions if len(s.keys)]
        same = [s for s in holding if s.namespace == prepared.namespace]
        nearest = max(same, key=lambda s: common_prefix(prepared.keys, s.keys), default=None)
        shared = 0 if nearest is None else common_prefix(prepared.keys, nearest.keys)
        known = Known(
            prompts=bool(same),
            elsewhere=len(same) < len(holding),
            shared=shared,
            pure=shared if nearest is None or self.exact == "off" else nearest.holder.pure_length,
            usable=0 if nearest is None else self._usable(prepared, shared, nearest),
            holder="" if nearest is None else f"slot {nearest.slot}",
        )
        reason = why(prepared.plan, known, reused, chunk=self.chunk, cache=prepared.cache)
        if reason is None or not shared or shared >= len(prepared.keys):
            return reason, None
        return reason, self._divergence(prepared, shared)

    def _usable(self, prepared: Prepared, shared: int, nearest: SessionChanged) -> int:
        holder = nearest.holder
        live_end = holder.length if nearest.live and self.exact == "off" else None
        return resume_point(prepared.plan, shared, holder.pure_length, holder.states, self.exact, live_end)

    def _divergence(self, prepared: Prepared, position: int) -> Divergence:
        keys = prepared.keys
        before = self.tokenizer.decode(keys[max(0, position - SNIPPET_TOKENS) : position].tolist())
        after = self.tokenizer.decode(keys[position : position + SNIPPET_TOKENS].tolist())
        message, role = divergence_message(prepared.plan, position) or (None, None)
        return Divergence(position, message, role, before[-SNIPPET:], after[:SNIPPET])
