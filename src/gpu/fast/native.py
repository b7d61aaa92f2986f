"""The native kernels: a C++ library built at install, and torch's own kernels where it is missing.

`library` is None where it was not built, was built for a processor with other instructions, or is switched
off (REGROW_NATIVE=off); `state` says which.
"""

import ctypes
import hashlib
import importlib.machinery
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "regrow_linear": [_POINTER] * 3 + [_INT] * 2,
    "regrow_linear_many": [_POINTER] * 3 + [_INT],
    "regrow_takes_many": [_POINTER],
    "regrow_unpack": [_POINTER] * 2 + [_INT],
    "regrow_layers": [_POINTER] * 2 + [_INT, _POINTER],
    "regrow_delta": [_POINTER] * 2,
    "regrow_mlp": [_POINTER] * 4 + [_INT] * 2,
    "regrow_gate": [_POINTER] * 2 + [_INT] * 3,
    "regrow_norm": [_POINTER] * 3 + [ctypes.c_int64] + [_INT] * 2,
    "regrow_quantize": [_POINTER] + [_INT] * 4 + [_POINTER] * 3,
    "regrow_tile": [_POINTER] * 3 + [_INT] * 3 + [_POINTER],
    "regrow_copy": [_POINTER, _INT],
    "regrow_attention": [_POINTER] * 7 + [_FLOAT, _INT, _POINTER],
}


class Product(ctypes.Structure):
    """A weight [outputs, inputs] and its bias, as `native/linear.h` takes them."""

    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("bits", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
    )


class Lent(ctypes.Structure):
    """Cells of a layer that lie elsewhere, as `native/attention.h` takes them."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_strides", ctypes.c_int64 * 2),
        ("value_strides", ctypes.c_int64 * 2),
        ("start", ctypes.c_int32),
        ("stop", ctypes.c_int32),
    )


class Norm(ctypes.Structure):
    """A root mean square norm, as `native/norm.h` takes it."""

    _fields_ = (("weight", _POINTER), ("epsilon", _FLOAT), ("rounds", ctypes.c_int32))


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("REGROW_NATIVE", "on").lower() in ("off", "0", "false"):
        return None, "switched off"
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    path = next((p for s in suffixes if (p := _HERE / f"_native{s}").exists()), None)
    if path is None:
        return None, "not built: no C++ compiler was there at install"
    assert torch.version  # its OpenMP must be in the process before the library asks for it
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"cannot be loaded: {error}"
    if not loaded.regrow_runs_here():
        return None, "built for another processor; install again"
    for name, signature in _SIGNATURES.items():
        if not hasattr(loaded, name):
            return None, "built from other sources; install again"
        getattr(loaded, name).argtypes = signature
    return loaded, "built for this processor"


def library() -> ctypes.CDLL | None:
    """Return the loaded library, None where there is none."""
    return _load()[0]


def needed() -> ctypes.CDLL:
    """Return the loaded library; raises RuntimeError saying why there is none."""
    loaded, why = _load()
    if loaded is None:
        raise RuntimeError(f"the native kernels are {why}")
    return loaded


@cache
def identity() -> str:
    """Return a hash (hex) of the library that is used, "" where there is none: other kernels, other bits."""
    loaded = library()
    return "" if loaded is None else hashlib.sha256(Path(loaded._name).read_bytes()).hexdigest()


def state() -> str:
    """Return in words whether there is a library, and why not."""
    return _load()[1]
