"""What a request asks for, as frozen values that every layer shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

CacheUse = Literal["on", "off", "read-only"]
Exactness = Literal["full", "cache", "off"]
ToolFormat = Literal["hermes", "qwen-xml", "llama", "lfm2"]
MOST_LOGPROBS = 20  # alternatives told at one place


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep everything.

    logprobs: tell the log-probability of each token that is drawn, and those of so many of the most likely
    ones; 0 tells that of the drawn one alone, None nothing. `gpu/logprobs.py` says of which distribution.

    seed: the request's own random stream; token i of the answer draws from (seed, i) alone, so a row's
    sample depends on nothing but its own request.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StopRules:
    """When an answer ends. Token ids are applied on the device, strings by the slot.

    token_ids: end tokens of the model and the request's own; never emitted as text.
    """

    max_tokens: int
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """The answer has to be JSON that the schema allows, or calls of tools where the request has some. field:
    where the request has the schema."""

    schema: Mapping[str, object] | bool
    field: str = "response_format.json_schema.schema"


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The answer has to call one of the tools of these names, or several where it may be `parallel`."""

    names: tuple[str, ...]
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request to the engine: either chat `messages` (rendered by the model's template) or a raw `prompt`.

    messages: OpenAI-shaped mappings with `role` and `content`. prompt: text, or token ids.
    add_special_tokens: a `prompt` of text begins with the start token, where the tokenizer adds one.
    max_tokens: None means what the context leaves. deadline_s: seconds from submission.
    stop: strings that end the answer and are not part of it. pin: index of the message at whose end a
    checkpoint is kept as long as the conversation is.
    answer: what the answer has to be; where the model thinks first, what follows that.
    forked: several requests are this one; they share one reading of the whole prompt.
    prompt_logprobs: as `sampling.logprobs`, for each token of the prompt; every one of them is then read, and
    nothing is reused.
    """

    messages: Sequence[Mapping[str, object]] = ()
    prompt: str | Sequence[int] | None = None
    add_special_tokens: bool = True
    tools: Sequence[Mapping[str, object]] = ()
    template_options: Mapping[str, object] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache: CacheUse = "on"
    cache_salt: str | None = None
    pin: int | None = None
    prompt_logprobs: int | None = None
    answer: JsonAnswer | CallAnswer | None = None
    forked: bool = False
    priority: int = 0
    deadline_s: float | None = None
