"""Who a model is: hashes that differ when the weights, the geometry or the positions' encoding differ; and
by what arithmetic it is run.

Up to `WHOLE` bytes everything is hashed. Of more, one block in 16 spread over every tensor (or file):
training moves all of a tensor, so two models never agree there, and 70 GB take seconds instead of minutes.
"""

import hashlib
import itertools
import json
import os
from pathlib import Path

import torch
from transformers import PreTrainedModel

WHOLE = 1 << 30
_BLOCK = 1 << 14
_STRIDE = 16
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "architectures")


def file_digest(path: Path) -> str:
    """Return a hash (hex) of the file's bytes: its sha256 up to `WHOLE` bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for start in range(0, size, _BLOCK * _STRIDE):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def math_environment() -> dict[str, str]:
    """Return what the environment tells the math library and OpenMP; src/__init__.py has defaults."""
    names = ("MKL_CBWR", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "REGROW_NATIVE")
    return {name: os.environ[name] for name in names if name in os.environ}


def arithmetic(device: torch.device) -> tuple[str | int, ...]:
    """Return what decides, beside the model and the chunks, the bits that a computation gives (D3): the build
    of torch, and the device or the instruction set; the number of threads only where the math library is not
    held to one code path."""
    stock = os.environ.get("REGROW_STOCK", "")  # parts that compute otherwise where they are left alone
    if device.type == "cuda":
        return torch.__version__, "cuda", torch.version.cuda or "", torch.cuda.get_device_name(device), stock
    pinned = os.environ.get("MKL_CBWR", "").endswith(",STRICT")
    threads = 0 if pinned else torch.get_num_threads()
    return torch.__version__, device.type, torch.backends.cpu.get_cpu_capability(), threads, stock


def module_fingerprint(module: PreTrainedModel) -> str:
    """Return a hash (hex) of a model: its configuration, and each parameter and buffer."""
    digest = hashlib.blake2b(digest_size=16)
    config = {key: value for key, value in module.config.to_dict().items() if key not in _VOLATILE}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    whole = sum(tensor.nbytes for tensor in tensors.values()) <= WHOLE
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if not whole and len(data) > _BLOCK * _STRIDE:
            data = data[: len(data) // _BLOCK * _BLOCK].view(-1, _BLOCK)[::_STRIDE]
        digest.update(data.cpu().contiguous().numpy().data)
    return digest.hexdigest()
