"""From a request to something that can be queued: rendered, tokenised, planned, checked.

Runs on a worker thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from regrow.actors.messages import Prepared
from regrow.errors import BadRequest, ContextLengthExceeded, TooManyTokens
from regrow.models.constrain import Grammars
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.checkpoints import CheckpointCut, checkpoint_cuts, message_end, system_end
from regrow.policy.keys import Keys, Namespace, as_keys, prefix_hashes
from regrow.policy.plan import ChunkTable, ReadPlan, build_plan
from regrow.policy.request import MOST_LOGPROBS, CacheUse, GenerateRequest, StopRules

LONGEST = 2**20  # tokens of a prompt that is only looked at


@dataclass(frozen=True, slots=True)
class Preparer:
    """What preparing needs to know of the model and the settings. context: tokens a slot holds. cache: False
    turns it off for every request."""

    tokenizer: ChatTokenizer
    table: ChunkTable
    namespace: Namespace
    context: int
    checkpoints: int
    checkpoint_every: int
    grammars: Grammars
    cache: bool = True

    def __call__(self, request: GenerateRequest) -> Prepared:
        """Raises BadRequest naming the field, or ContextLengthExceeded with both numbers."""
        try:
            keys, plan = self.plan_of(request, self.context)
        except TooManyTokens as error:
            field = _field(request)
            raise ContextLengthExceeded(error.tokens, request.max_tokens, self.context, field) from None
        if not len(keys):
            raise BadRequest("the prompt is empty", param=_field(request))
        room = self.context - len(keys)
        wanted_tokens = request.max_tokens if request.max_tokens is not None else max(room, 1)
        if wanted_tokens < 1:
            raise BadRequest("max_tokens must be at least 1", param="max_tokens")
        if wanted_tokens > room:
            raise ContextLengthExceeded(len(keys), request.max_tokens, self.context, _field(request))
        if not all(request.stop):
            raise BadRequest("stop: a stop string cannot be empty", param="stop")
        self._known(request.stop_token_ids, "stop_token_ids")
        self._known(tuple(request.sampling.logit_bias), "logit_bias")
        for asked in (request.sampling.logprobs, request.prompt_logprobs):
            if asked is not None and not 0 <= asked <= MOST_LOGPROBS:
                raise BadRequest(f"logprobs: from 0 to {MOST_LOGPROBS} are told", param="logprobs")
        namespace = self.namespace.salted(request.cache_salt)
        cache = request.cache if self.cache else "off"
        pin = 0 if request.pin is None else _pinned(request, plan)
        checkpoints = self._checkpoints(plan, cache, pin)
        if request.forked and cache == "on" and plan.is_cut(plan.length - 1):
            checkpoints = [*checkpoints, CheckpointCut(plan.length - 1, "fork", protected=True)]
        ends = frozenset(self.tokenizer.eos_ids)
        thinks = self.tokenizer.thinks(keys)
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
                min_tokens=0 if request.answer else request.min_tokens,  # the grammar says when it ends
            ),
            banned=ends if request.ignore_eos else frozenset(),
            cache=cache,
            cache_salt=request.cache_salt,
            priority=request.priority,
            deadline_s=request.deadline_s,
            prompt_logprobs=request.prompt_logprobs,
            mask=self.grammars.mask(request, thinks),
            thinks=thinks,
        )

    def _checkpoints(self, plan: ReadPlan, cache: CacheUse, pin: int) -> Sequence[CheckpointCut]:
        """Return which cuts get a checkpoint: none with the cache off, the root in read-only use (S9)."""
        if cache == "off":
            return ()
        cuts = checkpoint_cuts(plan, self.checkpoint_every, (), self.checkpoints, pin)
        return cuts if cache == "on" else [cut for cut in cuts if cut.position == system_end(plan)]

    def plan_of(self, request: GenerateRequest, most: int = LONGEST) -> tuple[Keys, ReadPlan]:
        """Return a prompt of at most `most` tokens, and where its reading is cut; raises BadRequest naming
        the field."""
        keys = self._keys(request, most)
        plan = build_plan(keys, self.table, self.tokenizer.marks)
        return keys, plan.cut_at_end() if request.forked else plan

    def beyond_root(self, request: GenerateRequest) -> frozenset[bytes]:
        """Return the prefix hashes at the cuts past the system prompt; raises BadRequest naming the field."""
        keys, plan = self.plan_of(request)
        hashes = prefix_hashes(self.namespace.salted(request.cache_salt), keys, plan.cuts)
        root = system_end(plan)
        return frozenset(key for cut, key in zip(plan.cuts, hashes, strict=True) if cut > root)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; raises BadRequest for what is no id."""
        return self.tokenizer.decode(self._known(ids, "tokens"), skip_special_tokens=False)

    def _keys(self, request: GenerateRequest, most: int) -> Keys:
        if request.messages and request.prompt is not None:
            raise BadRequest("prompt: give messages or a prompt, not both", param="prompt")
        if request.messages:
            chat = request.messages, request.tools, request.template_options
            return self.tokenizer.encode_chat(*chat, most, request.cache_salt)
        if isinstance(request.prompt, str):
            return self.tokenizer.encode(request.prompt, request.add_special_tokens, most)
        return self._known(request.prompt or (), "prompt")

    def _known(self, ids: Sequence[int], param: str) -> Keys:
        keys = as_keys(ids)
        if len(keys) and not 0 <= int(keys.min()) <= int(keys.max()) < self.tokenizer.vocab_size:
            raise BadRequest(f"{param}: token ids are from 0 to {self.tokenizer.vocab_size - 1}", param=param)
        return keys


def _pinned(request: GenerateRequest, plan: ReadPlan) -> int:
    """Return where the message that the client pins ends."""
    messages = len(request.messages)
    if request.pin is None or not 0 <= request.pin < messages:
        allowed = f"regrow.pin is the index of a message, from 0 to {messages - 1}"
        raise BadRequest(allowed, param="regrow.pin")
    return message_end(plan, request.pin, messages)


def _field(request: GenerateRequest) -> str:
    """Return the name of the field that holds the prompt."""
    return "messages" if request.messages else "prompt"
