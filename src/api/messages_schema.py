"""The bodies of /v1/messages and /v1/messages/count_tokens, as Anthropic has them.

Unknown fields are ignored, `cache_control` among them: what was read is kept without being asked for.
"""

from typing import Annotated, Literal

from msgspec import Meta

from regrow.api.schema import Fields, Filled, Positive, RegrowOptions, Seed, Share


class TextBlock(Fields, frozen=True, tag_field="type", tag="text"):
    text: str


class ImageBlock(Fields, frozen=True, tag_field="type", tag="image"):
    """Decoded only to be refused."""


class DocumentBlock(Fields, frozen=True, tag_field="type", tag="document"):
    """Decoded only to be refused."""


class ThinkingBlock(Fields, frozen=True, tag_field="type", tag="thinking"):
    thinking: str


class RedactedThinkingBlock(Fields, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Of another provider: nothing that this model could read."""


class ToolUseBlock(Fields, frozen=True, tag_field="type", tag="tool_use"):
    id: Filled
    name: Filled
    input: dict[str, object]


class ToolResultBlock(Fields, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: Filled
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class Turn(Fields, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CustomTool(Fields, frozen=True):
    """`type` names a tool that the provider itself runs, where it is not custom."""

    name: Filled
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None


class ToolChoice(Fields, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields, frozen=True):
    """`budget_tokens` is ignored: how long the model thinks is its own affair."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Fields, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, object]


class OutputConfig(Fields, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Fields, frozen=True, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, object] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Positive
    stop_sequences: list[Filled] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    cache_salt: Filled | None = None
    regrow: RegrowOptions | None = None
