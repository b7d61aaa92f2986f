"""regrow: an inference engine and server that reads every prompt once.

The math library is pinned to one code path before torch loads, since some fp32 matmuls otherwise depend on
the number of threads (docs/exactness.md).
"""

import os

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

__version__ = "0.1.0"
