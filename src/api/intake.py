"""From a decoded chat body to the engine's request: defaults, what only the engine's facts can check, and a
clear no to what is not served yet."""

import dataclasses
import secrets
from collections.abc import Iterator, Mapping

import msgspec

from regrow.api.port import ModelInfo
from regrow.api.schema import ChatRequest, Message, NamedTool, RefusalPart, RegrowOptions, TextPart
from regrow.errors import BadRequest
from regrow.policy.request import GenerateRequest, SamplingParams

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
TEMPLATE_OWN = frozenset({"messages", "conversations", "tools", "chat_template"})
SEED_SPACE = 2**63


def generate_request(body: ChatRequest, info: ModelInfo, message_limit: int) -> GenerateRequest:
    """Return what the engine is asked for; raises BadRequest naming the field that cannot be served."""
    for param, reason in _not_served(body):
        raise BadRequest(f"{param}: {reason}", param=param, code="unsupported_value")
    if not info.has_template:
        raise BadRequest("this model has no chat template", param="messages", code="no_chat_template")
    if len(body.messages) > message_limit:
        raise BadRequest(f"messages: at most {message_limit} are allowed", param="messages")
    extension = body.regrow or RegrowOptions()
    max_tokens = _max_tokens(body)
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest("min_tokens: more than max_tokens", param="min_tokens")
    stop_token_ids = tuple(body.stop_token_ids or ())
    _check_token_ids("stop_token_ids", stop_token_ids, info)
    _check_token_ids("logit_bias", body.logit_bias or (), info)
    priority = body.priority if extension.priority is None else extension.priority
    tools = () if body.tool_choice == "none" else body.tools or ()
    return GenerateRequest(
        messages=[_message(message, i) for i, message in enumerate(body.messages)],
        tools=[msgspec.to_builtins(tool) for tool in tools],
        template_options=_template_options(body),
        sampling=_sampling(body, info.default_sampling),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        cache=extension.cache or "on",
        cache_salt=body.cache_salt,
        priority=priority or 0,
        deadline_s=None if extension.deadline_ms is None else extension.deadline_ms / 1e3,
    )


def _not_served(body: ChatRequest) -> Iterator[tuple[str, str]]:
    """Yield (field, reason) for what OpenAI allows and this server does not do yet."""
    if (body.n or 1) > 1:
        yield "n", "only 1 answer per request is served"
    if body.logprobs or body.top_logprobs:
        yield "logprobs" if body.logprobs else "top_logprobs", "log-probabilities are not served"
    if body.response_format is not None and body.response_format.type != "text":
        yield "response_format", "only the type text is served"
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        yield "tool_choice", "a call cannot be forced; only none and auto are served"
    if body.parallel_tool_calls is False:
        yield "parallel_tool_calls", "calls cannot be limited to one"
    if body.functions or body.function_call is not None:
        yield "functions" if body.functions else "function_call", "use tools instead"
    if set(body.modalities or ()) - {"text"}:
        yield "modalities", "only text is served"
    if body.audio is not None:
        yield "audio", "only text is served"


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


def _sampling(body: ChatRequest, default: SamplingParams) -> SamplingParams:
    """Return the model's defaults, overridden by what was given; without a seed the answer draws its own."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # -1 and 0 both mean: keep all
    seed = secrets.randbelow(SEED_SPACE) if body.seed is None else body.seed % SEED_SPACE
    return dataclasses.replace(default, seed=seed, **given)


def _template_options(body: ChatRequest) -> dict[str, object]:
    options = dict(body.chat_template_kwargs or {})
    if taken := sorted(TEMPLATE_OWN & options.keys()):
        raise BadRequest(
            f"chat_template_kwargs: {taken[0]} is set by the server", param=f"chat_template_kwargs.{taken[0]}"
        )
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return options


def _message(message: Message, index: int) -> dict[str, object]:
    """Return the message as templates know it: `developer` is a system message, parts are one text."""
    return {
        **msgspec.to_builtins(message),
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, f"messages[{index}].content"),
    }


def _text(message: Message, param: str) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise BadRequest(f"{param} is missing", param=param, code="missing_required_parameter")
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            kind = type(part).__name__.removesuffix("Part").lower()
            reason = "this model has no vision" if kind == "image" else f"{kind} input is not served"
            raise BadRequest(f"{param}[{i}]: {reason}", param=f"{param}[{i}]", code="unsupported_content")
    return "\n".join(texts)
