"""`python -m tests.mutate [--only WORDS]`: does a test notice each fault?

Each fault of `faults.py` is put into a copy of the source, and the tests that it names are run against that.
Prints the table of docs/results.md; fails where a fault was not noticed, or where its text has changed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutate.faults import FAULTS, Fault

ROOT = Path(__file__).parent.parent.parent
LONGEST_S = 300
TESTS_FAILED, USAGE = 1, 4


@contextmanager
def copy_with(fault: Fault) -> Iterator[Path]:
    """Give a directory whose package `regrow` is ours but for the fault."""
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "regrow"
        shutil.copytree(ROOT / "src", package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise SystemExit(f"{fault.file}: {fault.old!r} does not stand there once: {fault.name}")
        path.write_text(text.replace(fault.old, fault.new))
        yield Path(directory)


def noticed_by(fault: Fault) -> str | None:
    """Return the test that notices the fault; None where they all pass."""
    with copy_with(fault) as directory:
        path = os.pathsep.join([str(directory), str(ROOT)])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *fault.tests.split()]
        try:
            ended = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LONGEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "a test that does not end"
        if ended.returncode == 0:
            return None
        failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if ended.returncode != TESTS_FAILED or not failed:
            return (
                "a test that does not end"
                if "Timeout" in ended.stdout + ended.stderr
                else _stop(ended.stdout)
            )
        return failed[0].split(" - ")[0].split("::")[-1].split("[")[0]


def _stop(output: str) -> str:
    raise SystemExit(f"pytest did not run the tests:\n{output}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name or file holds this")
    only = parser.parse_args().only
    chosen = [fault for fault in FAULTS if only in fault.name or only in fault.file]
    print("| fault | in | noticed by |\n|---|---|---|")
    missed = 0
    for fault in chosen:
        test = noticed_by(fault)
        missed += test is None
        print(f"| {fault.name} | `{fault.file}` | {'NOTHING' if test is None else f'`{test}`'} |", flush=True)
    print(f"\n{len(chosen)} faults, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
