"""What happened, counted as it happens: one `Metrics` hears every event of every run (`Engine.watch`).

Names are vLLM's where vLLM has one, so that its dashboards work; all else is `regrow_...`. Times are those of
the events, by the engine's clock. An event costs one or two additions; what can be asked for when it is
wanted is not counted here (`figures.py`).
"""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from regrow.actors.events import Event, Failed, Finished, Mounted, Placed, Queued, ReadDone, Token, Usage

WAITS = (0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SIZES = tuple(2**power for power in range(0, 20, 2))


@dataclass(slots=True)
class _Life:
    """A run that has not ended: when it was queued, and when its last token came."""

    queued_at: float
    token_at: float | None = None


class Metrics:
    """The counters of one server, in a registry of their own; `model` is the label of all of vLLM's."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._lives: dict[str, _Life] = {}
        self._model = model

        self._ttft = self._times("vllm:time_to_first_token_seconds", "From arrival to the first token")
        self._gap = self._times("vllm:inter_token_latency_seconds", "Between two tokens of an answer", GAPS)
        self._queue = self._times("vllm:request_queue_time_seconds", "From arrival to a slot")
        self._read = self._times("vllm:request_prefill_time_seconds", "Reading what was not reused")
        self._whole = self._times("vllm:e2e_request_latency_seconds", "From arrival to the end")
        self._mount = self._own_times("mount_seconds", "Until a slot holds what is reused", WAITS)
        self._lag = self._own_times("event_loop_lag_seconds", "How late the event loop was", LAGS)

        self._prompt = self._count("vllm:prompt_tokens", "Tokens of prompts, read or reused")
        self._drawn = self._count("vllm:generation_tokens", "Tokens of answers")
        self._queries = self._count("vllm:prefix_cache_queries", "Tokens of prompts that were looked up")
        self._hits = self._count("vllm:prefix_cache_hits", "Tokens of prompts that were reused")
        self._prompts = self._times("vllm:request_prompt_tokens", "Tokens of a prompt", SIZES)
        self._answers = self._times("vllm:request_generation_tokens", "Tokens of an answer", SIZES)
        about = "Answers by how they ended"
        labels = ["model_name", "finished_reason"]
        self._ends = Counter("vllm:request_success", about, labels, registry=self._registry)
        self._failures = self._own_count("request_failures", "Requests that failed", "error")
        self._origins = self._own_count("prompt_tokens", "Where tokens of prompts came from", "how", "source")

    def heard(self, run: str, event: Event) -> None:
        """Count an event of a run."""
        if isinstance(event, Queued):
            self._lives[run] = _Life(event.at)
            return
        life = self._lives.get(run)
        if life is None:  # it was queued before anybody listened
            return
        match event:
            case Token():
                self._token(life, event.at)
            case Placed():
                self._queue.observe(event.at - life.queued_at)
            case Mounted():
                self._mount.observe(event.ms / 1e3)
            case ReadDone():
                self._read.observe(event.ms / 1e3)
            case Finished() | Failed():
                del self._lives[run]
                self._ended(life, event)

    def lag(self, seconds: float) -> None:
        """Count how late the event loop was."""
        self._lag.observe(seconds)

    def exposition(self) -> bytes:
        """Return all of this in Prometheus's text format."""
        return generate_latest(self._registry)

    def _token(self, life: _Life, at: float) -> None:
        if life.token_at is None:
            self._ttft.observe(at - life.queued_at)
        else:
            self._gap.observe(at - life.token_at)
        life.token_at = at

    def _ended(self, life: _Life, end: Finished | Failed) -> None:
        self._whole.observe(end.at - life.queued_at)
        self._count_tokens(end.usage)
        if end.usage.cached:
            self._origins.labels("reused", end.reuse.source).inc(end.usage.cached)
        if isinstance(end, Failed):
            self._failures.labels(type(end.error).__name__).inc()
        else:
            self._ends.labels(self._model, end.reason).inc()

    def _count_tokens(self, usage: Usage) -> None:
        self._prompt.inc(usage.prompt)
        self._drawn.inc(usage.completion)
        self._queries.inc(usage.prompt)
        self._hits.inc(usage.cached)
        self._prompts.observe(usage.prompt)
        self._answers.observe(usage.completion)
        self._origins.labels("read", "none").inc(usage.prompt - usage.cached)

    def _times(self, name: str, about: str, buckets: tuple[float, ...] = WAITS) -> Histogram:
        made = Histogram(name, about, ["model_name"], registry=self._registry, buckets=buckets)
        return made.labels(self._model)

    def _count(self, name: str, about: str) -> Counter:
        return Counter(name, about, ["model_name"], registry=self._registry).labels(self._model)

    def _own_times(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"regrow_{name}", about, registry=self._registry, buckets=buckets)

    def _own_count(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"regrow_{name}", about, labels, registry=self._registry)
