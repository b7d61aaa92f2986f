"""A ten-turn agent chat with tool results: how many prompt tokens are read a turn, over those that are new.

The history is rendered again every turn, as clients do. What the model decodes in a turn is not what the
history says of it afterwards, as where thinking is removed; so nothing decoded can be passed off as read. A
perfect engine reads about 1.0.
"""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass

import harness
from regrow import Engine, EngineSettings, GenerateRequest
from regrow.actors.events import Finished
from regrow.policy.keys import Keys, common_prefix

TURNS = 10
TEXT = (
    "the file holds a parser that reads one line and returns a token list for each rule of the grammar tests"
    " fail when an empty line follows a comment so check the loop and run them again before you commit"
)
Message = Mapping[str, object]
MODES: dict[str, dict[str, object]] = {
    "regrow": {},
    "no checkpoints, no roots": {"checkpoints": 0, "roots": 0},
    "cache off": {"cache": False},
}


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one prompt: all of them, those beyond the prompt before, and those that were read."""

    prompt: int
    new: int
    read: int


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(TEXT.split(), k=words)) + "."


def added_messages(seed: int) -> list[tuple[Message, ...]]:
    """Return what each turn adds to the history: system and user, then assistant and tool or user."""
    rng = random.Random(seed)
    added: list[tuple[Message, ...]] = [
        (
            {"role": "system", "content": f"You are a coding agent. {prose(rng, 900)}"},
            {"role": "user", "content": prose(rng, 40)},
        )
    ]
    for turn in range(1, TURNS):
        said = {"role": "assistant", "content": prose(rng, 30)}
        role, words = ("user", 25) if turn % 3 == 0 else ("tool", 150)
        added.append((said, {"role": role, "content": prose(rng, words)}))
    return added


async def chat(settings: EngineSettings, seed: int) -> list[Turn]:
    turns: list[Turn] = []
    history: list[Message] = []
    before: Keys | None = None
    async with Engine.open(settings) as engine:
        for added in added_messages(seed):
            history.extend(added)
            keys = engine.tokenizer.encode_chat(history, (), {})
            new = len(keys) - (0 if before is None else common_prefix(keys, before))
            before = keys
            answer = await engine.submit(GenerateRequest(messages=tuple(history), max_tokens=4))
            *_, end = [event async for event in answer]
            assert isinstance(end, Finished), end
            turns.append(Turn(len(keys), new, end.reuse.read))
    return turns


def row(mode: str, turns: list[Turn]) -> dict[str, harness.Cell]:
    """Sum up all turns but the first, which has nothing to reuse."""
    later = turns[1:]
    new, read = sum(turn.new for turn in later), sum(turn.read for turn in later)
    return {
        "engine": mode,
        "last prompt": turns[-1].prompt,
        "new": new,
        "read": read,
        "read / new": read / new,
        "worst turn, read - new": max(turn.read - turn.new for turn in later),
    }


def main() -> None:
    opts = harness.options("turns", __doc__ or "")
    rows = []
    for mode, changes in MODES.items():
        settings = EngineSettings(model=opts.model, exact=opts.exact, parallel=1, **changes)
        rows.append(row(mode, asyncio.run(chat(settings, opts.seed))))
    harness.report("turns", opts, f"Prompt tokens of turns 2 to {TURNS} of an agent chat", rows)


if __name__ == "__main__":
    main()
