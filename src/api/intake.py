"""From a decoded body to what the engine is asked for: defaults, what only the engine's facts can check, and
a clear no to what is not served yet."""

import dataclasses
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from regrow.api.chat_prompt import chat_prompt
from regrow.api.port import ModelInfo
from regrow.api.schema import ChatRequest, CompletionRequest, Generation, NamedTool, RegrowOptions
from regrow.errors import BadRequest
from regrow.policy.request import CallAnswer, GenerateRequest, JsonAnswer, SamplingParams

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
SEED_SPACE = 2**63
COMPLETION_TOKENS = 16  # what /v1/completions answers with where max_tokens is not given, as OpenAI does
PROMPT_LIMIT = 2048


def chat_request(body: ChatRequest, info: ModelInfo, message_limit: int) -> GenerateRequest:
    """Return what the engine is asked for; raises BadRequest naming the field that cannot be served."""
    _refuse(_not_served_in_chat(body))
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: only together with logprobs", param="top_logprobs")
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    prompt = dataclasses.replace(chat_prompt(body, info, message_limit), answer=_answer(body, info))
    return _asked(body, prompt, _max_tokens(body), logprobs, info)


def forks(request: GenerateRequest, n: int) -> list[GenerateRequest]:
    """Return `n` requests with one prompt, which is read once, and random streams of their own."""
    seeds = [(request.sampling.seed + i) % SEED_SPACE for i in range(n)]
    samplings = [dataclasses.replace(request.sampling, seed=seed) for seed in seeds]
    return [dataclasses.replace(request, sampling=sampling, forked=n > 1) for sampling in samplings]


def _answer(body: ChatRequest, info: ModelInfo) -> JsonAnswer | CallAnswer | None:
    """Return what the answer has to be; raises BadRequest naming the field."""
    names = tuple(tool.function.name for tool in body.tools or ())
    parallel = body.parallel_tool_calls is not False and info.parallel_calls
    if isinstance(body.tool_choice, NamedTool):
        if body.tool_choice.function.name not in names:
            raise BadRequest(
                f"tool_choice: there is no tool {body.tool_choice.function.name!r}", param="tool_choice"
            )
        return CallAnswer((body.tool_choice.function.name,), parallel=False)
    if body.tool_choice == "required":
        if not names:
            raise BadRequest("tool_choice: there are no tools", param="tool_choice")
        return CallAnswer(names, parallel)
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return JsonAnswer({"type": "object"}, "response_format")
    if form.json_schema is None or form.json_schema.schema is None:
        field = "response_format.json_schema" + ("" if form.json_schema is None else ".schema")
        raise BadRequest(f"{field} is missing", param=field, code="missing_required_parameter")
    return JsonAnswer(form.json_schema.schema)


def completion_requests(body: CompletionRequest, info: ModelInfo) -> list[GenerateRequest]:
    """Return what the engine is asked for, a request for each prompt; raises BadRequest naming the field."""
    _refuse(_not_served_in_completions(body))
    special = body.add_special_tokens is not False
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    echoed = body.logprobs if body.echo else None
    prompts = [
        GenerateRequest(prompt=prompt, add_special_tokens=special, prompt_logprobs=echoed)
        for prompt in _prompts(body.prompt)
    ]
    asked = [_asked(body, prompt, max_tokens, body.logprobs, info) for prompt in prompts]
    return [fork for request in asked for fork in forks(request, body.n or 1)]


def _asked(
    body: Generation, prompt: GenerateRequest, max_tokens: int | None, logprobs: int | None, info: ModelInfo
) -> GenerateRequest:
    """Return `prompt` with all that a body says of its answer."""
    extension = body.regrow or RegrowOptions()
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens: more than max_tokens, which is {max_tokens}", param="min_tokens")
    stop_token_ids = tuple(body.stop_token_ids or ())
    _check_token_ids("stop_token_ids", stop_token_ids, info)
    _check_token_ids("logit_bias", body.logit_bias or (), info)
    priority = body.priority if extension.priority is None else extension.priority
    return dataclasses.replace(
        prompt,
        sampling=dataclasses.replace(_sampling(body, info.default_sampling), logprobs=logprobs),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        cache=extension.cache or "on",
        cache_salt=body.cache_salt,
        pin=extension.pin,
        priority=priority or 0,
        deadline_s=None if extension.deadline_ms is None else extension.deadline_ms / 1e3,
    )


def _refuse(reasons: Iterable[tuple[str, str]]) -> None:
    for param, reason in reasons:
        raise BadRequest(f"{param}: {reason}", param=param, code="unsupported_value")


def _not_served_in_chat(body: ChatRequest) -> Iterator[tuple[str, str]]:
    """Yield (field, reason) for what OpenAI allows and this server does not do."""
    if body.functions or body.function_call is not None:
        yield "functions" if body.functions else "function_call", "use tools instead"
    if set(body.modalities or ()) - {"text"}:
        yield "modalities", "only text is served"
    if body.audio is not None:
        yield "audio", "only text is served"


def _not_served_in_completions(body: CompletionRequest) -> Iterator[tuple[str, str]]:
    if body.suffix:
        yield "suffix", "a text cannot be filled in before another"
    if body.best_of not in (None, body.n or 1):
        yield "best_of", "all answers are given: it can only be what n is"


def _prompts(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the prompts that the four forms of the field stand for."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if len(kinds) > 1:
        raise BadRequest("prompt: texts, token ids and lists of token ids cannot be mixed", param="prompt")
    if not given:
        raise BadRequest("prompt: the list is empty", param="prompt")
    if kinds == {int}:
        return [cast(list[int], given)]
    if len(given) > PROMPT_LIMIT:
        raise BadRequest(f"prompt: at most {PROMPT_LIMIT} are allowed", param="prompt")
    return cast(list[str | list[int]], given)


def _max_tokens(body: ChatRequest) -> int | None:
    given = {n for n in (body.max_tokens, body.max_completion_tokens) if n is not None}
    if len(given) > 1:
        raise BadRequest("max_tokens: differs from max_completion_tokens; give one", param="max_tokens")
    return given.pop() if given else None


def _check_token_ids(param: str, ids: tuple[int, ...] | Mapping[int, float], info: ModelInfo) -> None:
    if over := [token for token in ids if token >= info.vocab_size]:
        raise BadRequest(
            f"{param}: {over[0]} is not a token id; the vocabulary has {info.vocab_size}", param=param
        )


def _sampling(body: Generation, default: SamplingParams) -> SamplingParams:
    """Return the model's defaults, overridden by what was given; without a seed the answer draws its own."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # -1 and 0 both mean: keep all
    seed = secrets.randbelow(SEED_SPACE) if body.seed is None else body.seed % SEED_SPACE
    return dataclasses.replace(default, seed=seed, **given)
