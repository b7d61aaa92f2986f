"""What an answer has to be, written as a grammar of llguidance (its dialect of Lark).

Calls are written as the model's own format has them, so that they read back (`tool_formats.py`). Their
arguments follow the schema of the tool; where it asks for more than the grammar can say, the rest is not
enforced, unless the tool is `strict`.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from regrow.policy.request import CallAnswer, JsonAnswer, ToolFormat

SPACES = {"whitespace_pattern": r"[ \n\t]{0,40}"}  # a weak model would otherwise write spaces for ever
LEAD = "LEAD: /[ \\n]{1,8}/\n"
Mark = Callable[[str], str]


def json_grammar(answer: JsonAnswer, calls: str | None = None) -> str:
    """Return the grammar of an answer that is JSON, or calls tools where their `call_rules` are given; white
    space may stand before it."""
    start = "value" if calls is None else "(value | calls)"
    return f"start: LEAD? {start}\n{LEAD}value: {_json(answer.schema, strict=True)}\n{calls or ''}"


def call_grammar(calls: str) -> str:
    """Return the grammar of an answer that calls tools and says nothing else, given its `call_rules`."""
    return f"start: LEAD? calls\n{LEAD}{calls}"


def call_rules(
    answer: CallAnswer, tools: Sequence[Mapping[str, object]], format_: ToolFormat, mark: Mark
) -> str:
    """Return the rules of `calls`. mark: writes a mark as a terminal, whether the tokenizer has a token for
    it or not."""
    functions = [function for tool in tools if isinstance(function := tool.get("function"), Mapping)]
    named = [function for function in functions if function.get("name") in answer.names]
    rules = [_RULES[format_](f"c{i}", function) for i, function in enumerate(named)]
    before, after, between = (
        " ".join(mark(part) if part.startswith("<") else _text(part) for part in parts)
        for parts in _FRAMES[format_]
    )
    choice = " | ".join(f"c{i}" for i in range(len(named)))
    calls = f"call ({between} call)*" if answer.parallel else "call"
    if format_ == "lfm2":  # one frame around all
        frame = f"calls: {before} {calls} {after}\ncall: {choice}"
    else:
        frame = f"calls: {calls}\ncall: {before} ({choice}) {after}"
    return "\n".join([frame, *rules, ""])


_FRAMES: dict[ToolFormat, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "hermes": (["<tool_call>", "\n"], ["\n", "</tool_call>"], ["\n"]),
    "qwen-xml": (["<tool_call>", "\n"], ["\n", "</tool_call>"], ["\n"]),
    "llama": ([], [], ["; "]),
    "lfm2": (["<|tool_call_start|>", "["], ["]", "<|tool_call_end|>"], [", "]),
}


def _hermes(rule: str, function: Mapping[str, object], key: str = "arguments") -> str:
    head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    return f"{rule}: {_text(head)} {rule}v {_text('}')}\n{rule}v: {_json(*_schema(function))}"


def _llama(rule: str, function: Mapping[str, object]) -> str:
    return _hermes(rule, function, "parameters")


def _xml(rule: str, function: Mapping[str, object]) -> str:
    """The parameters that are required, then any of the others, in the order of the schema."""
    schema, strict = _schema(function)
    rules, parts = [], []
    for i, (key, wanted, required) in enumerate(_parameters(schema)):
        name = f"{rule}p{i}"
        rules.append(f"{name}: {_text(f'<parameter={key}>' + chr(10))} {name}v")
        if wanted.get("type") == "string" and "enum" not in wanted and "const" not in wanted:
            rules.append(f"{name}v[suffix={_text(chr(10) + '</parameter>' + chr(10))}]: /(?s:.*)/")
        else:
            choices = wanted.get("enum", [wanted["const"]] if "const" in wanted else [])
            words = [word for word in choices if isinstance(word, str)] if isinstance(choices, list) else []
            value = " | ".join(map(_text, words)) if words else _json(wanted, strict)
            rules.append(f"{name}v: {name}x {_text(chr(10) + '</parameter>' + chr(10))}\n{name}x: {value}")
        parts.append(name if required else f"{name}?")
    head = _text(f"<function={function['name']}>\n")
    return "\n".join([f"{rule}: {head} {' '.join(parts)} {_text('</function>')}", *rules])


def _pythonic(rule: str, function: Mapping[str, object]) -> str:
    """As in `_xml`, with commas between: `h` rules come before the first argument, `t` rules after it."""
    schema, strict = _schema(function)
    parameters = _parameters(schema)
    head = json.dumps(f"{function['name']}(")
    rules = [f'{rule}: {head} {rule}h0 ")"', f'{rule}h{len(parameters)}: ""', f'{rule}t{len(parameters)}: ""']
    for i, (key, wanted, required) in enumerate(parameters):
        skip_h, skip_t = ("", "") if required else (f" | {rule}h{i + 1}", f" | {rule}t{i + 1}")
        rules.append(f"{rule}h{i}: {rule}i{i} {rule}t{i + 1}{skip_h}")
        rules.append(f'{rule}t{i}: ", " {rule}i{i} {rule}t{i + 1}{skip_t}')
        rules.append(f"{rule}i{i}: {_text(key + '=')} {rule}v{i}\n{rule}v{i}: {_json(wanted, strict)}")
    return "\n".join(rules)


_RULES: dict[ToolFormat, Callable[[str, Mapping[str, object]], str]] = {
    "hermes": _hermes,
    "qwen-xml": _xml,
    "llama": _llama,
    "lfm2": _pythonic,
}


def _schema(function: Mapping[str, object]) -> tuple[Mapping[str, object], bool]:
    """Return the schema of a tool's parameters, and whether it is to be followed to the letter."""
    given = function.get("parameters")
    if not isinstance(given, Mapping):  # as OpenAI has it: a function without parameters
        return {"type": "object", "properties": {}, "additionalProperties": False}, False
    return {"type": "object", **given}, function.get("strict") is True


def _parameters(schema: Mapping[str, object]) -> list[tuple[str, Mapping[str, object], bool]]:
    """Return each parameter with a schema that stands alone, and whether it is required."""
    properties, required = schema.get("properties"), schema.get("required")
    defined = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        (key, {**wanted, **defined}, isinstance(required, list) and key in required)
        for key, wanted in (properties.items() if isinstance(properties, Mapping) else ())
        if isinstance(wanted, Mapping)
    ]


def _json(schema: Mapping[str, object] | bool, strict: bool) -> str:
    options = SPACES if strict else {**SPACES, "lenient": True, "coerce_one_of": True}
    whole = {} if schema is True else {"not": {}} if schema is False else schema
    return f"%json {json.dumps({**whole, 'x-guidance': options})}"


def _text(text: str) -> str:
    """Return a text as a terminal."""
    return json.dumps(text, ensure_ascii=False)
