"""A conversation with a server through the official client, turn by turn, as a client renders it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import AutoTokenizer

from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.once import model_directory
from regrow.models.progress import silent
from regrow.models.random_models import PREFIX
from regrow.models.sources import locate
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.keys import Keys
from tests.e2e.server import Client

Message = dict[str, str]

SYSTEM, ANSWER = 1000, 60  # tokens

CAPITALS = {
    "Albania": "Tirana",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Mexico": "Mexico City",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Turkey": "Ankara",
}
TEACHER = "You are a friendly teacher of geography who answers in one or two plain sentences." + "".join(
    f" The capital of {country} is {capital}; people who travel to {country} often begin their journey in"
    f" {capital}, where they visit the old town, the market and the museum of {country}."
    for country, capital in CAPITALS.items()
)


@cache
def tokenizer_of(model: str) -> ChatTokenizer:
    """The tokenizer that the server uses for a model that it has loaded once."""
    if model.startswith(PREFIX):
        return ChatTokenizer(byte_tokenizer(512, 32_768))
    path, _ = locate(model, model_directory(None), silent)
    return ChatTokenizer(AutoTokenizer.from_pretrained(path))


@dataclass(frozen=True)
class Turn:
    """One request and its answer. `messages` are the request's own; `regrow` the facts of its reuse."""

    messages: tuple[Message, ...]
    text: str
    prompt_tokens: int
    regrow: Mapping[str, Any]


async def ask(client: Client, model: str, messages: Sequence[Message], **fields: object) -> Turn:
    """Send one request, greedy, and return the turn. fields: more of its body."""
    answer = await client.openai.chat.completions.create(
        model=model, messages=messages, extra_body={"temperature": 0, "max_tokens": ANSWER, **fields}
    )
    assert answer.usage is not None
    facts = answer.model_extra["regrow"]
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == facts["reused"]
    return Turn(tuple(messages), answer.choices[0].message.content, answer.usage.prompt_tokens, facts)


async def talk(
    client: Client, model: str, system: str, questions: Sequence[str], **fields: object
) -> list[Turn]:
    """Hold a conversation: every request carries all that was said before."""
    turns: list[Turn] = []
    messages: list[Message] = [{"role": "system", "content": system}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        turns.append(await ask(client, model, messages, **fields))
        messages.append({"role": "assistant", "content": turns[-1].text})
    return turns


def geography(model: str) -> str:
    """A system prompt of about 1,000 tokens of this model."""
    tokenizer = tokenizer_of(model)
    return tokenizer.decode(tokenizer.encode(TEACHER)[:SYSTEM])


def prompt_of(model: str, turn: Turn) -> Keys:
    """The tokens that the server was to read for a turn."""
    keys = tokenizer_of(model).encode_chat(turn.messages)
    assert len(keys) == turn.prompt_tokens
    return keys
