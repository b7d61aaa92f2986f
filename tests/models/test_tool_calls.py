"""Tool calls are read alike however their text is cut into pieces; nothing that is none is taken for one."""

import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.models.answer_reader import (
    AnswerReader,
    Parts,
    ThinkingTags,
    parts_of,
    prompt_thinks,
    thinking_tags,
)
from regrow.models.deltas import CallArguments, CallEnd, CallStart, Delta
from regrow.models.tool_formats import call_reader, format_of
from regrow.policy.request import ToolFormat

THINK = ThinkingTags("<think>", "</think>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "share": {"type": "number"},
                    "deep": {"type": "object"},
                    "flag": {"type": "boolean"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    }
    for name in ("weather", "look")
]
Calls = list[tuple[str, object]]


@dataclass(frozen=True)
class Sample:
    """What a model wrote, and what that is."""

    format: ToolFormat
    text: str
    calls: Calls
    content: str = ""
    reasoning: str = ""
    thinks: bool = False


TRICKY = 'a "quoted" \\ </tool_call> line\nand Grüße 🙂 } ]'
SAMPLES = [
    Sample(
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        [("weather", {"city": "Paris", "days": 3})],
    ),
    Sample(
        "hermes",
        'Let me see.\n\n<tool_call>{"name":"look","arguments":{}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"deep": {"a": [1, {"b": "}"}]}}, "name": "weather"}\n</tool_call>\n',
        [("look", {}), ("weather", {"deep": {"a": [1, {"b": "}"}]}})],
        "Let me see.",
    ),
    Sample(
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"city": ' + json.dumps(TRICKY) + "}}</tool_call>",
        [("look", {"city": TRICKY})],
    ),
    Sample(
        "hermes",
        '<tool_call>{"name": "look", "arguments": "{\\"days\\": 1}"}</tool_call>',
        [("look", {"days": 1})],
    ),
    Sample(
        "hermes", '<tool_call>{"name": "look", "arguments": {"days": 1}</tool_call>', [("look", {"days": 1})]
    ),
    Sample("hermes", '<tool_call>{"name": "look", "arguments": {"days": 1}}', [("look", {"days": 1})]),
    Sample(
        "hermes", "The tag <tool_call> opens a call, 1 <2.  ", [], "The tag <tool_call> opens a call, 1 <2.  "
    ),
    Sample("hermes", 'Try {"name": "look"} \n', [], 'Try {"name": "look"} \n'),
    Sample("hermes", '<tool_call>{"no": "name"}</tool_call>', [], '<tool_call>{"no": "name"}</tool_call>'),
    Sample("hermes", 'Hm.<tool_call>{"name": "look", "arguments": {"city": "Par', [], "Hm."),
    Sample("hermes", 'Hm.<tool_call>{"name": "lo', [], "Hm."),
    Sample(
        "hermes",
        '<think>\nI could use <tool_call>{"name": "look"}.\n</think>\n\n'
        '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
        [("look", {})],
        reasoning='I could use <tool_call>{"name": "look"}.',
    ),
    Sample(
        "hermes", "Hm, so.\n</think>\n\nYes: a <think> b.", [], "Yes: a <think> b.", "Hm, so.", thinks=True
    ),
    Sample("hermes", "Hm, so", [], "", "Hm, so", thinks=True),
    Sample(
        "qwen-xml",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        [("weather", {"city": "Paris", "days": 3})],
    ),
    Sample(
        "qwen-xml",
        "Two calls.\n<tool_call>\n<function=look>\n</function>\n</tool_call>\n<tool_call>\n<function=look>\n"
        "<parameter=city>\n"
        '\nif a < b and c > d:\n\tprint("x\\n")\n\n</parameter>\n<parameter=deep>\n{"a": [1]}'
        "\n</parameter>\n<parameter=share>\n2\n</parameter>\n</function>\n</tool_call>",
        [
            ("look", {}),
            ("look", {"city": '\nif a < b and c > d:\n\tprint("x\\n")\n', "deep": {"a": [1]}, "share": 2}),
        ],
        "Two calls.",
    ),
    Sample(
        "qwen-xml",
        "<function=look><parameter=city>3</parameter><parameter=days>three</parameter><parameter=maybe>\nnull\n"
        "</parameter><parameter=other>NaN</parameter><parameter=more></parameter></function>",
        [("look", {"city": "3", "days": "three", "maybe": None, "other": "NaN", "more": ""})],
    ),
    Sample(
        "qwen-xml",
        "<function=look><parameter=flag>\nTrue\n</parameter><parameter=maybe>None</parameter>"
        "<parameter=city>\nTrue\n</parameter></function>",
        [("look", {"flag": True, "maybe": None, "city": "True"})],
    ),
    Sample("qwen-xml", "<tool_call>\n<function=look>\n<parameter=city>\nPar", []),
    Sample("qwen-xml", "<tool_call>\n<function=look>\n<parameter=days>\n3\n</parameter>\n", []),
    Sample("qwen-xml", "<tool_call>\n<function=look>\n<parameter=days>\n3", []),
    Sample("qwen-xml", "<tool_call>\n<function=look>\n<parameter=da", []),
    Sample("qwen-xml", "<tool_call>\n<function=lo", []),
    Sample("qwen-xml", "See <tool_call> there", [], "See <tool_call> there"),
    Sample("qwen-xml", "if <function=\nx", [], "if <function=\nx"),
    Sample(
        "llama",
        '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "look", "parameters": {"days": 2}}',
        [("weather", {"city": "Paris"}), ("look", {"days": 2})],
    ),
    Sample(
        "llama",
        '<|python_tag|>{"type": "function", "name": "look", "parameters": {"city": ";"}}',
        [("look", {"city": ";"})],
    ),
    Sample("llama", '{"name": "stranger", "parameters": {}}', [], '{"name": "stranger", "parameters": {}}'),
    Sample("llama", '{"answer": 42} is it', [], '{"answer": 42} is it'),
    Sample("llama", 'So {"name": "look", "parameters": {}}', [], 'So {"name": "look", "parameters": {}}'),
    Sample("llama", '{"name": "look", "parameters": {"city": "Pa', []),
    Sample(
        "lfm2",
        'Now.<|tool_call_start|>[weather(city="Par]is)", days=3), look(deep={"a": [True, null]}, '
        "city='it\\'s')]<|tool_call_end|>",
        [
            ("weather", {"city": "Par]is)", "days": 3}),
            ("look", {"deep": {"a": [True, None]}, "city": "it's"}),
        ],
        "Now.",
    ),
    Sample("lfm2", "<|tool_call_start|>[look()]<|tool_call_end|>Done.", [("look", {})], "Done."),
    Sample("lfm2", "<|tool_call_start|>[look(), weather(city='P", [("look", {})]),
    Sample("lfm2", "<|tool_call_start|>[look(1)]<|tool_call_end|>", [], "look(1)]<|tool_call_end|>"),
    Sample(
        "lfm2",
        '<|tool_call_start|>[{"name": "look", "arguments": {"city": "a\'b"}}, look()]<|tool_call_end|>',
        [("look", {"city": "a'b"}), ("look", {})],
    ),
    Sample("lfm2", "<|tool_call_start|>[mcp-x.look(days=1)]<|tool_call_end|>", [("mcp-x.look", {"days": 1})]),
    Sample("lfm2", "<|tool_call_start|>none", [], "<|tool_call_start|>none"),
    Sample(
        "lfm2", r"<|tool_call_start|>[look(city='\ud83d\ude42')]<|tool_call_end|>", [("look", {"city": "🙂"})]
    ),
    Sample("lfm2", r"<|tool_call_start|>[look(city='\ud83d')]", [("look", {"city": "\ud83d"})]),
    Sample("lfm2", "<|tool_call_start|>[look(days=1e999)]", [], "look(days=1e999)]"),
    Sample(
        "hermes",
        r'<tool_call>{"arguments": {"city": "\ud83d"}, "name": "lo\ud83dok"}</tool_call>',
        [("lo?ok", {"city": "\ud83d"})],
    ),
]
IDS = [f"{sample.format}-{i}" for i, sample in enumerate(SAMPLES)]


def read(sample: Sample, pieces: list[str], parallel: bool = True) -> list[Delta]:
    reader = AnswerReader(THINK, sample.thinks, call_reader(sample.format, TOOLS), parallel)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    return [*deltas, *reader.finish()]


def told(parts: Parts) -> tuple[Calls, str, str]:
    calls = [(call.name, json.loads(call.arguments)) for call in parts.calls]
    assert all((call.name + call.arguments).encode() for call in parts.calls)
    return calls, parts.content, parts.reasoning


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_every_split_of_a_text_gives_the_same_calls(sample: Sample) -> None:
    text, wanted = sample.text, (sample.calls, sample.content, sample.reasoning)
    assert told(parts_of(read(sample, [text]))) == wanted
    assert told(parts_of(read(sample, list(text)))) == wanted
    for at in range(1, len(text)):
        assert told(parts_of(read(sample, [text[:at], text[at:]]))) == wanted, at
    for step in (2, 3, 5, 7):
        for first in range(step):
            pieces = [text[:first], *(text[i : i + step] for i in range(first, len(text), step))]
            assert told(parts_of(read(sample, pieces))) == wanted, (step, first)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=city>", "</parameter>"),
    *(
        "<parameter=deep>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<|python_tag|>",
        "<think>",
        "</think>",
    ),
    *(
        '{"name": "look", "arguments": ',
        '{"name": "look", "parameters": ',
        '{"days": 1}',
        '"name"',
        "look(",
        "days=1",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "\\",
        ",",
        ";",
        ":",
        "<",
        ">",
        " ",
        "\n",
        "\n\n",
        "a",
        "🙂",
        "null",
    ),
]


@settings(max_examples=300, deadline=None)
@given(
    format_=st.sampled_from(["hermes", "qwen-xml", "llama", "lfm2"]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    thinks=st.booleans(),
)
def test_whatever_a_model_writes_is_read_alike_in_any_pieces(
    format_: ToolFormat, fragments: list[str], cuts: list[int], thinks: bool
) -> None:
    text = "".join(fragments)
    sample = Sample(format_, text, [], thinks=thinks)
    whole = parts_of(read(sample, [text]))
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert parts_of(read(sample, [text[a:b] for a, b in pairwise(edges)])) == whole
    assert parts_of(read(sample, list(text))) == whole
    if format_ != "llama" and not any(  # its calls need no mark
        mark in text
        for mark in ("<tool_call>", "<function=", "<|tool_call_start|>", "<|python_tag|>", "think>")
    ):
        assert whole.calls or whole.content == text or (thinks and whole.reasoning == text.lstrip())


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_a_call_is_named_then_argued_then_ended_and_numbered_in_order(sample: Sample) -> None:
    deltas = read(sample, list(sample.text))
    starts = [delta for delta in deltas if isinstance(delta, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    for start in starts:
        own = [
            d for d in deltas if isinstance(d, CallStart | CallArguments | CallEnd) and d.index == start.index
        ]
        assert own[0] is start
        assert all(isinstance(d, CallArguments) for d in own[1:-1])


@pytest.mark.parametrize(
    ("format_", "begun"),
    [
        ("hermes", '<tool_call>{"name": "look", "arguments": {"city": "'),
        ("qwen-xml", "<tool_call>\n<function=look>\n<parameter=city>\n"),
        ("llama", '{"name": "look", "parameters": {"city": "'),
    ],
)
def test_arguments_are_told_while_they_are_written(format_: ToolFormat, begun: str) -> None:
    reader = AnswerReader(None, False, call_reader(format_, TOOLS))
    assert next(type(delta) for delta in reader.feed(begun)) is CallStart
    assert reader.feed("half a line") == [CallArguments(0, "half a line")]


def test_where_one_call_is_allowed_what_follows_the_first_is_left_out() -> None:
    sample = SAMPLES[1]
    reader = AnswerReader(THINK, False, call_reader("hermes", TOOLS), parallel=False)
    deltas = reader.feed(sample.text)
    assert told(parts_of(deltas)) == ([("look", {})], "Let me see.", "")
    assert reader.full
    assert reader.finish() == []


def test_without_tools_a_call_is_prose() -> None:
    reader = AnswerReader(None, False, call_reader("hermes", []))
    parts = parts_of([*reader.feed(SAMPLES[0].text), *reader.finish()])
    assert (parts.calls, parts.content) == ((), SAMPLES[0].text)


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("... <tool_call>\n<function=example_function_name> ...", "qwen-xml"),
        ("... return a json object within <tool_call></tool_call> ...", "hermes"),
        ("{{ '<|python_tag|>' + tool_call.name }}", "llama"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("{{ message.content }}", "hermes"),
    ],
)
def test_the_format_is_told_from_the_template(template: str, format_: ToolFormat) -> None:
    assert format_of(template) == format_


def test_thinking_is_told_from_the_template_and_the_prompt() -> None:
    assert thinking_tags("{{ content.split('</think>')[-1] }}") == THINK
    assert thinking_tags("{{ content }}") is None
    assert prompt_thinks("<|im_start|>assistant\n<think>\n", THINK)
    assert not prompt_thinks("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not prompt_thinks("<think>", None)
