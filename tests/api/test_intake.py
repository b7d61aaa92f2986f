"""What the engine is asked for, given a body."""

import dataclasses

import msgspec
import pytest

from regrow.api.body import decode
from regrow.api.intake import chat_request, completion_requests, forks
from regrow.api.schema import ChatRequest, CompletionRequest
from regrow.policy.request import CallAnswer, GenerateRequest, JsonAnswer, SamplingParams
from tests.api.conftest import chat_body
from tests.api.stub import StubModel


def asked(**fields: object) -> GenerateRequest:
    body = decode(msgspec.json.encode(chat_body(**fields)), ChatRequest)
    return chat_request(body, StubModel(), message_limit=100)


def completing(prompt: object = "Once", **fields: object) -> list[GenerateRequest]:
    body = msgspec.json.encode({"model": "stub", "prompt": prompt, **fields})
    return completion_requests(decode(body, CompletionRequest), StubModel())


def test_what_is_not_given_is_the_models_default() -> None:
    request = asked()
    assert request == GenerateRequest(
        messages=[{"role": "user", "content": "Hello there"}],
        tools=[],
        sampling=dataclasses.replace(StubModel().default_sampling, seed=request.sampling.seed),
    )


def test_null_means_not_given() -> None:
    nulls = {name: None for name in ChatRequest.__struct_fields__ if name not in ("model", "messages")}
    assert asked(**{**nulls, "seed": 1}) == asked(seed=1)


def test_unknown_fields_are_ignored() -> None:
    assert asked(seed=1, store=True, metadata={"a": 1}, regrow={"later": 1}) == asked(seed=1)


def test_every_field_of_sampling_reaches_the_engine() -> None:
    given = {
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "6": 2.5},
    }
    assert asked(**given).sampling == SamplingParams(**{**given, "logit_bias": {5: -100.0, 6: 2.5}})


def test_zero_temperature_overrides_a_model_that_samples() -> None:
    assert asked(temperature=0).sampling.temperature == 0.0


def test_a_top_k_of_minus_one_keeps_all() -> None:
    assert asked(top_k=-1).sampling.top_k == 0


def test_requests_without_a_seed_get_different_ones_and_equal_seeds_stay_equal() -> None:
    assert len({asked().sampling.seed for _ in range(20)}) == 20
    assert asked(seed=-1).sampling.seed == asked(seed=-1).sampling.seed >= 0


def test_when_to_stop_reaches_the_engine() -> None:
    request = asked(max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True)
    assert (request.max_tokens, request.min_tokens) == (9, 2)
    assert (request.stop, request.stop_token_ids, request.ignore_eos) == (("a", "b"), (3,), True)
    assert asked(stop="one").stop == ("one",)
    assert asked(max_completion_tokens=8).max_tokens == 8
    assert asked(max_completion_tokens=8, max_tokens=8).max_tokens == 8


def test_the_extension_and_the_cache_salt_reach_the_engine() -> None:
    request = asked(
        regrow={"cache": "read-only", "priority": 3, "deadline_ms": 1500}, priority=1, cache_salt="s"
    )
    assert (request.cache, request.priority, request.deadline_s) == ("read-only", 3, 1.5)
    assert request.cache_salt == "s"
    assert asked(priority=1).priority == 1


def test_a_developer_message_is_a_system_message_and_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = asked(messages=[{"role": "developer", "content": parts}, {"role": "user", "content": ""}])
    assert request.messages == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "user", "content": ""},
    ]


def test_tool_calls_and_their_results_reach_the_template_as_they_came() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "go", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    assert asked(messages=messages).messages == [messages[0], {**messages[1], "content": ""}, messages[2]]


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    assert asked(tools=[tool]).tools == [tool]
    assert asked(tools=[tool], tool_choice="auto").tools == [tool]
    assert asked(tools=[tool], tool_choice="none").tools == []


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("f", "g")
]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, CallAnswer(("f", "g"))),
        ({"tool_choice": "required", "parallel_tool_calls": False}, CallAnswer(("f", "g"), False)),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, CallAnswer(("g",), False)),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonAnswer({"type": "object"}, "response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"enum": [1]}},
                }
            },
            JsonAnswer({"enum": [1]}),
        ),
    ],
    ids=str,
)
def test_the_form_of_an_answer_reaches_the_engine(fields: dict[str, object], wanted: object) -> None:
    assert asked(tools=TOOLS, **fields).answer == wanted


def test_several_answers_have_one_prompt_and_random_streams_of_their_own() -> None:
    requests = forks(asked(seed=7), 3)
    assert [request.sampling.seed for request in requests] == [7, 8, 9]
    assert all(request.forked for request in requests)
    assert forks(asked(seed=7), 1) == [asked(seed=7)]
    assert [request.prompt for request in completing(["a", "b"], n=2)] == ["a", "a", "b", "b"]


def test_template_options_reach_the_template() -> None:
    request = asked(
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert request.template_options == {
        "enable_thinking": False,
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"modalities": ["text"]},
        {"functions": []},
        {"user": "me"},
        {"stream_options": {}},
    ],
    ids=str,
)
def test_a_field_that_asks_for_nothing_more_is_served(fields: dict[str, object]) -> None:
    assert asked(seed=1, **fields) == asked(seed=1)


ANSWER = {
    "temperature": 1,
    "top_p": 0.5,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 7,
    "presence_penalty": -1.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100},
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "priority": 1,
    "cache_salt": "s",
    "regrow": {"cache": "off", "deadline_ms": 1500},
}


def test_a_completion_is_asked_for_as_a_chat_is() -> None:
    (request,) = completing(**ANSWER)
    chat = asked(**ANSWER)
    assert request.prompt == "Once"
    assert dataclasses.replace(request, prompt=None) == dataclasses.replace(chat, messages=(), tools=())


def test_a_completion_ends_after_16_tokens_where_nothing_is_said() -> None:
    assert completing()[0].max_tokens == 16
    assert asked().max_tokens is None


def test_every_prompt_of_a_list_is_asked_for_with_the_same_fields() -> None:
    for prompts in (["a", "b", "c"], [[1, 2], [3], [4]]):
        requests = completing(prompts, **ANSWER)
        assert [request.prompt for request in requests] == prompts
        assert {dataclasses.replace(request, prompt=None).sampling.seed for request in requests} == {7}
    assert [request.prompt for request in completing([1, 2, 3])] == [[1, 2, 3]]
    assert len({request.sampling.seed for request in completing(["a"] * 20)}) == 20


def test_a_text_begins_with_the_start_token_unless_it_shall_not() -> None:
    assert completing()[0].add_special_tokens
    assert not completing(add_special_tokens=False)[0].add_special_tokens


@pytest.mark.parametrize(
    "fields",
    [{"n": 1}, {"best_of": 1}, {"suffix": ""}, {"echo": True}, {"user": "me"}, {"tools": 5}],
    ids=str,
)
def test_a_field_that_asks_a_completion_for_nothing_more_is_served(fields: dict[str, object]) -> None:
    assert completing(seed=1, **fields) == completing(seed=1)


def test_null_means_not_given_in_a_completion_too() -> None:
    nulls = {name: None for name in CompletionRequest.__struct_fields__ if name not in ("model", "prompt")}
    assert completing(**{**nulls, "seed": 1}) == completing(seed=1)
