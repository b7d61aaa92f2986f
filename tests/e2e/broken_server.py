"""`regrow serve` with a device that is broken: `python broken_server.py FAULT ARGUMENTS`.

fails: every read raises. hangs: the first read never returns.
"""

import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from regrow.cli import main
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, ReadResult

reads = 0
sound = ModelRunner.read


def fails(runner: ModelRunner, chunk: Chunk, between: object = None) -> NoReturn:
    raise RuntimeError("the bus fell off")


def hangs(runner: ModelRunner, chunk: Chunk, between: Callable[[], None] | None = None) -> ReadResult:
    global reads
    reads += 1
    if reads == 1:
        threading.Event().wait()
    return sound(runner, chunk, between)


if __name__ == "__main__":
    ModelRunner.read = {"fails": fails, "hangs": hangs}[sys.argv[1]]  # type: ignore[method-assign, assignment]
    sys.exit(main(sys.argv[2:]))
