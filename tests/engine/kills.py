"""Lives of an engine that end by kill -9 at random moments, on one cache directory.

Run as a program: `python kills.py FAMILY DIRECTORY KILLS SEED`. The model is loaded once; every life is a
fork of this process, which asks and checks each answer against what an engine that keeps nothing has said.
After every kill all records are read and held against what was there before. Prints the counts as JSON.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from regrow.actors.engine import Engine
from regrow.actors.events import Finished, Token
from regrow.actors.served import Served, load_served
from regrow.api.logs import configure_logs
from regrow.config import EngineSettings
from regrow.policy.request import GenerateRequest
from regrow.store.files import OsFiles
from regrow.store.records import Records

CHATS, TURNS = 4, 4
LONGEST_LIFE_S = 0.8
FRESH = 4  # after so many lives the directory is emptied, so that there is something to write
WRONG_ANSWER = 3
Answers = dict[tuple[int, int], tuple[int, ...]]


def request(chat: int, turn: int) -> GenerateRequest:
    """Turn `turn` of a chat; half of the chats share a system prompt."""
    messages = [{"role": "system", "content": f"You are number {chat % 2}. " * 20}]
    for n in range(turn + 1):
        messages.append({"role": "user", "content": f"chat {chat} asks {n} " * 6})
        if n < turn:
            messages.append({"role": "assistant", "content": f"the answer {n}"})
    return GenerateRequest(messages=messages, max_tokens=3)


async def ask(engine: Engine, asked: GenerateRequest) -> tuple[tuple[int, ...], Finished]:
    run = await engine.submit(asked)
    events = [event async for event in run]
    assert isinstance(events[-1], Finished), events[-1]
    return tuple(event.id for event in events if isinstance(event, Token)), events[-1]


async def truth(settings: EngineSettings, served: Served) -> Answers:
    settings = replace(settings, cache=False, cache_dir=None)
    async with Engine.open(settings, served=replace(served, budget=0)) as engine:
        return {
            (chat, turn): (await ask(engine, request(chat, turn)))[0]
            for chat in range(CHATS)
            for turn in range(TURNS)
        }


async def live(settings: EngineSettings, served: Served, answers: Answers, seed: int, log: int) -> None:
    """Ask on until the kill comes; write a letter for each answer, by its source."""
    rng = random.Random(seed)
    async with Engine.open(settings, served=served) as engine:
        turns = {chat: rng.randrange(TURNS) for chat in range(CHATS)}
        while True:
            chat = rng.randrange(CHATS)
            tokens, end = await ask(engine, request(chat, turns[chat]))
            if tokens != answers[chat, turns[chat]]:
                os._exit(WRONG_ANSWER)
            os.write(log, end.reuse.source[:1].encode())
            turns[chat] = (turns[chat] + 1) % TURNS
            await asyncio.sleep(rng.choice([0, 0, 0.1]))


def kept(directory: Path, served: Served) -> tuple[set[bytes], list[str]]:
    """Read every record; return the cuts that can be used, and what is broken."""
    files = OsFiles(directory)
    records = Records(files, served.namespace.digest, 1 << 40, 0)
    records.open()
    for name in records.live():
        records.verify(name)
    files.close()
    return {p for stored in records.live().values() for _, p in stored.header.cuts}, list(records.broken)


def main(family: str, directory: Path, kills: int, seed: int) -> None:
    configure_logs("error", as_json=False)
    torch.set_num_threads(1)
    settings = EngineSettings(
        model=f"random:{family}",
        dtype="float32",
        parallel=2,
        context=1024,
        chunk=64,
        exact="full",
        cache_dir=directory,
        cache_disk_gib=1,
        root_min=64,
        save_after_s=0.05,
    )
    served = replace(load_served(settings, lambda text, share: None), budget=64 << 20)
    answers = asyncio.run(truth(settings, served))
    rng = random.Random(seed)
    reader, writer = os.pipe()
    before: set[bytes] = set()
    counts = {"kills": 0, "wrong": 0, "broken": 0, "lost": 0, "records": 0}
    for life in range(kills):
        child = os.fork()
        if child == 0:
            served.runner.reset()
            asyncio.run(live(settings, served, answers, seed * 1000 + life, writer))
        time.sleep(rng.uniform(0.02, LONGEST_LIFE_S))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        counts["kills"] += os.WIFSIGNALED(status)
        counts["wrong"] += os.WIFEXITED(status)
        cuts, broken = kept(directory, served)
        counts["records"] += len(cuts)
        counts["broken"] += len(broken)
        counts["lost"] += len(before - cuts)
        before = cuts
        if life % FRESH == FRESH - 1:
            before = set()
            for path in directory.iterdir():
                path.unlink()
    os.close(writer)
    sources = os.read(reader, 1 << 20).decode()
    print(json.dumps({**counts, "answers": len(sources), "disk": sources.count("d")}))


def arguments(words: Sequence[str]) -> tuple[str, Path, int, int]:
    family, directory, kills, seed = words
    return family, Path(directory), int(kills), int(seed)


if __name__ == "__main__":
    main(*arguments(sys.argv[1:]))
