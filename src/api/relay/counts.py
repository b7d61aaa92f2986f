"""What the relay did, as Prometheus metrics and as the numbers of `/relay/status`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from regrow.api.relay.prices import Price, Tokens

Numbers = dict[str, object]
KINDS = ("fresh", "read", "written_5m", "written_1h", "output")


class Counts:
    """One relay's counters, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Responses passed on", "status")
        self._decisions = self._counter("decisions", "What was done with prompts", "decision")
        self._turns = self._counter("turns", "Turns by what became of their cached prefix", "cause")
        self._changes = self._counter("prefix_changes", "Changed prefixes by the part that changed", "part")
        self._tokens = self._counter("tokens", "Tokens that responses were billed for", "kind")
        self._unmeasured = self._counter("unmeasured", "Responses whose usage could not be read")
        self._unpriced = self._counter("unpriced", "Responses of models without a price")
        self._broken = self._counter("broken", "Requests that the upstream did not finish", "when")
        self._cost = self._counter("cost_usd", "Dollars that responses cost, by the table of prices")
        self._removed = self._counter("removed_tokens", "Tokens left out of prompts, estimated")
        self._saved = self._counter("saved_usd", "Dollars saved by leaving tokens out, estimated")
        self.conversations = Gauge(
            "regrow_relay_conversations", "Conversations that are tracked", registry=self._registry
        )

    def decided(self, decision: str, cause: str, where: str | None) -> None:
        self._decisions.labels(decision).inc()
        self._turns.labels(cause).inc()
        if where is not None:
            self._changes.labels(where.partition("[")[0]).inc()

    def answered(self, status: int) -> None:
        self._requests.labels(str(status)).inc()

    def broke(self, when: str) -> None:
        self._broken.labels(when).inc()

    def billed(self, tokens: Tokens, price: Price | None, removed: float) -> None:
        """Count one response's usage. removed: tokens that its prompt was sent without."""
        for kind in KINDS:
            self._tokens.labels(kind).inc(getattr(tokens, kind))
        self._removed.inc(removed)
        if price is None:
            self._unpriced.inc()
            return
        self._cost.inc(price.cost(tokens))
        self._saved.inc(price.saved(removed, tokens))

    def unmeasured(self) -> None:
        self._unmeasured.inc()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def numbers(self) -> Numbers:
        """Return all counters by name; those with a label as an object."""
        found: Numbers = {}
        for metric in self._registry.collect():
            name = metric.name.removeprefix("regrow_relay_")
            samples = [s for s in metric.samples if not s.name.endswith("_created")]
            labelled = {next(iter(s.labels.values())): s.value for s in samples if s.labels}
            found[name] = labelled if labelled or not samples else sum(s.value for s in samples)
        return found

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"regrow_relay_{name}", about, labels, registry=self._registry)
