"""regrow: an inference engine and server that reads every prompt once.

    from regrow import Engine, EngineSettings, GenerateRequest

The math library is pinned to one code path before torch loads, since some fp32 matmuls otherwise depend on
the number of threads (docs/exactness.md); OpenMP threads sleep soon, so that other processes are not slowed;
oneDNN keeps what it made for the last shapes alone, not for a thousand (docs/log.md); transformers does not
advise in our logs to install kernels.
"""

import os
from importlib import import_module

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("GOMP_SPINCOUNT", "50000")  # some milliseconds
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

__version__ = "0.1.0"

_EXPORTS = {
    "CacheStats": "actors.messages",
    "DigestRequest": "actors.messages",
    "Engine": "actors.engine",
    "EngineSettings": "config",
    "GenerateRequest": "policy.request",
    "SamplingParams": "policy.request",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> object:
    """Load what is exported on first use, so that `import regrow` alone does not load torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'regrow' has no attribute {name!r}")
    return getattr(import_module(f"regrow.{_EXPORTS[name]}"), name)
