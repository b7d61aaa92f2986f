"""Tensors: slot arenas, running state, the model runner, sampling, digests. Knows no actor.

Importing it pins the math library to one code path whatever the number of threads (unless the environment
says otherwise): without that some float32 products change their last bits with the thread count.
"""

import os

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # read by the library at its first call
