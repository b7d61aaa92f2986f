"""From settings to something that can be served: what is chosen, what is said, and what is refused."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs

from regrow.actors import served
from regrow.actors.served import RunsOn, Served, load_served
from regrow.config import EngineSettings
from regrow.errors import BadConfig, ModelRefused
from regrow.gpu.memory import MIB

TINY = EngineSettings(model="random:qwen3_5:tiny", parallel=2, context=512, dtype="float32", device="cpu")


def load(**changes: object) -> tuple[Served, dict[str, Any]]:
    """Load with some settings changed; return what is served and the line that was logged."""
    with capture_logs() as logs:
        loaded = load_served(replace(TINY, **cast(Any, changes)), lambda text, share: None)
    (line,) = [entry for entry in logs if entry["event"] == "serving"]
    return loaded, dict(line)


def test_one_line_says_what_is_effective() -> None:
    loaded, line = load(cache_mib=3)
    geometry = loaded.runner.geometry
    assert (loaded.runner.slots, loaded.runner.context, loaded.budget) == (2, 512, 3 * MIB)
    assert loaded.exact == "cache"
    assert line["kind"] == "hybrid"
    assert (line["slots"], line["context"]) == (2, 512)
    assert line["bytes_per_token"] == geometry.bytes_per_token > 0
    assert line["bytes_per_checkpoint"] == geometry.bytes_per_checkpoint > 0
    assert line["checkpoints_fit"] == 3 * MIB // geometry.bytes_per_checkpoint
    assert line["cache"] == "3 MiB"
    assert line["message_cuts"] == "learned from the chat template"


def test_a_model_without_running_state_needs_no_checkpoints_and_the_cache_can_be_off() -> None:
    loaded, line = load(model="random:llama:tiny", cache=False)
    assert (line["kind"], line["checkpoints_fit"], line["cache"]) == ("attention only", "not needed", "off")
    assert loaded.budget == 0


def test_the_default_budget_is_a_part_of_the_memory() -> None:
    loaded, _ = load()
    assert loaded.budget % MIB or loaded.budget > 3 * MIB


def test_what_changes_bytes_changes_the_namespace() -> None:
    same = load()[0].namespace
    assert load(parallel=1, cache_mib=1, context=256)[0].namespace == same
    others = [
        load(chunk=64)[0].namespace,
        load(exact="off")[0].namespace,
        load(dtype="bfloat16")[0].namespace,
        load(model="random:llama:tiny")[0].namespace,
    ]
    assert len({same, *others}) == 5


def test_verifying_takes_a_slot_more() -> None:
    assert load(verify=True)[0].runner.slots == 3


def test_a_context_beyond_the_models_is_refused_by_name() -> None:
    with pytest.raises(BadConfig, match=r"--ctx 99999999.*at most"):
        load(context=99_999_999)


def test_slots_that_do_not_fit_are_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = load()[0].runner.geometry.bytes_per_token
    monkeypatch.setattr(served, "device_memory", lambda device: (0, 2 * 3 * 320 * per_token))
    assert load(context=None, parallel=3)[0].runner.context == 320
    with pytest.raises(BadConfig, match=r"--ctx 512 with --parallel 3 .* holds 320 tokens each"):
        load(parallel=3)
    with pytest.raises(BadConfig, match="holds 192 tokens each"):
        load(context=None, parallel=5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(BadConfig, match="--device cuda"):
        load(device="cuda")
    assert load(device="auto")[1]["device"] == "cpu"


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelRefused):
        load(model="random:no_such_family:tiny")


def test_the_number_of_threads_is_set() -> None:
    before = torch.get_num_threads()
    try:
        runs_on = load(threads=1)[0].runs_on
        assert torch.get_num_threads() == 1
        assert runs_on == RunsOn("cpu", "float32", 1)
    finally:
        torch.set_num_threads(before)
