"""The body of POST /v1/responses and the items of a conversation as types; unknown fields are ignored."""

from typing import Annotated, Literal

from msgspec import Meta

from regrow.api.schema import Fields, Filled, FormatType, Generation, Positive, ToolChoiceMode
from regrow.errors import BadRequest


class InputText(Fields, frozen=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(Fields, frozen=True, tag_field="type", tag="output_text"):
    text: str


class Text(Fields, frozen=True, tag_field="type", tag="text"):
    text: str


class Refusal(Fields, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class InputImage(Fields, frozen=True, tag_field="type", tag="input_image"):
    """Decoded only to be refused."""


class InputFile(Fields, frozen=True, tag_field="type", tag="input_file"):
    """Decoded only to be refused."""


class InputAudio(Fields, frozen=True, tag_field="type", tag="input_audio"):
    """Decoded only to be refused."""


class SummaryText(Fields, frozen=True, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(Fields, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


ContentPart = InputText | OutputText | Text | Refusal | InputImage | InputFile | InputAudio


class Said(Fields, frozen=True):
    """An item of the type message; the type may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[ContentPart], Meta(max_length=10_000)]
    id: str | None = None


class Called(Fields, frozen=True):
    """function_call: `arguments` is a JSON text, as the model wrote it."""

    call_id: Filled
    name: Filled
    arguments: str
    id: str | None = None


class Returned(Fields, frozen=True):
    """function_call_output."""

    call_id: Filled
    output: str | Annotated[list[ContentPart], Meta(max_length=10_000)]
    id: str | None = None


class Reasoned(Fields, frozen=True):
    """reasoning: its text is `content`, or the summary where there is no other."""

    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    id: str | None = None


Item = Said | Called | Returned | Reasoned


class FunctionTool(Fields, frozen=True):
    """A tool. Only functions are served; what others have is ignored, so that they can be refused by type."""

    type: Filled
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Forced(Fields, frozen=True):
    """A tool choice that is an object."""

    type: Filled
    name: str | None = None


class TextFormat(Fields, frozen=True):
    type: FormatType
    name: str | None = None
    schema: dict[str, object] | bool | None = None


class TextConfig(Fields, frozen=True):
    format: TextFormat | None = None


class ReasoningConfig(Fields, frozen=True):
    effort: str | None = None


class ResponsesRequest(Generation, frozen=True):
    """The body of POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, object]] | None = None
    instructions: str | None = None
    previous_response_id: Filled | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoiceMode | Forced | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Positive | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    store: bool | None = None
    background: bool | None = None
    generate: bool | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    conversation: object = None
    prompt: object = None


def text_of(content: str | list[ContentPart], param: str) -> str:
    """Return the text of content; raises BadRequest for what is no text."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        match part:
            case Refusal():
                texts.append(part.refusal)
            case InputImage() | InputFile() | InputAudio():
                kind = type(part).__name__.removeprefix("Input").lower()
                reason = "this model has no vision" if kind == "image" else f"{kind} input is not served"
                field = f"{param}[{i}]"
                raise BadRequest(f"{field}: {reason}", param=field, code="unsupported_content")
            case _:
                texts.append(part.text)
    return "\n".join(texts)
