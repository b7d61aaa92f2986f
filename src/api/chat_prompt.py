"""The prompt of a chat: messages, tools and options as the model's chat template takes them."""

import msgspec

from regrow.api.port import ModelInfo
from regrow.api.schema import ChatBody, Message, RefusalPart, TextPart
from regrow.errors import BadRequest
from regrow.policy.request import GenerateRequest

TEMPLATE_OWN = frozenset({"messages", "conversations", "tools", "chat_template"})


def chat_prompt(body: ChatBody, info: ModelInfo, message_limit: int) -> GenerateRequest:
    """Return a request with the prompt of `body` and nothing else; raises BadRequest naming the field."""
    if not info.has_template:
        raise BadRequest(
            "this model has no chat template: send a prompt to /v1/completions instead of messages",
            param="messages",
            code="no_chat_template",
        )
    messages = body.messages or []
    if len(messages) > message_limit:
        raise BadRequest(f"messages: at most {message_limit} are allowed", param="messages")
    tools = () if body.tool_choice == "none" else body.tools or ()
    return GenerateRequest(
        messages=[_message(message, i) for i, message in enumerate(messages)],
        tools=[msgspec.to_builtins(tool) for tool in tools],
        template_options=_template_options(body),
    )


def _template_options(body: ChatBody) -> dict[str, object]:
    options = dict(body.chat_template_kwargs or {})
    if taken := sorted(TEMPLATE_OWN & options.keys()):
        raise BadRequest(
            f"chat_template_kwargs: {taken[0]} is set by the server", param=f"chat_template_kwargs.{taken[0]}"
        )
    for name in ("reasoning_effort", "add_generation_prompt", "continue_final_message"):
        if (value := getattr(body, name)) is not None:
            options.setdefault(name, value)
    if options.get("add_generation_prompt") and options.get("continue_final_message"):
        raise BadRequest(
            "continue_final_message: not together with add_generation_prompt", param="continue_final_message"
        )
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
