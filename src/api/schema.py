"""The bodies of requests as types; what does not decode to them is a 400 (`body.py`).

Unknown fields are ignored. A field of OpenAI's that is not served yet stands here too, so that a request
that relies on it is refused (`intake.py`) instead of half answered. null means: not given.
"""

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from regrow.policy.request import CacheUse

Role = Literal["system", "developer", "user", "assistant", "tool"]
ToolChoiceMode = Literal["none", "auto", "required"]
FormatType = Literal["text", "json_object", "json_schema"]

Filled = Annotated[str, Meta(min_length=1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Fields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every part of a body."""


class TextPart(Fields, frozen=True, tag_field="type", tag="text"):
    text: str


class RefusalPart(Fields, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class ImagePart(Fields, frozen=True, tag_field="type", tag="image_url"):
    """Decoded only to be refused."""


class AudioPart(Fields, frozen=True, tag_field="type", tag="input_audio"):
    """Decoded only to be refused."""


class FilePart(Fields, frozen=True, tag_field="type", tag="file"):
    """Decoded only to be refused."""


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class CalledFunction(Fields, frozen=True):
    """`arguments` is a JSON text, as the model wrote it."""

    name: Filled
    arguments: str


class ToolCall(Fields, frozen=True):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Message(Fields, frozen=True):
    role: Role
    content: str | Annotated[list[Part], Meta(max_length=10_000)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Fields, frozen=True):
    name: Filled
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(Fields, frozen=True):
    type: Literal["function"]
    function: Function


class NamedFunction(Fields, frozen=True):
    name: Filled


class NamedTool(Fields, frozen=True):
    """A tool choice that forces one function."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Fields, frozen=True):
    include_usage: bool | None = None


class JsonSchema(Fields, frozen=True):
    """`name`, `description` and `strict` change nothing: what is asked for is always enforced."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Fields, frozen=True):
    type: FormatType
    json_schema: JsonSchema | None = None


class RegrowOptions(Fields, frozen=True):
    """The extension object. `deadline_ms` counts from when the request is queued; `pin` is the index of a
    message at whose end a checkpoint is kept."""

    progress: bool | None = None
    cache: CacheUse | None = None
    pin: Count | None = None
    priority: int | None = None
    deadline_ms: Positive | None = None


class Generation(Fields, frozen=True):
    """What every request for an answer can say: how to draw, when to stop, how to answer."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2.0)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None

    max_tokens: Positive | None = None
    min_tokens: Count | None = None
    stop: Filled | Annotated[list[Filled], Meta(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: Filled | None = None
    regrow: RegrowOptions | None = None

    n: Annotated[int, Meta(ge=1, le=128)] | None = None


class ChatBody(Generation, frozen=True):
    """A chat. Routes that only show what becomes of one take the same body and ignore its other fields."""

    model: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceMode | NamedTool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(ChatBody, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]

    max_completion_tokens: Positive | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    functions: list[object] | None = None
    function_call: object = None
    modalities: list[str] | None = None
    audio: object = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """The body of /v1/completions. `prompt`: a text, token ids, or a list of either."""

    model: str
    prompt: str | list[str | TokenId | list[TokenId]]

    add_special_tokens: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Positive | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


class TokenizeRequest(ChatBody, frozen=True):
    """The body of /tokenize: a `text` (vLLM calls it `prompt`), or the `messages` of a chat."""

    text: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    cuts: bool | None = None


class DetokenizeRequest(Fields, frozen=True, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class TemplateRequest(ChatBody, frozen=True, kw_only=True):
    """The body of /apply-template."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    tokens: bool | None = None


# What a choice may be, by the end of its path; [] stands for any index.
ALLOWED: dict[str, tuple[str, ...]] = {
    "role": get_args(Role),
    "tool_choice": get_args(ToolChoiceMode),
    "response_format.type": get_args(FormatType),
    "regrow.cache": get_args(CacheUse),
    "tools[].type": ("function",),
    "tool_choice.type": ("function",),
    "tool_calls[].type": ("function",),
    "content[].type": ("text", "refusal", "image_url", "input_audio", "file"),
}
