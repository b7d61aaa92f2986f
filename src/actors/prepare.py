"""From a request to something that can be queued: rendered, tokenised, planned, checked.

Runs on a worker thread.
"""

from dataclasses import dataclass

from regrow.actors.messages import Prepared
from regrow.errors import BadRequest, ContextLengthExceeded
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.checkpoints import checkpoint_cuts, message_end
from regrow.policy.keys import Keys, Namespace, as_keys, prefix_hashes
from regrow.policy.plan import ChunkTable, ReadPlan, build_plan
from regrow.policy.request import GenerateRequest, StopRules


@dataclass(frozen=True, slots=True)
class Preparer:
    """What preparing needs to know of the model and the settings. context: tokens a slot holds."""

    tokenizer: ChatTokenizer
    table: ChunkTable
    namespace: Namespace
    context: int
    checkpoints: int
    checkpoint_every: int

    def __call__(self, request: GenerateRequest) -> Prepared:
        """Raises BadRequest naming the field, or ContextLengthExceeded with both numbers."""
        keys = self._keys(request)
        room = self.context - len(keys)
        wanted_tokens = request.max_tokens if request.max_tokens is not None else max(room, 1)
        if wanted_tokens < 1:
            raise BadRequest("max_tokens must be at least 1", param="max_tokens")
        if wanted_tokens > room:
            raise ContextLengthExceeded(len(keys), wanted_tokens, self.context)
        plan = build_plan(keys, self.table, self.tokenizer.marks)
        namespace = self.namespace.salted(request.cache_salt)
        pin = 0 if request.pin is None else self._pinned(request, plan)
        checkpoints = checkpoint_cuts(plan, self.checkpoint_every, (), self.checkpoints, pin)
        ends = frozenset(self.tokenizer.eos_ids)
        return Prepared(
            keys=keys,
            plan=plan,
            namespace=namespace,
            hashes=prefix_hashes(namespace, keys, plan.cuts),
            wanted=tuple(c.position for c in checkpoints),
            protected=frozenset(c.position for c in checkpoints if c.protected),
            sampling=request.sampling,
            stops=StopRules(
                max_tokens=wanted_tokens,
                token_ids=frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else ends),
                strings=request.stop,
                min_tokens=request.min_tokens,
            ),
            banned=ends if request.ignore_eos else frozenset(),
            cache=request.cache,
            cache_salt=request.cache_salt,
            priority=request.priority,
            deadline_s=request.deadline_s,
        )

    def _pinned(self, request: GenerateRequest, plan: ReadPlan) -> int:
        messages = len(request.messages)
        if request.pin is None or not 0 <= request.pin < messages:
            raise BadRequest(
                f"regrow.pin is the index of a message, from 0 to {messages - 1}", param="regrow.pin"
            )
        return message_end(plan, request.pin, messages)

    def _keys(self, request: GenerateRequest) -> Keys:
        if request.messages:
            keys = self.tokenizer.encode_chat(request.messages, request.tools, request.template_options)
        elif isinstance(request.prompt, str):
            keys = self.tokenizer.encode(request.prompt)
        else:
            keys = as_keys(request.prompt or ())
            if len(keys) and not 0 <= int(keys.min()) <= int(keys.max()) < self.tokenizer.vocab_size:
                raise BadRequest(f"token ids are from 0 to {self.tokenizer.vocab_size - 1}", param="prompt")
        if not len(keys):
            raise BadRequest("the prompt is empty", param="messages" if request.messages else "prompt")
        return keys
