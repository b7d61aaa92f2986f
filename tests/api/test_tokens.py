"""/tokenize, /detokenize and /apply-template."""

import pytest

from regrow.policy.plan import MessageEnd, ReadPlan
from tests.api.conftest import Served, Start, chat_body
from tests.api.stub import StubEngine, StubModel

CHAT = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]


@pytest.mark.parametrize("name", ["text", "prompt"])
async def test_a_text_is_told_with_its_tokens_and_what_the_context_holds(
    start: Start, engine: StubEngine, name: str
) -> None:
    served = await start(engine)
    status, answer = await served.post({name: "Once upon a time"}, "/tokenize")
    assert status == 200
    assert answer == {"tokens": [1, 4, 4, 1, 4], "count": 5, "max_model_len": 4096}
    _, bare = await served.post({name: "Once upon", "add_special_tokens": False}, "/tokenize")
    assert bare["tokens"] == [4, 4]
    assert (await served.post({name: ""}, "/tokenize"))[1]["tokens"] == [1]


async def test_a_chat_is_told_with_its_tokens(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    _, answer = await served.post({"messages": CHAT}, "/tokenize")
    assert answer == {"tokens": [2, 6, 5, 5], "count": 4, "max_model_len": 4096}


async def test_the_cuts_of_the_read_plan_come_where_asked_for(start: Start, engine: StubEngine) -> None:
    engine.plan = ReadPlan(700, (256, 300, 512), (MessageEnd(300, "system"), MessageEnd(512, "user")))
    served = await start(engine)
    _, answer = await served.post({"messages": CHAT, "cuts": True}, "/tokenize")
    assert answer["cuts"] == [
        {"position": 256, "kind": "grid", "role": None},
        {"position": 300, "kind": "message", "role": "system"},
        {"position": 512, "kind": "message", "role": "user"},
    ]
    assert "cuts" not in (await served.post({"messages": CHAT, "cuts": False}, "/tokenize"))[1]


async def test_tokens_are_told_as_text_under_the_names_that_clients_know(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    assert await served.post({"tokens": [2, 3]}, "/detokenize") == (
        200,
        {"text": "xx xxx", "prompt": "xx xxx"},
    )
    assert (await served.post({"tokens": []}, "/detokenize"))[1]["text"] == ""


async def test_a_chat_is_told_as_the_template_writes_it(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    tool = {"type": "function", "function": {"name": "f"}}
    fields = {"messages": CHAT, "tools": [tool], "chat_template_kwargs": {"thinking": False}}
    _, answer = await served.post(fields, "/apply-template")
    assert answer == {
        "prompt": f"system: Be brief.\nuser: Hello there\n{tool}\n('thinking', False)",
    }
    _, answer = await served.post({"messages": CHAT, "tokens": True}, "/apply-template")
    assert answer["tokens"] == [2, 6, 5, 5]


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
async def test_the_body_of_a_chat_can_be_sent_as_it_is(start: Start, engine: StubEngine, path: str) -> None:
    served = await start(engine)
    status, _ = await served.post(chat_body(stream=True, temperature=0.5, max_tokens=5, n=2), path)
    assert status == 200
    assert not engine.requests


ROUTES = {
    "/tokenize": {"text": "Once"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": CHAT},
}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *[(path, {"model": 5}, "model") for path in ROUTES],
        ("/tokenize", {"text": 5}, "text"),
        ("/tokenize", {"text": None}, "text"),
        ("/tokenize", {"prompt": "Once"}, "prompt"),
        ("/tokenize", {"messages": CHAT}, "messages"),
        ("/tokenize", {"text": None, "messages": []}, "messages"),
        ("/tokenize", {"text": None, "messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"text": None, "messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"add_special_tokens": "no"}, "add_special_tokens"),
        ("/tokenize", {"cuts": 1}, "cuts"),
        ("/detokenize", {"tokens": "hello"}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ("/apply-template", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("/apply-template", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ("/apply-template", {"tokens": "yes"}, "tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_field_is_a_400_that_names_it(
    start: Start, engine: StubEngine, path: str, fields: dict[str, object], param: str
) -> None:
    served = await start(engine)
    status, answer = await served.post(ROUTES[path] | fields, path)
    assert (status, answer["error"]["param"]) == (400, param)
    assert (await served.post(ROUTES[path], path))[0] == 200


@pytest.mark.parametrize("path", ROUTES)
async def test_the_model_need_not_be_named_and_must_be_served(
    start: Start, engine: StubEngine, path: str
) -> None:
    served = await start(engine)
    assert (await served.post({**ROUTES[path], "model": "stub"}, path))[0] == 200
    status, answer = await served.post({**ROUTES[path], "model": "gpt-9"}, path)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_without_a_chat_template_only_chats_are_refused(start: Start) -> None:
    served: Served = await start(StubEngine(info=StubModel(has_template=False)))
    for path in ("/tokenize", "/apply-template"):
        status, answer = await served.post({"messages": CHAT}, path)
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")
    assert (await served.post({"text": "Once"}, "/tokenize"))[0] == 200


@pytest.mark.parametrize("path", ROUTES)
async def test_before_the_model_is_loaded_there_is_nothing_to_tell(start: Start, path: str) -> None:
    served = await start(None)
    status, answer = await served.post(ROUTES[path], path)
    assert (status, answer["error"]["code"]) == (503, "loading")


async def test_more_messages_than_the_limit_are_a_400(start: Start, engine: StubEngine) -> None:
    served = await start(engine, message_limit=1)
    for path in ("/tokenize", "/apply-template"):
        assert (await served.post({"messages": CHAT}, path))[1]["error"]["param"] == "messages"
