"""Constrained decoding: the mask of a request that says what its answer has to be.

llguidance works out which tokens may come next, on a thread of its own while the model runs: a mask is begun
as soon as the token before it is known, and waited for only when the next one is drawn. Each request has a
matcher of its own, so the rows of a step do not touch each other.

A model that thinks may do so first: inside its thinking tags nothing is forbidden but to end there.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import structlog
import torch
from llguidance import LLMatcher, LLTokenizer

from regrow.errors import BadRequest
from regrow.models.answer_reader import ThinkingTags
from regrow.models.grammar import call_grammar, call_rules, json_grammar
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.request import CallAnswer, GenerateRequest, JsonAnswer

log = structlog.get_logger(__name__)
KEPT = 64  # compiled grammars


class Grammars:
    """Makes masks for one tokenizer. What is slow (the trie of the tokens, compiling) is done once, by the
    first request that needs it; thread-safe. `close` ends the thread."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._trie: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mask")

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)

    def mask(self, request: GenerateRequest, thinks: bool) -> "GrammarMask | None":
        """Return the mask of a request, None where its answer may be anything; raises BadRequest naming the
        field. thinks: the prompt ends inside the thinking tags."""
        answer = request.answer
        if answer is None:
            return None
        if request.ignore_eos:
            raise BadRequest("ignore_eos: not together with an answer of a given form", param="ignore_eos")
        tags = self._tokenizer.thinking
        opening = None if tags is None or thinks else self._tokenizer.id_of(tags.open)
        return GrammarMask(
            self._matcher(request, answer),
            self._worker,
            self._tokenizer.token_bytes,
            sorted(self._tokenizer.eos_ids),
            tags if thinks or opening is not None else None,
            opening,
        )

    def conforms(self, answer: JsonAnswer, text: str) -> bool:
        """Whether a text is what was asked for: read again as a whole, apart from how it was drawn."""
        matcher = self._compile(json_grammar(answer), answer.field)
        tokens = self._tokenizer.encode(text, add_special_tokens=False).tolist()
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def _matcher(self, request: GenerateRequest, answer: JsonAnswer | CallAnswer) -> LLMatcher:
        names = [_name(tool) for tool in request.tools]
        if isinstance(answer, JsonAnswer):
            free = CallAnswer(tuple(map(str, names))) if names else None
            rules = None if free is None else self._rules(free, request)
            return self._compile(json_grammar(answer, rules), answer.field)
        if missing := [name for name in answer.names if name not in names]:
            raise BadRequest(f"tool_choice: there is no tool {missing[0]!r}", param="tool_choice")
        field = f"tools[{names.index(answer.names[0])}]" if len(answer.names) == 1 else "tools"
        return self._compile(call_grammar(self._rules(answer, request)), field)

    def _rules(self, answer: CallAnswer, request: GenerateRequest) -> str:
        return call_rules(answer, request.tools, self._tokenizer.tool_format, self._mark)

    def _compile(self, grammar: str, field: str) -> LLMatcher:
        """Return a fresh matcher; raises BadRequest where the grammar asks for what cannot be enforced."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = LLMatcher(self._tokens(), LLMatcher.grammar_from_lark(grammar), log_level=0)
                if found.is_error() or not self._begins(found.deep_copy()):
                    reason = _reason(found.get_error()) or "no answer can be of this form"
                    raise BadRequest(f"{field}: {reason}", param=field, code="unsupported_schema")
                self._compiled[grammar] = found
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found.deep_copy()

    def _begins(self, matcher: LLMatcher) -> bool:
        """Whether any answer can begin with more than white space."""
        first = _allowed(matcher).nonzero()[0].tolist()
        return any(self._tokenizer.token_bytes(token).strip() for token in first)

    def _tokens(self) -> LLTokenizer:
        if self._trie is None:
            self._trie = LLTokenizer(
                self._tokenizer.definition(), eos_token=sorted(self._tokenizer.eos_ids) or None
            )
        return self._trie

    def _mark(self, mark: str) -> str:
        """Return a mark as a terminal: its token where that is a special one, else its text."""
        token = self._tokenizer.id_of(mark)
        with self._lock:
            special = token is not None and self._tokens().is_special_token(token)
        return f"<[{token}]>" if special else f'"{mark}"'


class GrammarMask:
    """Of one request. spell: the bytes of a token. ends: tokens that end an answer. tags: of a model that is
    thinking, or may begin to with the token `opening`."""

    def __init__(
        self,
        matcher: LLMatcher,
        worker: ThreadPoolExecutor,
        spell: Callable[[int], bytes],
        ends: Sequence[int],
        tags: ThinkingTags | None,
        opening: int | None,
    ) -> None:
        self._matcher = matcher
        self._ends = ends
        self._worker = worker
        self._spell = spell
        self._close = b"" if tags is None else tags.close.encode()
        self._opening = opening
        self._thinking = tags is not None and opening is None
        self._said = b""
        self._forbidden: Future[torch.Tensor] = worker.submit(self._work_out)

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits [vocab] of forbidden tokens to -inf, in place."""
        if self._thinking:  # anything but the end: what is asked for comes after it
            logits[self._ends] = -torch.inf
            return
        forbidden = self._forbidden.result()[: len(logits)].to(logits.device)
        opening = None if self._opening is None else logits[self._opening].clone()
        logits[: len(forbidden)].masked_fill_(forbidden, -torch.inf)
        logits[len(forbidden) :] = -torch.inf
        if opening is not None:
            logits[self._opening] = opening

    def accept(self, token: int) -> None:
        """Advance by the token that was drawn."""
        if self._thinking:
            self._said = (self._said + self._spell(token))[-64:]
            self._thinking = self._close not in self._said
            return
        opened, self._opening = token == self._opening, None
        if opened:
            self._thinking = True
        else:
            self._forbidden = self._worker.submit(self._work_out, token)

    def _work_out(self, *drawn: int) -> torch.Tensor:
        """Return which tokens are forbidden after the next ones, bool [vocab]; runs on the worker."""
        self._matcher.consume_tokens(list(drawn))
        allowed = _allowed(self._matcher)
        if (
            self._matcher.is_error() or not allowed.any()
        ):  # a dead end, or a limit of the matcher: the answer ends, not as it should
            log.warning("structured output broke off", reason=self._matcher.get_error())
            allowed[self._ends] = 1
        return torch.from_numpy(allowed == 0)


def _allowed(matcher: LLMatcher) -> npt.NDArray[np.uint8]:
    """Return 1 for each token that may come next, else 0, [vocab]."""
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")


def _reason(error: str) -> str:
    """Return what llguidance says is wrong, without where that stands in the grammar that was made."""
    return re.sub(r"(?s)\A(at \d+\(\d+\): )?(failed to compile JSON schema: )?|\n\s*\d+ \| .*", "", error)[
        :500
    ]


def _name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None
