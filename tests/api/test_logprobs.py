"""Log-probabilities over HTTP, in OpenAI's two shapes, as the official client reads them; and those of a real
tiny model, against one forward pass."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from regrow.actors.engine import Engine
from regrow.actors.events import Logprob, Token
from regrow.actors.served import Served as ServedModel
from regrow.api.logprobs import TextLogprobs
from regrow.config import EngineSettings
from regrow.gpu.runner import ModelRunner
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.random_models import build_random
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.keys import Namespace
from regrow.policy.plan import ChunkTable
from regrow.policy.request import SamplingParams
from tests.api.conftest import Served, Start, chat_body
from tests.api.stub import PROGRESS, QUEUED, READ, StubEngine, finished

MESSAGES = [{"role": "user", "content": "Hello there"}]
HELLO = Logprob(5, b"Hello", -0.25, (Logprob(5, b"Hello", -0.25), Logprob(9, b" you", -1.5)))
HALF = Logprob(6, b"\xf0\x9f", -2.0, (Logprob(9, b" you", -0.5), Logprob(5, b"Hello", -1.0)))
REST = Logprob(7, b"\x98\x80", -0.125, (Logprob(7, b"\x98\x80", -0.125), Logprob(6, b"\xf0\x9f", -3.0)))
ANSWER = (
    Token(1.4, 5, "Hello", HELLO),
    Token(1.5, 6, "", HALF),
    Token(1.6, 7, "\U0001f600", REST),
    finished(),
)
START = Logprob(1, b"<s>", None)
ONCE = Logprob(11, b"Once", -4.0, (Logprob(5, b"Hello", -0.5),))
UPON = Logprob(12, b" upon", -1.0, (Logprob(12, b" upon", -1.0),))
READING = (
    QUEUED,
    replace(PROGRESS, logprobs=(START, ONCE)),
    replace(PROGRESS, logprobs=(UPON,)),
    READ,
)


def entry(token: str, logprob: float, data: bytes) -> dict[str, object]:
    return {"token": token, "logprob": logprob, "bytes": list(data)}


CONTENT = [
    {
        **entry("Hello", -0.25, b"Hello"),
        "top_logprobs": [entry("Hello", -0.25, b"Hello"), entry(" you", -1.5, b" you")],
    },
    {
        **entry("\\xf0\\x9f", -2.0, b"\xf0\x9f"),
        "top_logprobs": [entry(" you", -0.5, b" you"), entry("Hello", -1.0, b"Hello")],
    },
    {
        **entry("\\x98\\x80", -0.125, b"\x98\x80"),
        "top_logprobs": [
            entry("\\x98\\x80", -0.125, b"\x98\x80"),
            entry("\\xf0\\x9f", -3.0, b"\xf0\x9f"),
        ],
    },
]


async def test_a_chat_tells_each_token_with_its_bytes_and_the_most_likely_ones(start: Start) -> None:
    engine = StubEngine([QUEUED, *ANSWER])
    served = await start(engine)
    answer = await served.openai.chat.completions.create(
        model="stub", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    told = answer.choices[0].logprobs
    assert [token.model_dump() for token in told.content] == CONTENT
    assert told.refusal is None
    assert answer.choices[0].message.content == "Hello\U0001f600!"
    assert (engine.requests[0].sampling.logprobs, engine.requests[0].prompt_logprobs) == (2, None)


async def test_a_streamed_chat_tells_each_token_once_also_where_it_adds_no_text_yet(start: Start) -> None:
    served = await start(StubEngine([QUEUED, *ANSWER]))
    stream = await served.openai.chat.completions.create(
        model="stub", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
    )
    choices = [chunk.choices[0] async for chunk in stream]
    told = [choice for choice in choices if choice.logprobs is not None]
    assert [[token.model_dump() for token in choice.logprobs.content] for choice in told] == [
        [token] for token in CONTENT
    ]
    assert [choice.delta.content for choice in told] == ["Hello", "", "\U0001f600"]
    assert "".join(choice.delta.content or "" for choice in choices) == "Hello\U0001f600!"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
async def test_a_chat_asks_the_engine_for_what_its_fields_say(
    start: Start, fields: dict[str, object], asked: int | None
) -> None:
    engine = StubEngine([finished()])
    served = await start(engine)
    _, answer = await served.post(chat_body(**fields))
    assert engine.requests[0].sampling.logprobs == asked
    empty = {"content": [], "refusal": None}
    assert answer["choices"][0]["logprobs"] == (None if asked is None else empty)


async def test_a_completion_tells_tokens_and_where_they_are_in_its_text(start: Start) -> None:
    engine = StubEngine([QUEUED, *ANSWER])
    served = await start(engine)
    answer = await served.openai.completions.create(model="stub", prompt="Once upon", logprobs=2)
    told = answer.choices[0].logprobs
    assert told.tokens == ["Hello", "\\xf0\\x9f", "\\x98\\x80"]
    assert told.token_logprobs == [-0.25, -2.0, -0.125]
    assert told.top_logprobs == [
        {"Hello": -0.25, " you": -1.5},
        {" you": -0.5, "Hello": -1.0, "\\xf0\\x9f": -2.0},
        {"\\x98\\x80": -0.125, "\\xf0\\x9f": -3.0},
    ]
    assert told.text_offset == [0, 5, 5]
    assert (engine.requests[0].sampling.logprobs, engine.requests[0].prompt_logprobs) == (2, None)


async def test_an_echo_tells_the_prompt_too_and_nothing_of_its_first_token(start: Start) -> None:
    engine = StubEngine([*READING, *ANSWER])
    served = await start(engine)
    answer = await served.openai.completions.create(model="stub", prompt="Once upon", logprobs=1, echo=True)
    (choice,) = answer.choices
    told = choice.logprobs
    assert choice.text == "Once uponHello\U0001f600!"
    assert told.tokens == ["<s>", "Once", " upon", "Hello", "\\xf0\\x9f", "\\x98\\x80"]
    assert told.token_logprobs == [None, -4.0, -1.0, -0.25, -2.0, -0.125]
    assert told.top_logprobs[:3] == [None, {"Hello": -0.5, "Once": -4.0}, {" upon": -1.0}]
    assert told.text_offset == [0, 0, 4, 9, 14, 14], "the start token is not in the text"
    assert (engine.requests[0].sampling.logprobs, engine.requests[0].prompt_logprobs) == (1, 1)


@pytest.mark.parametrize("echo", [True, False])
async def test_a_streamed_completion_tells_the_same_in_pieces(start: Start, echo: bool) -> None:
    served = await start(StubEngine([*READING, *ANSWER] if echo else [QUEUED, PROGRESS, READ, *ANSWER]))
    asked = {"model": "stub", "prompt": "Once upon", "logprobs": 1, "echo": echo}
    whole = (await served.openai.completions.create(**asked)).choices[0]
    stream = await served.openai.completions.create(**asked, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == whole.text
    told = [choice.logprobs for choice in choices if choice.logprobs is not None]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [entry for piece in told for entry in getattr(piece, field)]
        assert pieces == getattr(whole.logprobs, field)
    assert choices[0].text == ("Once upon" if echo else "Hello")


async def test_an_echo_without_log_probabilities_asks_for_none(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    _, answer = await served.post({"model": "stub", "prompt": "Once", "echo": True}, "/v1/completions")
    assert (engine.requests[0].sampling.logprobs, engine.requests[0].prompt_logprobs) == (None, None)
    assert answer["choices"][0]["logprobs"] is None


def test_the_space_that_a_tokenizer_puts_before_a_text_moves_no_offset() -> None:
    prompt = [Logprob(3, b" Once", None), UPON]
    assert TextLogprobs("Once upon", prompt).of([*prompt, HELLO])["text_offset"] == [0, 4, 9]


TEXT = "Once upon a time there was a cache that forgot nothing, and told why. " * 3
FAMILY, CONTEXT = "qwen3_5", 512


@pytest_asyncio.fixture
async def real(start: Start) -> AsyncIterator[Served]:
    """A server over a tiny random hybrid."""
    model = ServedModel(
        name="tiny",
        runner=ModelRunner(build_random(FAMILY), 2, CONTEXT, "full"),
        tokenizer=ChatTokenizer(byte_tokenizer(512, CONTEXT)),
        table=ChunkTable.uniform(64),
        namespace=Namespace.of("tiny"),
        exact="full",
        default_sampling=SamplingParams(),
        budget=1 << 24,
    )
    async with Engine.open(EngineSettings(chunk=64, debug=True), served=model) as engine:
        yield await start(engine)


async def completed(served: Served, **fields: object) -> dict:
    status, answer = await served.post({"model": "tiny", **fields}, "/v1/completions")
    assert status == 200, answer
    return answer


async def test_an_echoed_text_has_the_log_probabilities_of_one_forward_pass(real: Served) -> None:
    first = await completed(real, prompt=TEXT, max_tokens=8, logprobs=5, ignore_eos=True)
    again = await completed(real, prompt=TEXT, max_tokens=8, logprobs=5, ignore_eos=True, echo=True)
    warm = await completed(real, prompt=TEXT, max_tokens=8, logprobs=5, ignore_eos=True)
    ids = [*TEXT.encode()]
    told = again["choices"][0]["logprobs"]
    assert told["tokens"][: len(ids)] == list(TEXT)
    assert told["text_offset"][: len(ids) + 1] == list(range(len(ids) + 1))
    spell = ChatTokenizer(byte_tokenizer(512, CONTEXT)).token_bytes
    names = [spell(token).decode(errors="backslashreplace") for token in range(512)]
    answer = [names.index(token) for token in told["tokens"][len(ids) :]]
    assert len(answer) == 8
    with torch.inference_mode():
        logits = build_random(FAMILY)(input_ids=torch.tensor([[*ids, *answer]]), use_cache=False).logits[0]
    wanted = torch.log_softmax(logits, 1)
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    for place, token in enumerate([*ids, *answer][1:]):
        assert told["token_logprobs"][place + 1] == pytest.approx(float(wanted[place, token]), abs=1e-4)
        best = sorted(told["top_logprobs"][place + 1].values(), reverse=True)[:5]
        assert best == pytest.approx(wanted[place].topk(5).values.tolist(), abs=1e-4)
    assert again["regrow"]["reused"] == 0
    assert "log-probabilities" in again["regrow"]["why"]
    assert warm["regrow"]["reused"] > 0
    for field in ("tokens", "token_logprobs", "top_logprobs"):
        cold = first["choices"][0]["logprobs"][field]
        assert json.dumps(cold) == json.dumps(warm["choices"][0]["logprobs"][field])
        assert json.dumps(cold) == json.dumps(told[field][len(ids) :])
