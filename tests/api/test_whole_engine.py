"""The HTTP layer over the real engine and tokenizer, with a scripted device: what the routes say agrees."""

from collections.abc import AsyncIterator

import pytest_asyncio

from regrow.actors.engine import Engine
from regrow.actors.served import Served as ServedModel
from regrow.config import EngineSettings
from regrow.policy.keys import Namespace
from regrow.policy.plan import ChunkTable
from regrow.policy.request import SamplingParams
from tests.api.conftest import Served, Start
from tests.world.fake_runner import FakeRunner
from tests.world.tokenizer import EOS, VOCAB, WORDS, world_tokenizer

CHAT = [
    {"role": "system", "content": "Answer in one word. " * 8},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest_asyncio.fixture
async def served(start: Start) -> AsyncIterator[Served]:
    model = ServedModel(
        name="scripted",
        runner=FakeRunner(slots=2, context=2048, vocab=VOCAB, words=WORDS, eos=EOS),
        tokenizer=world_tokenizer(),
        table=ChunkTable.uniform(64),
        namespace=Namespace.of("scripted"),
        exact="full",
        default_sampling=SamplingParams(),
        budget=1 << 20,
    )
    async with Engine.open(EngineSettings(chunk=64, debug=True), served=model) as engine:
        yield await start(engine)


async def told(served: Served, path: str, **body: object) -> dict:
    status, answer = await served.post({"model": "scripted", **body}, path)
    assert status == 200, answer
    return answer


async def test_the_template_the_tokens_and_the_text_of_a_chat_agree(served: Served) -> None:
    shown = await told(served, "/apply-template", messages=CHAT, tokens=True)
    tokens = (await told(served, "/tokenize", messages=CHAT))["tokens"]
    assert tokens == shown["tokens"]
    assert (await told(served, "/detokenize", tokens=tokens))["text"] == shown["prompt"]
    assert shown["prompt"].endswith("<|im_start|>assistant\n")
    bare = await told(served, "/tokenize", text=shown["prompt"], add_special_tokens=False)
    assert bare["tokens"] == tokens
    ended = await told(served, "/apply-template", messages=CHAT, add_generation_prompt=False)
    assert shown["prompt"] == ended["prompt"] + "<|im_start|>assistant\n"


async def test_a_chat_has_as_many_tokens_as_tokenize_says_and_resumes_at_one_of_its_cuts(
    served: Served,
) -> None:
    planned = await told(served, "/tokenize", messages=CHAT, cuts=True)
    roles = [(cut["kind"], cut["role"]) for cut in planned["cuts"]]
    assert [role for kind, role in roles if kind == "message"] == ["system", "user"]
    assert ("grid", None) in roles
    first = await told(served, "/v1/chat/completions", messages=CHAT, max_tokens=4)
    later = [*CHAT, first["choices"][0]["message"], {"role": "user", "content": "And of Spain?"}]
    second = await told(served, "/v1/chat/completions", messages=later, max_tokens=4)
    (asked,) = [cut["position"] for cut in planned["cuts"] if cut["role"] == "user"]
    assert second["regrow"]["reused"] == second["usage"]["prompt_tokens_details"]["cached_tokens"] == asked
    assert second["usage"]["prompt_tokens"] == (await told(served, "/tokenize", messages=later))["count"]


async def test_a_text_and_its_ids_are_the_same_prompt(served: Served) -> None:
    text = "Once upon a time there was a cache that forgot nothing. " * 3
    ids = (await told(served, "/tokenize", text=text))["tokens"]
    first = await told(served, "/v1/completions", prompt=text, max_tokens=8)
    again = await told(served, "/v1/completions", prompt=ids, max_tokens=8, echo=True)
    assert first["choices"][0]["text"]
    assert again["choices"][0]["text"] == text + first["choices"][0]["text"]
    assert first["usage"]["prompt_tokens"] == again["usage"]["prompt_tokens"] == len(ids)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["regrow"]["reused"] > 0


async def test_more_prompts_than_slots_are_each_answered_as_alone(served: Served) -> None:
    prompts = [f"Tell me of {name}. " for name in ("ants", "bees", "cats", "dogs", "eels")]
    together = await served.openai.completions.create(model="scripted", prompt=prompts, max_tokens=6)
    alone = [
        await served.openai.completions.create(model="scripted", prompt=prompt, max_tokens=6)
        for prompt in prompts
    ]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert len({choice.text for choice in together.choices}) == len(prompts)
    assert together.usage.completion_tokens == 6 * len(prompts)


async def test_what_cannot_be_read_is_named_by_its_field(served: Served) -> None:
    for body, param, code in (
        ({"prompt": ["fits", "x" * 3000]}, "prompt[1]", "context_length_exceeded"),
        ({"prompt": [VOCAB]}, "prompt", None),
        ({"prompt": ""}, "prompt", None),
    ):
        status, answer = await served.post({"model": "scripted", **body}, "/v1/completions")
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    status, answer = await served.post({"tokens": [VOCAB]}, "/detokenize")
    assert (status, answer["error"]["param"]) == (400, "tokens")


async def test_the_cache_route_shows_roots_and_parked_chats_and_a_deleted_root_is_read_again(
    served: Served,
) -> None:
    long = [{"role": "system", "content": "Answer in one word. " * 20}]
    for question in ("one", "two", "three"):  # of two slots the third chat takes one that holds another
        await told(
            served,
            "/v1/chat/completions",
            messages=[*long, {"role": "user", "content": question}],
            max_tokens=2,
        )
    status, kept = await served.get("/v1/cache")
    assert status == 200
    assert [root["uses"] for root in kept["roots"]] == [2]
    assert len(kept["parked"]) == 1
    assert sum(kept["used"].values()) <= kept["budget"]
    prefix = kept["roots"][0]["prefix"]
    async with served.http.delete(f"/v1/cache/roots/{prefix}") as response:
        assert response.status == 200
    assert (await served.get("/v1/cache"))[1]["roots"] == []


async def test_a_pin_names_a_message_of_the_request(served: Served) -> None:
    body = {"model": "scripted", "messages": CHAT, "max_tokens": 2}
    assert (await served.post({**body, "regrow": {"pin": 1}}))[0] == 200
    status, answer = await served.post({**body, "regrow": {"pin": 2}})
    assert (status, answer["error"]["param"]) == (400, "regrow.pin")
