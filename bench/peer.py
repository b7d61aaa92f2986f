"""A `llama-server` of one's own to measure beside: on this machine alone, as many threads as torch has."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

START_S, ANSWER_S = 120, 600


@dataclass(frozen=True, slots=True)
class Timings:
    """What the server says of one answer: tokens read, and how many a second; drawn ones a second."""

    read: int
    read_per_s: float
    drawn_per_s: float


class Peer:
    def __init__(self, url: str) -> None:
        self._url = url

    def complete(self, prompt: Sequence[int], tokens: int, *, keep: bool = False) -> Timings:
        """Have `prompt` read, from its start or (`keep`) from what is kept of it, and `tokens` answered,
        greedily."""
        body = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "cache_prompt": keep,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            timings = json.load(answer)["timings"]
        return Timings(timings["prompt_n"], timings["prompt_per_second"], timings["predicted_per_second"])


@contextmanager
def llama_server(binary: Path, weights: Path, context: int, slots: int = 1) -> Iterator[Peer]:
    """Run `binary` with `context` tokens in all of `slots` for the GGUF file `weights`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(binary), "-m", str(weights), "-c", str(context), "-np", str(slots)]
    command += ["-t", str(torch.get_num_threads()), "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(server, f"http://127.0.0.1:{port}")
        yield Peer(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait()


def _wait(server: "subprocess.Popen[bytes]", url: str) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=ANSWER_S):
                return
        except urllib.error.URLError:  # not there yet, or loading
            time.sleep(0.2)
    raise SystemExit(f"llama-server did not start (exit status {server.poll()}): {server.args}")
