"""From messages to the text that a model was trained on: its chat template, as transformers renders it.

Messages come in OpenAI's shape and go to the template in the shape it takes: contents as text (or as lists of
parts, where it takes nothing else), the arguments of tool calls as objects (or as text), reasoning under the
name that it asks for. Which it is, is found out once.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from regrow.errors import BadConfig, BadRequest, ModelRefused
from regrow.models.template import Message

_WORD = "quokka"
_QUESTION: Message = {"role": "user", "content": "?"}


class Renderer:
    """Renders with the tokenizer's template, or with `override`: a template's text, or the path of its file.

    Raises BadConfig where the override is neither or has a syntax error, ModelRefused where the tokenizer's
    own template has one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, override: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._override = _template_text(override)
        self._lists = False
        self._objects = True
        self._reasoning = _reasoning_key(self.template)
        self.parallel_calls = True
        if not self.has_template:
            return
        self._check_syntax()
        self._lists = not self._shows({"role": "user", "content": _WORD}) and self._shows(
            {"role": "user", "content": [{"type": "text", "text": _WORD}]}
        )
        as_text = self._shows(_QUESTION, _call(json.dumps({"at": _WORD})))
        self._objects = self._shows(_QUESTION, _call({"at": _WORD})) or not as_text
        self.parallel_calls = self._takes_two_calls()

    @property
    def has_template(self) -> bool:
        return self._override is not None or bool(self._tokenizer.chat_template)

    @property
    def template(self) -> str:
        """The text of the template, or of all where there are several; empty where there is none."""
        own = self._override or self._tokenizer.chat_template or ""
        return own if isinstance(own, str) else "\n".join(map(str, own.values()))

    def __call__(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt's text, with the beginning of an answer unless the options say otherwise.

        Raises BadRequest where there is no template, or it does not accept the messages or options.
        """
        if not self.has_template:
            raise BadRequest("the model has no chat template: send a prompt instead of messages", "messages")
        options = dict(options or {})
        options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
        shaped = [self._shaped(message) for message in messages]
        return self._render(shaped, [dict(tool) for tool in tools] or None, options)

    def _render(
        self, messages: list[Message], tools: list[Message] | None, options: Mapping[str, object]
    ) -> str:
        try:
            template = self._tokenizer.get_chat_template(self._override, tools)
            kwargs = {**self._tokenizer.special_tokens_map, **options}
            texts, _ = render_jinja_template([messages], tools=tools, chat_template=template, **kwargs)
        except Exception as error:
            cause = f"the chat template does not accept the messages: {error}"
            raise BadRequest(cause, "messages") from error
        return str(texts[0])

    def _check_syntax(self) -> None:
        try:
            self._render([_QUESTION], None, {})
        except BadRequest as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                if self._override is not None:
                    raise BadConfig(f"--chat-template has a syntax error: {error.__cause__}") from error
                raise ModelRefused(
                    f"the chat template has a syntax error: {error.__cause__}; give one with --chat-template"
                ) from error

    def _shaped(self, message: Mapping[str, object]) -> Message:
        shaped = dict(message)
        text = _text(message.get("content"))
        shaped["content"] = [{"type": "text", "text": text}] if self._lists else text
        if isinstance(calls := shaped.pop("tool_calls", None), Sequence) and calls:
            shaped["tool_calls"] = [_with_arguments(call, self._objects) for call in calls]
        if (reasoning := shaped.pop("reasoning_content", None)) is not None:
            shaped[self._reasoning] = reasoning
        return shaped

    def _takes_two_calls(self) -> bool:
        """Whether a message may call two tools: some templates refuse that, or show one of them alone."""
        first, second = (_call({"at": word} if self._objects else f'"{word}"') for word in ("left", _WORD))
        both = {**first, "tool_calls": [*_calls(first), *_calls(second)]}
        return self._shows(_QUESTION, both) or not self._shows(_QUESTION, second)

    def _shows(self, *messages: Message) -> bool:
        """Whether the template takes these messages and shows the word in them as it is."""
        try:
            text = self._render(list(messages), None, {"add_generation_prompt": False})
        except BadRequest:
            return False
        return _WORD in text and "'type'" not in text


def _reasoning_key(template: str) -> str:
    """Return by which name a template asks a message for its reasoning."""
    other = re.search(r"""\.(thinking|reasoning)\b|\[['"](thinking|reasoning)['"]\]""", template)
    if other is None or "reasoning_content" in template:
        return "reasoning_content"
    return other[1] or other[2]


def _template_text(override: str | None) -> str | None:
    if override is None or "{{" in override or "{%" in override:
        return override
    try:
        return Path(override).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"--chat-template takes a Jinja template or the path of its file: {error}") from error


def _text(content: object) -> str:
    """Return a content as text; the texts of parts are joined by newlines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest("the content of a message is a text or a list of parts", "messages")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise BadRequest("only parts of the type text are served", "messages")
        texts.append(text)
    return "\n".join(texts)


def _call(arguments: object) -> Message:
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _calls(message: Message) -> Sequence[object]:
    calls = message["tool_calls"]
    return calls if isinstance(calls, Sequence) else ()


def _with_arguments(call: object, as_object: bool) -> object:
    """Return a tool call with its arguments as an object, or as JSON text; what is neither stays."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if as_object and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return call
    elif not as_object and not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
