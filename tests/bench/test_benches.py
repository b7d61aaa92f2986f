"""The benches run on a tiny case, say what they promise to say, and their counts hold."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str], ModuleType]
Rows = list[dict[str, Any]]
BLOCK = 64


def run(module: ModuleType, name: str, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Rows:
    """Run a bench as its command line would, quickly; return the rows of its JSON."""
    monkeypatch.setattr(module.harness, "configure_logs", lambda level, as_json: None)
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--out", str(out), *options])
    module.main()
    written = json.loads((out / f"{name}.json").read_text())
    assert {"bench", "model", "exact", "seed", "rows"} <= written.keys()
    return written["rows"]


@pytest.mark.parametrize("model", ["random:llama", "random:qwen3_5"])
def test_roots_a_new_chat_reads_what_is_new_and_at_most_8_tokens_more_whoever_holds_its_system_prompt(
    model: str, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = load("roots")
    monkeypatch.setattr(roots, "ROOT", 600)
    rows = run(roots, "roots", tmp_path, monkeypatch, "--model", model)
    assert [(row["holder"], row["beside"]) for row in rows] == [(h, n) for h in roots.SLOTS for n in (0, 2)]
    for row in rows:
        assert row.keys() >= {"source", "prompt", "TTFT s", "/ floor", "/ cold"}
        if row["holder"] == "cache off":
            assert (row["source"], row["reused"], row["read"]) == ("none", 0, row["prompt"] - 1)
        else:
            assert row["read"] <= row["new"] + 8, row
            assert row["reused"] + row["read"] == row["prompt"] - 1


def test_modes_every_mode_is_measured_against_the_same_one(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = load("modes")
    monkeypatch.setattr(modes, "PAST", modes.CHUNK)
    usual, *others = run(modes, "modes", tmp_path, monkeypatch, "--model", "random:llama", "--quant", "int8")
    asked = [(row["exact"], row["quant"]) for row in (usual, *others)]
    assert asked[0] == ("cache", "int8")
    assert len(set(asked)) == len(asked) == 1 + 2 + 3
    assert all(row["step, 1 row"] > 0 and row["256 at 0"] > 0 for row in (usual, *others))


def test_live_a_loop_of_calls_reads_the_same_and_sends_less_where_the_server_keeps_the_history(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = load("live")
    monkeypatch.setattr(live, "QUICK_CALLS", 2)
    monkeypatch.setattr(live, "OPENING", 60)
    monkeypatch.setattr(live, "RESULT", 10)
    chat, *others = run(live, "live", tmp_path, monkeypatch)
    assert len(others) == 2
    for row in (chat, *others):
        assert row["worst, read - new"] <= 12, row
    for row in others:
        assert row["KB sent"] < chat["KB sent"] * 0.8
        assert row["read"] == pytest.approx(chat["read"], abs=50)


def test_exact_nothing_differs_however_a_prompt_arrives(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = load("exact")
    monkeypatch.setattr(exact, "TURN", 30)
    monkeypatch.setattr(exact, "BESIDE", (2,))
    with pytest.raises(SystemExit) as ended:
        run(exact, "exact", tmp_path, monkeypatch, "--model", "random:qwen3_5")
    assert ended.value.code == 0
    rows = json.loads((tmp_path / "exact.json").read_text())["rows"]
    assert sum(row["differing"] for row in rows) == 0
    assert all(row["compared"] for row in rows)
    sources = {row["way"]: row["sources"] for row in rows}
    assert sources["busy donor"] == "slot"
    assert {
        "cold",
        "again",
        "every cut",
        "idle slot",
        "parked",
        "after waiting",
        "root alone",
    } < sources.keys()
    assert "0 differ" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["random:llama", "random:qwen3_5"])
def test_disk_every_conversation_goes_on_from_disk_and_reads_what_is_new(
    model: str, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = load("disk")
    monkeypatch.setattr(disk, "QUICK", (300,))
    [row] = run(disk, "disk", tmp_path, monkeypatch, "--model", model)
    assert row["source"] == "disk"
    assert row["tokens"] - 80 < row["reused"] < row["tokens"]
    assert row["MiB"] > 0
    for ratio in ("save / plain", "restore / plain", "/ reading", "even at MiB/s"):
        assert row[ratio] > 0


def test_exact_counts_each_part_and_each_token_that_differs(load: Load) -> None:
    exact = load("exact")
    answer = exact.Answered((5, 6, 7), 0.1, 0, 9, None)
    parts = (("cells.L0.k", "aa"), ("state.L1.recurrent0", "bb"))
    reference = exact.Arrival(answer, exact.Digest(12, parts))
    changed = exact.replace(answer, tokens=(5, 6, 8))
    assert reference.compared == 5
    assert reference.differing(reference) == 0
    assert exact.Arrival(changed, exact.Digest(12, (parts[0], ("state.L1.recurrent0", "cc")))).differing(
        reference
    ) == len(("state", "token"))
    shorter = exact.replace(answer, tokens=(5,))
    assert exact.Arrival(shorter, exact.Digest(12, parts[:1])).differing(reference) == 3


def trace(name: str, *prompts: list[list[int]]) -> dict[str, Any]:
    """A conversation with a system prompt of 20 blocks; each prompt as runs of block ids."""
    requests = [
        {
            "t": 10.0 * i,
            "agent": "main",
            "in": sum(count for _, count in blocks) * BLOCK + 5,
            "out": 1,
            "api_s": 2.0,
            "blocks": blocks,
        }
        for i, blocks in enumerate(prompts)
    ]
    tokens = {"tool_tokens": 10 * BLOCK, "system_tokens": 10 * BLOCK}
    return {"id": name, "block_size": BLOCK, **tokens, "requests": requests}


CHAT = ([[1, 100]], [[1, 130]], [[1, 129], [500, 20]], [[1, 20], [600, 60]])


def test_replay_knows_of_each_prompt_the_deepest_cut_that_was_read_before(load: Load) -> None:
    replay = load("replay")
    turns = replay.turns(trace("a", *CHAT), 256)
    assert [turn.plan.length for turn in turns] == [100 * 64 + 5, 130 * 64 + 5, 149 * 64 + 5, 80 * 64 + 5]
    assert [turn.known for turn in turns] == [0, 100 * BLOCK, 128 * BLOCK, 20 * BLOCK]
    assert [end.position for end in turns[1].plan.ends] == [20 * BLOCK, 100 * BLOCK, 130 * BLOCK]


def test_replay_keeps_each_conversation_in_order_and_no_more_open_than_asked_for(load: Load) -> None:
    replay = load("replay")
    traces = [replay.turns(trace(name, *CHAT), 256) for name in "abcde"]
    events = replay.schedule(traces, 2, 1)
    begun = [event for event in events if isinstance(event, replay.Begin)]
    assert len(begun) == 20
    assert len(events) == 40
    for name in "abcde":
        mine = [e.turn for e in begun if e.turn.prefixes[0].startswith(name.encode())]
        assert [turn.at for turn in mine] == [0.0, 10.0, 20.0, 30.0]
    running = 0
    for event in events:
        running += 1 if isinstance(event, replay.Begin) else -1
        assert 0 <= running <= 1


@pytest.mark.parametrize("model", ["Qwen3.8-Flash-Next", "Qwen3-8B"])
def test_trace_with_memory_for_all_nothing_is_read_twice_but_what_no_checkpoint_marks(
    model: str, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "traces.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number in range(12):
            file.write(json.dumps(trace(f"t{number}", *CHAT)) + "\n")
    bench = load("trace")
    rows = run(
        bench, "trace", tmp_path, monkeypatch, "--model", model, "--traces", str(path), "--sample", "6"
    )
    assert [(row["at once"], row["memory"]) for row in rows] == [
        (n, memory) for n in bench.QUICK_AT_ONCE for memory in bench.QUICK_MEMORY
    ]
    lost = 0 if "8B" in model else (128 - 100) * BLOCK  # a branch is taken again at the turn before it
    ideal = (100 + 128 + 20) * BLOCK
    for row in rows:
        assert 0 <= row["regrow / ideal"] <= 1
        assert {"whole", "newest", "slots", "closes", "ideal hit rate"} <= row.keys()
        if row["memory"] == "ample":
            assert row["regrow / ideal"] == pytest.approx((ideal - lost) / ideal)


def test_trace_is_skipped_where_there_are_no_traces(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load("trace")
    monkeypatch.setattr(bench.harness, "configure_logs", lambda level, as_json: None)
    monkeypatch.setattr(sys, "argv", ["trace", "--traces", str(tmp_path / "none.gz"), "--out", str(tmp_path)])
    bench.main()
    assert "skipped" in capsys.readouterr().out
    assert not (tmp_path / "trace.json").exists()


def test_load_nothing_is_lost_or_comes_twice_under_clients_of_every_kind(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run(load("load"), "load", tmp_path, monkeypatch, "--requests", "60", "--clients", "8")
    figures = {row["figure"]: row["value"] for row in rows}
    assert figures["requests"] >= 60
    assert (figures["errors"], figures["differing"], figures["threads more"]) == (0, 0, 0)
    assert min(figures[kind] for kind in ("answered", "cancelled", "left", "oversized")) > 0


def test_scale_says_what_placing_deciding_and_keeping_a_conversation_cost(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = load("scale")
    monkeypatch.setattr(scale, "KEYS", 4_000)
    monkeypatch.setattr(scale, "QUICK", ((6, 1), (6, 3)))
    monkeypatch.setattr(scale, "REPEATS", 2)
    monkeypatch.setattr(scale, "TRACED", 2)
    rows = run(scale, "scale", tmp_path, monkeypatch)
    assert [row["slots"] for row in rows] == [1, 3]
    for row in rows:
        assert row["kept"] >= 6
        assert all(row[kind] > 0 for kind in ("place turn", "place chat", "place new", "submit", "room"))
        assert row["bytes / ledger"] > 1


def test_serve_overhead_counts_every_token_and_tells_what_one_costs(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead = load("serve_overhead")
    monkeypatch.setattr(overhead, "QUICK_TOKENS", 8)
    monkeypatch.setattr(overhead.torch, "set_num_threads", lambda threads: None)
    rows = run(overhead, "serve_overhead", tmp_path, monkeypatch, "--model", "random:llama")
    assert [row["streams"] for row in rows] == list(overhead.STREAMS)
    assert all(row["loop us/token"] > 0 for row in rows)


def test_warm_a_resumed_request_reads_what_is_new(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = load("warm")
    monkeypatch.setattr(warm, "ROOT", 400)
    rows = run(warm, "warm", tmp_path, monkeypatch, "--model", "random:qwen3_5")
    assert [(row["resumed"], row["messages"]) for row in rows] == [
        (kind, met) for kind in ("turn", "chat") for met in ("not met", "met")
    ]
    for row in rows:
        assert row["reused"] >= 400
        assert row["read"] < 120
        assert row["TTFT / device"] > 1


def test_perplexity_is_told_for_every_way_to_keep_weights_by_reading_and_by_decoding(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run(load("perplexity"), "perplexity", tmp_path, monkeypatch, "--model", "random:llama")
    assert [row["quant"] for row in rows] == ["none", "int8", "int4", "auto"]
    plain, int8, int4, auto = rows
    assert (plain["ratio"], plain["ratio "]) == (auto["ratio"], auto["ratio "]) == (1.0, 1.0)
    assert abs(plain["reading"] / plain["decoding"] - 1) < 0.02
    assert int4["MiB"] < int8["MiB"] < plain["MiB"]


def test_parts_every_part_is_measured_against_the_stock_one_at_every_depth(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = load("parts")
    monkeypatch.setattr(parts, "DEPTHS", (40, 80))
    monkeypatch.setattr(parts, "HIDDEN", 64)
    rows = run(parts, "parts", tmp_path, monkeypatch, "--model", "random:qwen4_exp")
    assert [row["cells"] for row in rows] == [40, 80]
    experts = json.loads((tmp_path / "experts.json").read_text())["rows"]
    assert [row["rows"] for row in experts] == [1, 4]
    assert all(ratio > 0 for row in (*rows, *experts) for ratio in row.values())
