"""What is done with one prompt on its way, and what is counted when its answer has passed.

All of it is a function of the body's bytes, the clock and the book: no HTTP. The proxy calls `consider` on a
thread of its own, `finished` once for every prompt considered.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from regrow.api.relay.bodies import Body, Style, Unreadable, unpacked
from regrow.api.relay.counts import Counts
from regrow.api.relay.prices import Price, Prices, Tokens
from regrow.policy.attribution import Attribution, Sent, attribute
from regrow.policy.cold_prefix import (
    RULES,
    Book,
    Rules,
    Turn,
    is_cold,
    latches_of,
    prune_decision,
    repack_decision,
    settle,
)
from regrow.policy.history import Message, prune
from regrow.store.originals import Originals
from regrow.store.touches import Touches

Decision = Literal["pass", "cold", "sticky", "prune", "unreadable"]
CHATS = 512  # whose last prefix is remembered for the attribution

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Considered:
    """A prompt that was looked into. body: what to send, the very object that came where nothing changes.

    removed: the part of the bytes sent that was left out (in a dry run: would be). opening, key: of its chat.
    """

    body: bytes
    changed: bool = False
    decision: Decision = "unreadable"
    removed: float = 0.0
    price: Price | None = None
    opening: str | None = None
    key: str | None = None


class Decider:
    """The rules with their state: the touches, the originals, what chats sent last.

    touches: None where the operator opted into nothing (C6).
    """

    def __init__(
        self,
        touches: Touches | None,
        originals: Originals,
        prices: Prices,
        counts: Counts,
        now: Callable[[], float],
        *,
        repack_cold: bool = False,
        prune: bool = False,
        dry_run: bool = False,
        rules: Rules = RULES,
    ) -> None:
        self._touches, self._originals, self._prices, self._counts = touches, originals, prices, counts
        self._now = now
        self._repack_cold, self._prune, self._dry_run, self._rules = repack_cold, prune, dry_run, rules
        self._lock = threading.Lock()
        self._sent: OrderedDict[str, Sent] = OrderedDict()

    def consider(self, style: Style, body: bytes, encoding: str = "") -> Considered:
        """Decide on one request and open its response."""
        try:
            read = Body.read(unpacked(body, encoding))
            price = self._prices.of(read.model)
            turn = read.turn(style, price)
        except Unreadable as reason:
            log.debug("unreadable body", reason=str(reason))
            self._counts.decided("unreadable", "no prefix", None)
            return Considered(body)
        attribution = self._attribute(turn)
        decision, messages = self._decide(turn, price)
        considered = Considered(body, False, decision, 0.0, price, turn.opening, turn.key)
        if messages is not turn.messages:
            short = read.with_messages(messages)
            removed = len(read.text) - len(short)
            if self._dry_run:
                considered = replace(considered, removed=removed / len(read.text))
            else:
                considered = replace(considered, body=short, changed=True, removed=removed / len(short))
        self._counts.decided(decision, attribution.cause, attribution.where)
        log.info(
            "turn",
            decision=decision,
            cause=attribution.cause,
            where=attribution.where,
            messages=len(turn.messages),
            removed=round(considered.removed, 3),
            chat=(turn.key or "")[:8],
        )
        return considered

    def finished(self, considered: Considered, tokens: Tokens | None) -> None:
        """Count an answer that has ended, however it did; its last byte is a touch (C4). Never blocks."""
        if considered.key is not None and self._touches is not None:
            self._touches.ended(considered.key)
        if considered.opening is not None:
            with self._lock:
                if sent := self._sent.get(considered.opening):
                    self._sent[considered.opening] = replace(sent, touched=self._now())
        if tokens is not None:
            self._counts.billed(tokens, considered.price, considered.removed * tokens.prompt)

    def _attribute(self, turn: Turn) -> Attribution:
        now = self._now()
        with self._lock:
            before = None if turn.opening is None else self._sent.get(turn.opening)
            if turn.opening is not None:
                self._sent[turn.opening] = Sent.of(turn, now)
                self._sent.move_to_end(turn.opening)
                if len(self._sent) > CHATS:
                    self._sent.popitem(last=False)
        return attribute(before, turn, now)

    def _decide(self, turn: Turn, price: Price | None) -> tuple[Decision, Sequence[Message]]:
        """Return what to do and the messages to send: `turn.messages` itself where nothing changes."""
        if self._touches is None or turn.key is None:
            return "pass", turn.messages
        key = turn.key

        def step(book: Book, now: float) -> tuple[tuple[Decision, list[tuple[int, int]]], Book]:
            limits = (self._rules, price.minimum if price else 0)
            cold = self._repack_cold and is_cold(book, turn, now, *limits)
            if self._repack_cold:
                repack, book = repack_decision(book, turn, now, *limits)
            else:
                repack, book = settle(book, turn, False, now)
            if self._prune:
                book = prune_decision(book, turn, now)
            held = latches_of(book[key].latches, turn)
            spans = [(latch.start, latch.boundary) for latch in held if repack or self._prune]
            decision: Decision = "cold" if cold else "sticky" if repack else "prune" if spans else "pass"
            return (decision, spans), book

        decision, spans = self._touches.decide(key, step)
        messages = turn.messages
        for start, boundary in spans:
            pruned = prune(messages, boundary, start)
            if pruned.originals:
                self._keep(pruned.originals)
                messages = pruned.messages
        return decision, messages

    def _keep(self, originals: Mapping[str, str]) -> None:
        """Keep what is left out; nothing is lost where that fails, since the client sends it all again."""
        if self._dry_run:
            return
        try:
            self._originals.keep(originals)
        except OSError as error:
            log.warning("originals cannot be kept", reason=str(error))
