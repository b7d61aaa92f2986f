"""From a body of Anthropic's to the same request in OpenAI's shape, which everything behind understands.

The results of tools become messages of their own, before or after the text that stands beside them, in their
order; thinking goes back to the template as the reasoning of its message.
"""

import json
from collections.abc import Iterable, Iterator

from regrow.api.messages_schema import (
    CountRequest,
    CustomTool,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    OutputConfig,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from regrow.api.schema import (
    CalledFunction,
    ChatRequest,
    Function,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoiceMode,
)
from regrow.api.stamps import without_stamps
from regrow.errors import BadRequest

CHOICES: dict[str, ToolChoiceMode] = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: CountRequest, keep_stamps: bool) -> ChatRequest:
    """Return the request as a chat; raises BadRequest naming the field that cannot be served."""
    system = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    if not keep_stamps:
        system = [text for text in map(without_stamps, system) if text]
    messages = [Message(role="system", content="\n".join(system))] if system else []
    names: dict[str, str] = {}
    for i, turn in enumerate(body.messages):
        messages.extend(_messages(turn, f"messages[{i}].content", names))
    config = body.output_config or OutputConfig()
    form = body.output_format or config.format
    choice = body.tool_choice
    chat = ChatRequest(
        model=body.model,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())],
        tool_choice=None if choice is None else _choice(choice.type, choice.name),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        reasoning_effort=config.effort,
        chat_template_kwargs=_options(body),
        continue_final_message=True if body.messages[-1].role == "assistant" else None,
        response_format=None
        if form is None
        else ResponseFormat("json_schema", JsonSchema(schema=form.schema)),
    )
    return chat if not isinstance(body, MessagesRequest) else _asked(chat, body)


def _asked(chat: ChatRequest, body: MessagesRequest) -> ChatRequest:
    return ChatRequest(
        **{field: getattr(chat, field) for field in chat.__struct_fields__}
        | {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "seed": body.seed,
            "cache_salt": body.cache_salt,
            "regrow": body.regrow,
        }
    )


def _options(body: CountRequest) -> dict[str, object]:
    """Thinking is off unless it is asked for, as Anthropic has it; "adaptive" leaves it to the template."""
    kind = body.thinking.type if body.thinking is not None else "disabled"
    thinking: dict[str, object] = {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}
    return {**thinking, **(body.chat_template_kwargs or {})}


def _tool(tool: CustomTool, field: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise BadRequest(f"{field}.type: only custom tools are served, not {tool.type!r}", f"{field}.type")
    if tool.input_schema is None:
        raise BadRequest(f"{field}.input_schema is missing", f"{field}.input_schema")
    return Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice(kind: str, name: str | None) -> ToolChoiceMode | NamedTool:
    if kind != "tool":
        return CHOICES[kind]
    if not name:
        raise BadRequest("tool_choice.name is missing", param="tool_choice.name")
    return NamedTool("function", NamedFunction(name))


def _messages(turn: Turn, field: str, names: dict[str, str]) -> Iterator[Message]:
    """Yield the messages that a turn stands for. names: of the tools by the ids of their calls so far."""
    if isinstance(turn.content, str):
        yield Message(turn.role, turn.content)
    elif turn.role == "assistant":
        yield _answer(turn, field, names)
    else:
        yield from _question(turn, field, names)


def _answer(turn: Turn, field: str, names: dict[str, str]) -> Message:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(turn.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                names[block.id] = block.name
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(CalledFunction(block.name, arguments), block.id, "function"))
            case RedactedThinkingBlock():
                continue
            case _:
                raise _refused(block, f"{field}[{i}]")
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _question(turn: Turn, field: str, names: dict[str, str]) -> Iterator[Message]:
    texts: list[str] = []
    for i, block in enumerate(turn.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                if texts:
                    yield Message(turn.role, "\n".join(texts))
                    texts = []
                content = [block.content] if isinstance(block.content, str) else block.content or ()
                text = "\n".join(_texts(content, f"{field}[{i}].content"))
                name = names.get(block.tool_use_id)
                yield Message("tool", text, name, tool_call_id=block.tool_use_id)
            case _:
                raise _refused(block, f"{field}[{i}]")
    if texts or not turn.content:
        yield Message(turn.role, "\n".join(texts))


def _texts(content: Iterable[object], field: str) -> Iterator[str]:
    for i, part in enumerate(content):
        if isinstance(part, str):
            yield part
        elif isinstance(part, TextBlock):
            yield part.text
        else:
            raise _refused(part, f"{field}[{i}]")


def _refused(block: object, field: str) -> BadRequest:
    match block:
        case ImageBlock():
            reason = "this model has no vision"
        case DocumentBlock():
            reason = "documents are not served; send their text"
        case _:
            reason = f"a {type(block).__struct_config__.tag} block cannot stand in this message"  # type: ignore[attr-defined]
    return BadRequest(f"{field}: {reason}", param=field, code="unsupported_content")
