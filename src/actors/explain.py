"""Why not more of a prompt was reused, with the place where it first differs, as text (E1)."""

from dataclasses import dataclass

from regrow.actors.events import Divergence
from regrow.actors.messages import Prepared
from regrow.actors.placement import Placement
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.explain import READ_FOR_LOGPROBS, Known, Miss, divergence_message, why
from regrow.policy.request import Exactness

SNIPPET = 60  # characters on each side
SNIPPET_TOKENS = 64  # enough for them, however short the tokens are


@dataclass(frozen=True, slots=True)
class Explainer:
    """Compares a prompt with what the slots hold. chunk: tokens of a read chunk."""

    tokenizer: ChatTokenizer
    exact: Exactness
    chunk: int

    def __call__(
        self, prepared: Prepared, reused: int, placement: Placement
    ) -> tuple[Miss | None, Divergence | None]:
        """Return the reason, and the place where the prompt leaves the nearest known one.

        Both are None where what was reused lacks at most two chunks of what was known.
        """
        if prepared.prompt_logprobs is not None:
            return READ_FOR_LOGPROBS, None
        same = placement.known(prepared)
        nearest = max(same, key=lambda known: known.shared, default=None)
        shared = 0 if nearest is None else nearest.shared
        known = Known(
            prompts=bool(same),
            elsewhere=placement.holds_anything and prepared.cache_salt is None,
            shared=shared,
            pure=shared if nearest is None or self.exact == "off" else nearest.holder.pure_length,
            usable=0 if nearest is None else placement.usable(prepared, nearest),
            holder="" if nearest is None else f"{nearest.holder.id.kind} {nearest.holder.id.key}",
            on_disk=nearest is not None and nearest.holder.id.kind == "disk",
        )
        miss = why(prepared.plan, known, reused, chunk=self.chunk, cache=prepared.cache)
        if miss is None or not shared or shared >= len(prepared.keys):
            return miss, None
        return miss, self._divergence(prepared, shared)

    def _divergence(self, prepared: Prepared, position: int) -> Divergence:
        keys = prepared.keys
        before = self.tokenizer.decode(keys[max(0, position - SNIPPET_TOKENS) : position].tolist())
        after = self.tokenizer.decode(keys[position : position + SNIPPET_TOKENS].tolist())
        message, role = divergence_message(prepared.plan, position) or (None, None)
        return Divergence(position, message, role, before[-SNIPPET:], after[:SNIPPET])
