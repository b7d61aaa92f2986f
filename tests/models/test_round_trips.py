"""What a template shows of tool calls and reasoning reads back as what they were: a model sees its own words
in the history as it writes them."""

import json

import pytest

from regrow.models.answer_reader import AnswerReader, parts_of
from regrow.models.tokenizer import ChatTokenizer
from regrow.models.tool_formats import call_reader
from regrow.policy.request import ToolFormat
from tests.models.dialects import hard_tokenizer

OPEN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
CLOSE = (
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = (
    OPEN + "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}" + CLOSE
)
QWEN_XML = (
    OPEN + "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for name, value in c.function.arguments | items %}{{ '<parameter=' + name + '>\n' }}"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value }}"
    "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}" + CLOSE
)
LLAMA = (
    "{# <|python_tag|> #}" + OPEN + "{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ m.content | trim }}{% endif %}" + CLOSE
)
LFM2 = (
    OPEN + "{% if m.thinking %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{{ '<|tool_call_start|>[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
    "{% for name, value in c.function.arguments.items() %}{{ name + '=' }}"
    "{{ '\"' + value + '\"' if value is string else value | string }}{{ '' if loop.last else ', ' }}"
    "{% endfor %}"
    "{{ ')' if loop.last else '), ' }}{% endfor %}{{ ']<|tool_call_end|>' }}{% endif %}" + CLOSE
)
TEMPLATES: dict[ToolFormat, str] = {"hermes": HERMES, "qwen-xml": QWEN_XML, "llama": LLAMA, "lfm2": LFM2}
ARGUMENTS = {"city": "Paris < Rome", "n": 3, "share": 0.5, "flag": True, "deep": {"a": [1, 2]}, "maybe": None}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "flag": {"type": "boolean"},
                    "maybe": {"type": "null"},
                },
            },
        },
    }
]


def call(**arguments: object) -> dict[str, object]:
    function = {"name": "look", "arguments": json.dumps(arguments)}
    return {"id": "call_1", "type": "function", "function": function}


def tokenizer(template: str) -> ChatTokenizer:
    marks = ["<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>", "<|im_start|>", "<|im_end|>"]
    return ChatTokenizer(hard_tokenizer(marks, template))


@pytest.mark.parametrize("format_", TEMPLATES)
@pytest.mark.parametrize("reasoning", [None, "Hm, let me see."])
def test_a_call_in_the_history_reads_back_as_itself(format_: ToolFormat, reasoning: str | None) -> None:
    chat = tokenizer(TEMPLATES[format_])
    assert chat.tool_format == format_
    calls = [call(**ARGUMENTS), call()] if chat.parallel_calls else [call(**ARGUMENTS)]
    shown = reasoning if chat.thinking else None
    message = {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": shown}
    messages = [{"role": "user", "content": "?"}, {k: v for k, v in message.items() if v is not None}]
    text = chat.render(messages, TOOLS, {"add_generation_prompt": False})
    own = text.split("<|im_start|>assistant\n")[1].removesuffix("<|im_end|>\n")
    reader = AnswerReader(chat.thinking, False, call_reader(format_, TOOLS))
    detokenizer = chat.detokenizer()
    pieces = [detokenizer.push(int(token)) for token in chat.encode(own)]
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    parts = parts_of([*deltas, *reader.feed(detokenizer.flush()), *reader.finish()])
    assert [json.loads(c.arguments) for c in parts.calls] == [
        json.loads(c["function"]["arguments"]) for c in calls
    ]
    assert (parts.content, parts.reasoning) == ("", shown or "")


@pytest.mark.parametrize(
    ("format_", "parallel"), [("hermes", True), ("qwen-xml", True), ("llama", False), ("lfm2", True)]
)
def test_a_template_tells_whether_it_takes_several_calls(format_: ToolFormat, parallel: bool) -> None:
    assert tokenizer(TEMPLATES[format_]).parallel_calls == parallel


def test_a_template_that_shows_no_calls_or_the_first_alone() -> None:
    assert tokenizer(OPEN + "{{ m.content }}" + CLOSE).parallel_calls
    first = OPEN + "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}" + CLOSE
    assert not tokenizer(first).parallel_calls


def test_an_empty_list_of_calls_is_none() -> None:
    template = OPEN + "{{ 'calls' if m.tool_calls is defined else m.content }}" + CLOSE
    message = {"role": "assistant", "content": "said", "tool_calls": []}
    assert "said" in tokenizer(template).render([message])
