"""The items of a conversation: from a request's input, to the messages of a chat, and as they are listed."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from regrow.api.body import decode
from regrow.api.facts import Body
from regrow.api.responses.schema import Called, Item, Reasoned, Returned, Said, text_of
from regrow.api.schema import CalledFunction, Message, ToolCall
from regrow.errors import BadRequest

KINDS: dict[str, type[Said] | type[Called] | type[Returned] | type[Reasoned]] = {
    "message": Said,
    "function_call": Called,
    "function_call_output": Returned,
    "reasoning": Reasoned,
}
PREFIXES = {Said: "msg", Called: "fc", Returned: "fco", Reasoned: "rs"}


def new_id(prefix: str) -> str:
    """Return a name that nobody guesses."""
    return f"{prefix}_{secrets.token_hex(16)}"


def items_of(given: str | Sequence[Mapping[str, object]] | None, history: Sequence[Item]) -> tuple[Item, ...]:
    """Return the items of a request's input; raises BadRequest naming what is wrong with which."""
    if isinstance(given, str):
        return (Said(role="user", content=given, id=new_id("msg")),)
    calls = {item.call_id for item in history if isinstance(item, Called)}
    items: list[Item] = []
    for index, raw in enumerate(given or ()):
        item = _item(raw, f"input[{index}]")
        if isinstance(item, Called):
            calls.add(item.call_id)
        if isinstance(item, Returned) and item.call_id not in calls:
            field = f"input[{index}].call_id"
            raise BadRequest(f"{field}: no function call has the id {item.call_id!r}", param=field)
        items.append(item)
    return tuple(items)


def _item(raw: Mapping[str, object], param: str) -> Item:
    name = raw.get("type", "message")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise BadRequest(
            f"{param}.type: {name!r} is not served; allowed: {', '.join(KINDS)}",
            param=f"{param}.type",
            code="unsupported_value",
        )
    try:
        item = decode(msgspec.json.encode(raw), kind)
    except BadRequest as error:
        error.args = (f"{param}.{error}",)
        error.param = f"{param}.{error.param}"
        raise
    match item:
        case Said():
            text_of(item.content, f"{param}.content")
        case Returned():
            text_of(item.output, f"{param}.output")
    return msgspec.structs.replace(item, id=item.id or new_id(PREFIXES[kind]))


@dataclass(slots=True)
class _Turn:
    """What the assistant has said since the last message of somebody else."""

    reasoning: list[str] = field(default_factory=list)
    text: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def messages(self) -> list[Message]:
        if self.text is None and not self.calls:
            return []
        return [
            Message(
                role="assistant",
                content=self.text or "",
                reasoning_content="\n".join(self.reasoning) or None,
                tool_calls=self.calls or None,
            )
        ]


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Return the messages of a chat that the items are: reasoning, text and calls of one answer are one."""
    messages: list[Message] = []
    turn = _Turn()
    for item in items:
        match item:
            case Reasoned():
                if turn.text is not None or turn.calls:
                    messages += turn.messages()
                    turn = _Turn()
                parts = item.content or item.summary or []
                turn.reasoning.append("\n".join(part.text for part in parts))
            case Said(role="assistant"):
                if turn.text is not None or turn.calls:
                    messages += turn.messages()
                    turn = _Turn()
                turn.text = text_of(item.content, "input")
            case Called():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                turn.calls.append(ToolCall(function=function, id=item.call_id, type="function"))
            case Said():
                messages += turn.messages()
                messages.append(Message(role=item.role, content=text_of(item.content, "input")))
                turn = _Turn()
            case Returned():
                output = text_of(item.output, "input")
                messages += turn.messages()
                messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
                turn = _Turn()
    return [*messages, *turn.messages()]


def listed(item: Item) -> Body:
    """Return an item as /input_items lists it."""
    kind = next(name for name, kind in KINDS.items() if isinstance(item, kind))
    body: Body = {"type": kind, "status": "completed", **msgspec.to_builtins(item)}
    if isinstance(item, Said) and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        body["content"] = [{"type": part, "text": item.content}]
    return body
