"""From settings to something that can be served: what is chosen, what is said, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType
from structlog.testing import capture_logs

from regrow.actors import served
from regrow.actors.served import ModelInfo, Served, load_served
from regrow.config import EngineSettings
from regrow.errors import BadConfig, ModelRefused
from regrow.gpu.fast import native
from regrow.gpu.memory import MIB
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Runner
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.random_models import build_random
from regrow.policy.chunks import HELD, NOT_MEASURED, Timed
from tests.models.gguf_files import tiny, write_gguf

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


def test_b1_what_the_copy_lanes_keep_is_taken_off_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "lane_bytes", MIB)
    assert load(cache_mib=3)[0].budget == 2 * MIB
    assert load(cache_mib=1)[0].budget == load(cache=False)[0].budget == 0


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


@pytest.fixture
def kept_model(tmp_path: Path) -> str:
    """A model that is loaded from a directory, whose chunks are worth keeping."""
    module = build_random("llama", dtype=torch.float32)
    module.save_pretrained(tmp_path / "model")
    byte_tokenizer(512, 512).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_chunks_of_a_model_are_measured_once_and_hold_ever_after(
    kept_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def timed(runner: Runner, most: int, vocab: int, most_s: float, now: object) -> list[Timed]:
        asked.append(most_s)
        return [Timed(0, 64, 0.01), Timed(0, 128, 0.02 * len(asked)), Timed(64, 64, 0.01)]

    monkeypatch.setattr(served, "time_chunks", timed)
    first, line = load(model=kept_model, model_dir=tmp_path, max_stall_ms=30.0)
    assert asked == [0.03]
    assert first.table.steps == ((0, 128),)
    assert (line["chunks"], line["max_stall_ms"], line["stall"]) == ("128", 30.0, HELD)
    again, _ = load(model=kept_model, model_dir=tmp_path, max_stall_ms=30.0, parallel=1, context=256)
    assert (again.table, again.namespace, again.stall) == (first.table, first.namespace, first.stall)
    assert len(asked) == 1
    other, _ = load(model=kept_model, model_dir=tmp_path, max_stall_ms=31.0)
    assert other.table.steps == ((0, 64),)
    assert other.namespace != first.namespace
    given, line = load(model=kept_model, model_dir=tmp_path, max_stall_ms=30.0, chunk=128)
    assert (given.namespace, line["stall"]) == (first.namespace, NOT_MEASURED)
    assert len(asked) == 2


def test_the_chunks_of_a_real_model_can_be_measured(kept_model: str, tmp_path: Path) -> None:
    loaded, line = load(model=kept_model, model_dir=tmp_path)
    assert line["chunks"] == loaded.table.told
    assert loaded.table.largest % 64 == 0
    assert ModelInfo.of(loaded).chunks == loaded.table.told


@pytest.mark.skipif(native.library() is None, reason=f"the native kernels are {native.state()}")
def test_what_weights_are_kept_in_is_said_and_changes_the_namespace() -> None:
    loaded = {quant: load(quant=quant) for quant in ("none", "auto", "int8", "int4")}
    spaces = {quant: served.namespace for quant, (served, _) in loaded.items()}
    assert spaces["none"] == spaces["auto"], "a random model has no codes"
    assert len(set(spaces.values())) == 3
    served, line = loaded["int8"]
    assert line["quant"] == "int8"
    assert line["linear"].endswith("of 8 bits") or "of 8 bits," in line["linear"]
    assert line["native_kernels"] == native.state()
    runs_on = ModelInfo.of(served).runs_on
    assert runs_on is not None
    assert (runs_on.quant, runs_on.linear) == ("int8", line["linear"])
    assert loaded["none"][1]["linear_mib"] > line["linear_mib"]


def test_other_kernels_are_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load()[0].namespace
    monkeypatch.setattr(native, "identity", lambda: "others")
    assert load()[0].namespace != before


def test_the_codes_of_a_file_are_used_and_are_a_namespace_of_their_own(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny("llama"), "llama", GGMLQuantizationType.Q8_0)
    settings = {"model": str(file), "model_dir": tmp_path, "chunk": 64}
    auto, line = load(**settings)
    plain, other = load(**settings, quant="none")
    assert (line["quant"], line["linear"]) == ("auto", "15 of 8 bits")
    assert (other["quant"], other["linear"]) == ("none", "15 as they are")
    assert auto.namespace != plain.namespace


def test_weights_that_cannot_be_kept_so_are_refused_by_the_option_s_name() -> None:
    with pytest.raises(BadConfig, match=r"--quant int8: .*not for cpu in float16; give none or auto"):
        load(quant="int8", dtype="float16")


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
        assert runs_on is not None
        assert (runs_on.device, runs_on.dtype, runs_on.threads) == ("cpu", "float32", 1)
    finally:
        torch.set_num_threads(before)
