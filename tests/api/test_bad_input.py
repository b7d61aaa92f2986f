"""Every bad input is a clear 4xx in OpenAI's shape, and the server serves on."""

import pytest

from regrow.errors import Draining, Overloaded
from tests.api.conftest import Served, Start, chat_body
from tests.api.stub import StubEngine, StubModel


def user(content: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}]}


async def refused(
    served: Served, body: object, status: int = 400, path: str = "/v1/chat/completions"
) -> dict:
    """Post the body; returns the error object, after checking that the server serves on."""
    got, answer = await served.post(body, path)
    assert got == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    again, _ = await served.post(chat_body())
    assert again == 200
    return answer["error"]


GENERATION = [
    ({"model": 5}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x", 5]}, "stop[1]"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"n": 129}, "n"),
    ({"n": 0}, "n"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"regrow": {"cache": "maybe"}}, "regrow.cache"),
    ({"regrow": {"deadline_ms": 0}}, "regrow.deadline_ms"),
    ({"regrow": {"progress": "yes"}}, "regrow.progress"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
]
CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "tool"}]}, "messages[1].content"),
    (user(5), "messages[0].content"),
    (user([{"type": "smell"}]), "messages[0].content[0].type"),
    (user([{"type": "text"}]), "messages[0].content[0].text"),
    (
        user([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}]),
        "messages[0].content[1]",
    ),
    (user([{"type": "input_audio"}]), "messages[0].content[0]"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice.type"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
]
COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [[5], 5]}, "prompt"),
    ({"prompt": ["a", ["b"]]}, "prompt[1][0]"),
    ({"prompt": [5, 1.5]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [2**70]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"suffix": "the end"}, "suffix"),
    ({"suffix": 5}, "suffix"),
    ({"echo": "yes"}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
]
ROUTES = {"/v1/chat/completions": chat_body(), "/v1/completions": {"model": "stub", "prompt": "Hello"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *[(path, *row) for path in ROUTES for row in GENERATION],
        *[("/v1/chat/completions", *row) for row in CHAT],
        *[("/v1/completions", *row) for row in COMPLETIONS],
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_field_is_a_400_that_names_it(
    start: Start, engine: StubEngine, path: str, fields: dict[str, object], param: str
) -> None:
    served = await start(engine)
    error = await refused(served, ROUTES[path] | fields, path=path)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not [run for run in engine.runs[:-1] if not run.cancelled.is_set()]  # the last is the good one


async def test_a_wrong_choice_is_told_what_is_allowed(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    error = await refused(served, chat_body(messages=[{"role": "robot", "content": "x"}]))
    assert "'robot'" in error["message"]
    assert "system, developer, user, assistant, tool" in error["message"]


async def test_a_missing_prompt_is_a_400(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    error = await refused(served, {"model": "stub"}, path="/v1/completions")
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


async def test_an_image_is_refused_because_the_model_has_no_vision(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = await refused(served, chat_body(**user([part])))
    assert "no vision" in error["message"]


async def test_a_missing_model_is_a_400_and_an_unknown_one_a_404(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    missing = await refused(served, user("x"))
    assert (missing["param"], missing["code"]) == ("model", "missing_required_parameter")
    unknown = await refused(served, chat_body(model="gpt-9"), status=404)
    assert (unknown["param"], unknown["code"]) == ("model", "model_not_found")
    assert "stub" in unknown["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "stub", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "stub", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "stub", "temperature": NaN}',
        b'{"model": "stub", "tools": ' + b"[" * 100_000,
        b'{"x": ' * 5_000 + b"1" + b"}" * 5_000,
    ],
    ids=lambda body: repr(body[:40]),
)
async def test_a_body_that_is_no_json_object_is_a_400(start: Start, engine: StubEngine, body: bytes) -> None:
    served = await start(engine)
    headers = {"Content-Type": "application/json"}
    async with served.http.post("/v1/chat/completions", data=body, headers=headers) as response:
        answer = await response.json()
    assert response.status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert (await served.post(chat_body()))[0] == 200


async def test_a_body_that_is_not_what_its_encoding_says_is_a_400(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with served.http.post("/v1/chat/completions", data=b"{}", headers=headers) as response:
        assert response.status == 400
    assert (await served.post(chat_body()))[0] == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_that_does_not_say_it_is_json_is_a_415(
    start: Start, engine: StubEngine, content_type: str
) -> None:
    served = await start(engine)
    headers = {"Content-Type": content_type}
    async with served.http.post("/v1/chat/completions", data=b"{}", headers=headers) as response:
        answer = await response.json()
    assert response.status == 415
    assert "application/json" in answer["error"]["message"]


async def test_a_prompt_over_the_context_is_a_400_with_both_numbers(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    error = await refused(served, chat_body(**user("word " * 4090), max_tokens=10))
    assert error["code"] == "context_length_exceeded"
    assert "4090" in error["message"]
    assert "4096" in error["message"]


async def test_two_mebibytes_of_text_are_a_clear_400(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    error = await refused(served, chat_body(**user("word " * (2 * 2**20 // 5))))
    assert error["code"] == "context_length_exceeded"


async def test_a_body_over_the_limit_is_a_413(start: Start, engine: StubEngine) -> None:
    served = await start(engine, body_limit=10_000)
    error = await refused(served, chat_body(**user("x" * 20_000)), status=413)
    assert error["code"] == "request_entity_too_large"


async def test_more_messages_than_the_limit_are_a_400(start: Start, engine: StubEngine) -> None:
    served = await start(engine, message_limit=3)
    error = await refused(served, chat_body(messages=[{"role": "user", "content": "x"}] * 4))
    assert error["param"] == "messages"


async def test_a_model_without_a_chat_template_says_so(start: Start) -> None:
    served = await start(StubEngine(info=StubModel(has_template=False)))
    status, answer = await served.post(chat_body())
    assert (status, answer["error"]["code"]) == (400, "no_chat_template")
    assert "/v1/completions" in answer["error"]["message"]


async def test_an_unknown_route_is_a_404_and_a_wrong_method_a_405(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    status, answer = await served.get("/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    async with served.http.get("/v1/chat/completions") as response:
        answer = await response.json()
    assert (response.status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["Allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    start: Start, engine: StubEngine, stream: bool
) -> None:
    served = await start(engine)
    engine.refuse_with = Overloaded("64 requests wait already", retry_after=7)
    async with served.http.post("/v1/chat/completions", json=chat_body(stream=stream)) as response:
        answer = await response.json()
    assert (response.status, response.headers["Retry-After"]) == (429, "7")
    assert answer["error"]["type"] == "rate_limit_error"


async def test_a_server_that_drains_answers_503(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    engine.refuse_with = Draining("the server is shutting down")
    status, answer = await served.post(chat_body())
    assert (status, answer["error"]["code"]) == (503, "draining")
