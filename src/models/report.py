"""What `regrow doctor` and `regrow models` say, as rows of (subject, fact, note)."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from regrow.models import demo
from regrow.models.gguf import converted_path
from regrow.models.identity import math_environment
from regrow.models.once import model_directory
from regrow.models.precision import choose_dtype
from regrow.models.random_configs import FAMILIES

MIB = 1 << 20
PACKAGES = ("transformers", "tokenizers", "safetensors", "gguf", "numpy", "aiohttp", "msgspec")
ON_CUDA = (("flash-linear-attention", "fla"), ("cupy", "cupy"))


class Row(NamedTuple):
    """One line of a report."""

    subject: str
    fact: str
    note: str


def doctor_rows(model_dir: Path | None = None) -> list[Row]:
    """Return what was found on this machine, and what will be used of it and why."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, why = choose_dtype("auto", device)
    return [
        Row("python", platform.python_version(), platform.platform(terse=True)),
        Row("torch", torch.__version__, f"math on the CPU: {torch.backends.cpu.get_cpu_capability()}"),
        _device_row(device),
        Row("dtype", str(dtype).removeprefix("torch."), f"what auto means here: {why}"),
        Row(
            "threads",
            str(torch.get_num_threads()),
            f"of {len(os.sched_getaffinity(0))} cores that may be used",
        ),
        Row(
            "math library",
            ", ".join(f"{name}={value}" for name, value in math_environment().items()) or "its own defaults",
            "what the environment tells it and OpenMP",
        ),
        _memory_row(),
        _directory_row(model_directory(model_dir)),
        _pip_row(),
        Row("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES), ""),
        *(Row(name, _version(name), _fast_note(module, device)) for name, module in ON_CUDA),
    ]


def model_rows(model_dir: Path | None = None) -> list[Row]:
    """Return what can be served: the presets, what is kept already, and the forms a name can take."""
    folder = model_directory(model_dir)
    return [
        Row(
            "demo",
            "SmolLM2-135M-Instruct (llama, 8,192 tokens), a small model that talks",
            _demo_state(folder),
        ),
        Row(
            "random:FAMILY[:SIZE]",
            f"random weights for tests and benches; FAMILY {', '.join(sorted(FAMILIES))}; SIZE tiny or 135m",
            "built in memory, always the same",
        ),
        Row(
            "DIRECTORY", "a Hugging Face directory: config.json, safetensors, tokenizer.json", "used as it is"
        ),
        Row(
            "FILE.gguf",
            "a GGUF file whose architecture transformers knows",
            "converted once, then loaded in seconds",
        ),
        Row("ORG/NAME", "a model of the Hugging Face hub", "fetched once where a network exists"),
        *_kept_rows(folder),
    ]


def _device_row(device: torch.device) -> Row:
    if device.type == "cpu":
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return Row("device", "cpu", f"torch sees no CUDA device ({built})")
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    fact = f"{properties.name}, {free // MIB} of {total // MIB} MiB free"
    return Row("device", fact, f"capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}")


def _memory_row() -> Row:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    fact = f"{kib['MemAvailable'] // 1024} of {kib['MemTotal'] // 1024} MiB free"
    return Row("memory", fact, "the cache takes a quarter at most, and leaves 2 GiB free")


def _directory_row(folder: Path) -> Row:
    kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    note = "fetched and converted models" if os.access(nearest, os.W_OK) else "cannot be written to"
    return Row("model directory", f"{folder}, {kept // MIB} MiB", note)


def _pip_row() -> Row:
    there = find_spec("pip") is not None
    return Row(
        "pip", _version("pip"), "fetches the demo model" if there else "needed to fetch the demo model"
    )


def _fast_note(module: str, device: torch.device) -> str:
    if device.type == "cpu":
        return "not used on a CPU"
    return "used" if find_spec(module) is not None else "would make this GPU faster"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _demo_state(folder: Path) -> str:
    if converted_path(demo.demo_path(folder), folder, demo.SHA256).exists():
        return "ready"
    if demo.demo_path(folder).exists():
        return "fetched, not converted yet"
    return f"not fetched: {demo.WHEEL_BYTES // MIB} MiB from the package index"


def _kept_rows(folder: Path) -> Iterator[Row]:
    for path in sorted((folder / "converted").glob("[!.]*")):
        size = sum(file.stat().st_size for file in path.iterdir())
        yield Row(str(path), f"converted, {size // MIB} MiB", "can be served by its path")
