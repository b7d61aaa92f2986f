"""The benches run, and the counts that they promise hold; times are theirs to report, not to gate."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
ROOTS = """
import asyncio, json, sys
from pathlib import Path
import harness, roots
opts = harness.Options(sys.argv[1], "cache", 0, True, Path("."), None)
print(json.dumps(asyncio.run(roots.measure(opts, root=500))))
"""


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=BENCH, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_bit_differs_by_how_a_prompt_arrived(tmp_path: Path) -> None:
    run("exact.py", "--quick", "--model", "random:llama", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "exact.json").read_text())["rows"]
    assert {"busy donor", "parked", "root alone"} <= {row["way"] for row in rows}
    assert sum(row["compared"] for row in rows) > 500
    assert all(row["differing"] == 0 for row in rows)


@pytest.mark.parametrize("model", ["random:qwen3_5", "random:llama"])
def test_a_new_chat_under_a_known_system_prompt_reads_its_new_tokens_whoever_holds_it(model: str) -> None:
    rows = json.loads(run("-c", ROOTS, model).splitlines()[-1])
    held = [row for row in rows if row["holder"] != "cache off"]
    assert {row["holder"] for row in held} == {"idle", "decoding", "parked", "gone"}
    assert all(row["read"] <= row["new"] + 8 for row in held)
    assert all(row["reused"] == 0 for row in rows if row["holder"] == "cache off")
