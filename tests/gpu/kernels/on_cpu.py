"""The copy kernel compiled as C++: the very source that the GPU gets, run on the CPU block by block."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from regrow.gpu.kernels.spans import SOURCE, Launch

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel")


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "copy_spans.so"
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fsanitize=alignment"]
        command += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
        command += ["-include", f"{HERE / 'on_cpu.h'}", "-include", f"{SOURCE}", f"{HERE / 'on_cpu.cpp'}"]
        subprocess.run([*command, "-o", f"{library}"], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.launch.restype = ctypes.c_longlong
    loaded.launch.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, *[ctypes.c_longlong] * 3]
    return loaded


def run_on_cpu(launch: Launch, *, grid: int | None = None, block: int = 32) -> None:
    """Run the kernel over pointers to host memory; fails where it reads or writes a word off its alignment.
    Fewer threads than on a GPU, since they run one after another."""
    assert launch.table.is_contiguous()
    arguments = (grid or launch.grid, block, launch.table.data_ptr(), *launch.scalars)
    assert _library().launch(*arguments) == 0, "a word is not aligned"
