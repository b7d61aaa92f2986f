"""`regrow serve` with a device that is broken: `python broken_server.py FAULT ARGUMENTS`.

fails: every read raises. hangs: the first read never returns.
"""

import sys
import threading
from typing import NoReturn

from regrow.cli import main
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, ReadResult

reads = 0
sound = ModelRunner.read


def fails(runner: ModelRunner, chunk: Chunk) -> NoReturn:
    raise RuntimeError("the bus fell off")


def hangs(runner: ModelRunner, chunk: Chunk) -> ReadResult:
    global reads
    reads += 1
    if reads == 1:
        threading.Event().wait()
    return sound(runner, chunk)


if __name__ == "__main__":
    ModelRunner.read = {"fails": fails, "hangs": hangs}[sys.argv[1]]  # type: ignore[method-assign, assignment]
    sys.exit(main(sys.argv[2:]))
