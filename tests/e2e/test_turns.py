"""Every turn reads only what is new in it, and what the demo answers makes sense."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import pytest_asyncio

from regrow.policy.checkpoints import assistant_starts
from regrow.policy.keys import common_prefix
from regrow.policy.plan import ChunkTable, build_plan
from tests.e2e.server import Server
from tests.e2e.talk import Turn, ask, geography, prompt_of, talk, tokenizer_of

DEMO = pytest.param("demo", marks=pytest.mark.demo)
QUESTIONS = (
    "What is the capital of France?",
    "Which city is the capital of Japan?",
    "Write two sentences about the sea.",
    "Thank you! What is the capital of Italy?",
)
EDITED = "Thank you! What is the capital of Spain?"
BESIDE_NEW = {"demo": 8, "random:qwen3_5": 12}  # tokens read again: what opens the assistant's message
COMMON = (
    "a an and are as at be but by can city country for from has have i in is it its of on or sea that the"
    " their there they this to was which with you"
)


@dataclass(frozen=True)
class Conversation:
    """Four turns, and a fifth request in which the user's last message was edited."""

    model: str
    turns: Sequence[Turn]
    edited: Turn


@pytest.fixture(scope="module", params=[DEMO, "hybrid"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def conversation(server: Server) -> Conversation:
    async with server.client() as client:
        turns = await talk(client, server.model, geography(server.model), QUESTIONS)
        messages = [*turns[-1].messages[:-1], {"role": "user", "content": EDITED}]
        return Conversation(server.model, turns, await ask(client, server.model, messages))


def test_every_turn_from_the_second_on_reads_only_its_new_tokens(conversation: Conversation) -> None:
    for before, turn in pairwise(conversation.turns):
        prompt = prompt_of(conversation.model, turn)
        new = len(prompt) - common_prefix(prompt, prompt_of(conversation.model, before))
        assert turn.regrow["read"] <= new + BESIDE_NEW[conversation.model]
        assert turn.regrow["source"] in ("live", "checkpoint")
        assert turn.regrow["why"] is None


def test_an_edited_message_resumes_at_the_assistant_start_before_it_or_later(
    conversation: Conversation,
) -> None:
    marks = tokenizer_of(conversation.model).marks
    plan = build_plan(prompt_of(conversation.model, conversation.edited), ChunkTable.uniform(64), marks)
    *_, before_the_edit, _own = assistant_starts(plan)
    assert conversation.edited.regrow["reused"] >= before_the_edit > 1000


@pytest.mark.parametrize("server", [DEMO], indirect=True)
def test_the_demo_answers_in_sensible_english(conversation: Conversation) -> None:
    texts = [turn.text for turn in (*conversation.turns, conversation.edited)]
    for text, word in zip(texts, ("Paris", "Tokyo", "sea", "Rome", "Madrid"), strict=True):
        assert word in text
    said = " ".join(texts)
    assert sum(c.isalpha() or c.isspace() for c in said) > 0.9 * len(said)
    words = "".join(c if c.isalpha() else " " for c in said.lower()).split()
    assert sum(word in COMMON.split() for word in words) > 0.3 * len(words)
