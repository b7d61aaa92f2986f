"""The disk tier on real architectures (V3, D1 to D3): what comes back after a restart is what reading gives,
bit for bit; what changes the bits keeps records away, what does not finds them; kill -9 at any moment costs
no more than what was not written yet."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regrow.actors.engine import Engine
from regrow.actors.events import Finished, Token
from regrow.actors.messages import DigestRequest
from regrow.actors.served import Served, load_served
from regrow.config import EngineSettings
from regrow.models.identity import arithmetic
from regrow.policy.request import GenerateRequest
from tests.engine.test_random_lives import SLOTS, Faulty, Life
from tests.long_form import many

FAMILIES = ("qwen3_5", "falcon_h1", "llama", "gemma3")
KILLS = many(10, long=50)
LIVES = many(2, long=8)
SYSTEM = {"role": "system", "content": "You are good, and answer in one word. " * 12}
OPENING = [SYSTEM, {"role": "user", "content": "hello there, what is this? " * 20}]
NEXT = [*OPENING, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and that?"}]
SIBLING = [SYSTEM, {"role": "user", "content": "another one"}]
Messages = Sequence[dict[str, str]]
Told = tuple[tuple[int, ...], str, Finished]


def settings_of(family: str, directory: Path | None, **others: object) -> EngineSettings:
    chosen = EngineSettings(
        model=f"random:{family}",
        dtype="float32",
        parallel=2,
        context=2048,
        chunk=64,
        exact="full",
        cache_mib=64,
        debug=True,
        cache_dir=directory,
        cache_disk_gib=1,
    )
    return replace(chosen, **others)  # type: ignore[arg-type]


async def ask(engine: Engine, messages: Messages) -> Told:
    """Return the answer, the digest of the slot after it, and how it ended."""
    run = await engine.submit(GenerateRequest(messages=messages, max_tokens=4))
    events = [event async for event in run]
    assert run.slot is not None
    digest = await engine.slot(run.slot).ask(DigestRequest(), 60)
    assert isinstance(events[-1], Finished)
    return tuple(e.id for e in events if isinstance(e, Token)), digest.value, events[-1]


async def live(settings: EngineSettings, *asked: Messages, served: Served | None = None) -> list[Told]:
    """Answer these one after the other, on an engine of their own."""
    if served is not None:
        served.runner.reset()
    async with Engine.open(settings, served=served) as engine:
        return [await ask(engine, messages) for messages in asked]


@pytest.mark.parametrize("family", FAMILIES)
async def test_v3_before_and_after_a_restart_answers_and_digests_are_those_of_reading(
    family: str, tmp_path: Path
) -> None:
    settings = settings_of(family, tmp_path)
    served = load_served(settings, lambda text, share: None)
    never = replace(settings, cache_dir=None, cache=False)
    truth = await live(never, NEXT, SIBLING, served=replace(served, budget=0))
    before = await live(settings, OPENING, NEXT, SIBLING, served=served)
    after = await live(settings, NEXT, served=served)
    opened = await live(settings, SIBLING, served=served)
    for one, other, true in zip(before[1:], (*after, *opened), truth, strict=True):
        assert one[:2] == other[:2] == true[:2]
        assert other[2].reuse.source == "disk"
        assert other[2].reuse.reused >= 0.95 * one[2].reuse.reused > 0
    assert after[0][2].reuse.read < 60


@pytest.mark.parametrize("family", ["qwen4_exp", "llama"])
async def test_v3_random_lives_across_restarts_answer_as_an_engine_that_keeps_nothing(
    family: str, tmp_path: Path
) -> None:
    """The lives of `test_random_lives.py`, in several engines on one directory, with memory for little."""
    settings = settings_of(family, tmp_path, parallel=SLOTS, save_after_s=0.0)
    served = load_served(settings, lambda text, share: None)
    fresh = load_served(replace(settings, cache=False), lambda text, share: None)
    geometry = served.runner.geometry
    small = 8 * geometry.bytes_per_checkpoint + 2000 * geometry.bytes_per_token
    never = replace(settings, cache=False, cache_dir=None)
    faulty, life, restored = Faulty(served.runner), None, 0
    async with Engine.open(never, served=replace(fresh, budget=0)) as oracle:
        for _ in range(LIVES):
            served.runner.reset()
            opened = replace(served, runner=faulty, budget=small)
            async with Engine.open(settings, served=opened) as engine:
                life = life or Life(3, engine, oracle, faulty)
                life.engine = engine
                for _ in range(4):
                    await life.go_on()
                await life.check_digests()
                report = (await engine.status()).disk
                assert report is not None
                assert report.counters.set_aside == 0
                restored += report.counters.restored
    assert restored > 0


async def test_v2_what_was_restored_is_what_reading_again_gives(tmp_path: Path) -> None:
    settings = settings_of("qwen3_5", tmp_path)
    await live(settings, OPENING)
    [(_, _, end)] = await live(replace(settings, verify=True), NEXT)
    assert end.reuse.source == "disk"


async def test_case_9_what_does_not_change_the_bits_keeps_the_records(tmp_path: Path) -> None:
    await live(settings_of("qwen3_5", tmp_path), OPENING)
    others = settings_of(
        "qwen3_5", tmp_path, parallel=3, context=4096, cache_mib=32, cache_disk_gib=2, roots=2, checkpoints=3
    )
    [(_, _, end)] = await live(others, NEXT)
    assert end.reuse.source == "disk"


@pytest.mark.parametrize(
    "others", [{"chunk": 128}, {"dtype": "bfloat16"}, {"exact": "off"}, {"model": "random:lfm2"}]
)
async def test_d3_what_changes_the_bits_ignores_the_records_and_leaves_them(
    others: dict[str, object], tmp_path: Path
) -> None:
    settings = settings_of("qwen3_5", tmp_path)
    await live(settings, OPENING)
    files = set(os.listdir(tmp_path))  # noqa: PTH208
    [(_, _, end)] = await live(replace(settings, **others), NEXT)  # type: ignore[arg-type]
    assert end.reuse.reused == 0
    assert files < set(os.listdir(tmp_path))  # noqa: PTH208
    [(_, _, end)] = await live(settings, NEXT)
    assert end.reuse.source == "disk"


@pytest.mark.parametrize(("path", "identities"), [("AUTO,STRICT", 1), ("AUTO", 2)])
def test_d3_the_number_of_threads_counts_where_the_math_library_is_not_held_to_one_code_path(
    path: str, identities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", path)
    threads, found = torch.get_num_threads(), set()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.add(arithmetic(torch.device("cpu")))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == identities


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_d1_kill_9_at_random_moments_never_a_wrong_answer_nor_half_a_record_nor_an_older_one_lost(
    family: str, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("kills.py")
    command = [sys.executable, str(script), family, str(tmp_path / "cache"), str(KILLS), "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout)
    assert counts["kills"] == KILLS
    assert (counts["wrong"], counts["broken"], counts["lost"]) == (0, 0, 0)
    assert counts["records"] > 0
    assert counts["disk"] > 0
