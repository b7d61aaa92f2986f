"""Without the native kernels, as on a machine that has no C++ compiler, torch does the same."""

import os
import subprocess
import sys
from pathlib import Path

from regrow.gpu.fast.native import state

PARITY = Path(__file__).parents[1] / "test_parity.py"


def test_parity_holds_without_the_native_kernels() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-k", "llama or qwen3_5", "--no-cov", str(PARITY)]
    environment = {**os.environ, "REGROW_NATIVE": "off"}
    ran = subprocess.run(
        command, env=environment, cwd=PARITY.parents[2], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


def test_what_is_missing_is_said() -> None:
    say = "from regrow.gpu.fast.native import library, state; print(library(), state())"
    environment = {**os.environ, "REGROW_NATIVE": "off"}
    ran = subprocess.run([sys.executable, "-c", say], env=environment, capture_output=True, text=True)
    assert ran.stdout.strip() == "None switched off"
    assert state() != "switched off"
