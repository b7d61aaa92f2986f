"""Whatever a model would rather say, its answer is what was asked for."""

import functools
import json
import threading
from collections.abc import Iterator

import jsonschema
import pytest
import torch

from regrow.errors import BadRequest
from regrow.gpu.sampling import draw
from regrow.gpu.types import Row
from regrow.models.answer_reader import AnswerReader, Parts, parts_of
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.constrain import Grammars
from regrow.models.tokenizer import ChatTokenizer
from regrow.models.tool_formats import call_reader
from regrow.policy.request import CallAnswer, GenerateRequest, JsonAnswer, SamplingParams, ToolFormat
from tests.models.dialects import hard_tokenizer
from tests.models.schemas import SCHEMAS, UNSUPPORTED, closed

THINKING = "{% if x %}<think></think>{% endif %}{{ messages[0].content }}"
SPECIALS = ["<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>", "<|end|>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": closed(
                {
                    "city": {"type": "string", "enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "deep": closed({"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}),
                },
                optional=("days",),
            ),
        },
    }
    for name in ("weather", "look")
]
SCHEMA = TOOLS[0]["function"]["parameters"]


@functools.cache
def tokenizer(format_: ToolFormat = "hermes") -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer(512, 4096), tool_format=format_)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer())
    yield made
    made.close()


def answer(
    of: ChatTokenizer, grammars: Grammars, request: GenerateRequest, seed: int, thinks: bool = False
) -> str:
    """Draw an answer from noise; it ends when an end token is drawn."""
    noise = torch.Generator().manual_seed(seed)
    mask = grammars.mask(request, thinks)
    row = Row(0, 0, 0, SamplingParams(temperature=1.0, seed=seed), mask=mask)
    text = of.detokenizer()
    said = ""
    for row.counter in range(4000):
        token = draw(row, torch.randn(of.vocab_size, generator=noise) * 3)
        assert token is not None, said
        if token in of.eos_ids:
            return said + text.flush()
        mask.accept(token)
        said += text.push(token)
    raise AssertionError(f"no end: {said}")


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_noise_becomes_json_that_the_schema_allows(grammars: Grammars, schema: dict[str, object]) -> None:
    wanted = JsonAnswer(schema)
    for seed in range(3):
        said = answer(tokenizer(), grammars, GenerateRequest(answer=wanted), seed)
        jsonschema.validate(json.loads(said), schema, cls=jsonschema.Draft202012Validator)
        assert grammars.conforms(wanted, said)


def test_any_object_is_one(grammars: Grammars) -> None:
    mask = grammars.mask(GenerateRequest(answer=JsonAnswer({"type": "object"})), thinks=False)
    scores = torch.zeros(512)
    mask.apply(scores)
    assert {chr(i) for i in scores.isfinite().nonzero().flatten().tolist()} == {"{", " ", "\n"}


@pytest.mark.parametrize(("keyword", "schema"), UNSUPPORTED.items(), ids=UNSUPPORTED.keys())
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_field(
    grammars: Grammars, keyword: str, schema: dict[str, object]
) -> None:
    request = GenerateRequest(answer=JsonAnswer(schema, "response_format.json_schema.schema"))
    with pytest.raises(BadRequest, match=keyword) as refused:
        grammars.mask(request, thinks=False)
    assert refused.value.param == "response_format.json_schema.schema"


def test_an_answer_of_another_form_is_found_out(grammars: Grammars) -> None:
    wanted = JsonAnswer(SCHEMAS["object"])
    assert grammars.conforms(wanted, '{"name": "Ann", "age": 30}')
    for text in ('{"name": "Ann"}', '{"name": "Ann", "age": "30"}', '{"name": "Ann", "age": 30', "Ann", ""):
        assert not grammars.conforms(wanted, text)


@pytest.mark.parametrize("format_", ["hermes", "qwen-xml", "llama", "lfm2"])
@pytest.mark.parametrize("special", [False, True])
def test_forced_calls_read_back_as_calls_of_the_tools(format_: ToolFormat, special: bool) -> None:
    of = tokenizer(format_)
    if special:
        of = ChatTokenizer(hard_tokenizer(SPECIALS, THINKING), tool_format=format_)
    grammars = Grammars(of)
    called = set()
    for seed in range(4):
        parts = read(of, answer(of, grammars, forcing("weather", "look"), seed), format_)
        assert parts.calls
        assert not parts.content
        for call in parts.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
            called.add(call.name)
    assert called == {"weather", "look"}
    (one,) = read(of, answer(of, grammars, forcing("look", parallel=False), 1), format_).calls
    assert one.name == "look"
    grammars.close()


@pytest.mark.parametrize("format_", ["hermes", "qwen-xml", "llama", "lfm2"])
def test_where_there_are_tools_an_answer_is_json_or_calls(format_: ToolFormat) -> None:
    of, schema = tokenizer(format_), closed({"done": {"type": "boolean"}})
    grammars = Grammars(of)
    request = GenerateRequest(tools=TOOLS, answer=JsonAnswer(schema))
    kinds = set()
    for seed in range(12):
        parts = read(of, answer(of, grammars, request, seed), format_)
        kinds.add(bool(parts.calls))
        if parts.calls:
            assert not parts.content
            for call in parts.calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMA)
        else:
            jsonschema.validate(json.loads(parts.content), schema)
    assert kinds == {True, False}
    grammars.close()


def test_a_mask_is_worked_out_behind_the_step_that_does_not_wait_for_it(grammars: Grammars) -> None:
    mask = grammars.mask(GenerateRequest(answer=JsonAnswer({"enum": ["ab"]})), thinks=False)
    go_on = threading.Event()
    grammars._worker.submit(go_on.wait, 60)
    mask.accept(ord('"'))  # returns at once, and its mask is on its way
    assert not mask._forbidden.done()
    go_on.set()
    scores = torch.zeros(512)
    mask.apply(scores)
    assert scores.isfinite().nonzero().flatten().tolist() == [ord("a")]


def forcing(*names: str, parallel: bool = True) -> GenerateRequest:
    return GenerateRequest(tools=TOOLS, answer=CallAnswer(names, parallel))


def read(of: ChatTokenizer, said: str, format_: ToolFormat) -> Parts:
    reader = AnswerReader(of.thinking, False, call_reader(format_, TOOLS))
    return parts_of([*reader.feed(said), *reader.finish()])


def test_a_model_may_think_before_what_it_has_to_say() -> None:
    of = ChatTokenizer(hard_tokenizer(SPECIALS, THINKING))
    grammars = Grammars(of)
    request = GenerateRequest(answer=JsonAnswer({"enum": [True]}))
    begun = grammars.mask(request, thinks=False)
    allowed = torch.zeros(of.vocab_size)
    begun.apply(allowed)
    assert allowed.isfinite()[[of.id_of("<think>"), of.id_of("t")]].tolist() == [True, True]
    assert not allowed.isfinite()[of.id_of("x")]
    for thinks, before in ((True, ""), (False, "<think>")):
        mask = grammars.mask(request, thinks)
        for token in of.encode(f"{before}x, <think> {{</think>").tolist():
            mask.accept(token)
            free = torch.zeros(of.vocab_size)
            mask.apply(free)
            (end,) = of.eos_ids
            assert not free[end].isfinite()
            assert bool(free[: end - 1].isfinite().all()) == (token != of.id_of("</think>"))
        mask.accept(int(of.encode("t")[0]))
    grammars.close()


def test_rows_do_not_touch_each_other(grammars: Grammars) -> None:
    masks = [
        grammars.mask(GenerateRequest(answer=JsonAnswer({"enum": ["ab", "ac"]})), False) for _ in range(2)
    ]
    for mask, text in zip(masks, ('"ab', '"a'), strict=True):
        for byte in text.encode():
            mask.accept(byte)
    allowed = []
    for mask in masks:
        scores = torch.zeros(512)
        mask.apply(scores)
        allowed.append(set(scores.isfinite().nonzero().flatten().tolist()))
    assert allowed == [{ord('"')}, {ord("b"), ord("c")}]


def test_where_a_matcher_gives_up_the_answer_ends(grammars: Grammars) -> None:
    mask = grammars.mask(GenerateRequest(answer=JsonAnswer({"enum": ["a"]})), thinks=False)
    mask.accept(ord("x"))  # never drawn under the mask
    (end,) = tokenizer().eos_ids
    assert draw(Row(0, 0, 0, SamplingParams(), mask=mask), torch.zeros(512)) == end


def test_a_form_needs_an_end(grammars: Grammars) -> None:
    with pytest.raises(BadRequest) as refused:
        grammars.mask(GenerateRequest(answer=JsonAnswer(True), ignore_eos=True), thinks=False)
    assert refused.value.param == "ignore_eos"


def test_only_tools_of_the_request_can_be_forced(grammars: Grammars) -> None:
    with pytest.raises(BadRequest) as refused:
        grammars.mask(forcing("stranger"), thinks=False)
    assert refused.value.param == "tool_choice"
