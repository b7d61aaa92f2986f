"""The other commands: a chat over pipes, and what was found on this machine."""

import subprocess

import pytest

from tests.e2e.server import Server, regrow


def run(*arguments: str, typed: str = "") -> str:
    """Run a command to its end; returns what it printed."""
    done = subprocess.run(regrow(*arguments), input=typed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.demo
def test_a_chat_over_pipes_answers_and_says_what_it_reused(demo: Server) -> None:
    typed = "What is the capital of France?\nAnd of Italy?\n/reset\n/nonsense\n"
    lines = run(
        "chat", "--url", demo.url, "--system", "Answer in one short sentence.", typed=typed
    ).splitlines()
    assert lines[0].startswith(f"demo at {demo.url}")
    facts = [line for line in lines if line.startswith("reused ")]
    assert "Paris" in lines[1]
    assert [line.split(" · ")[1].split()[0] for line in facts] == ["read", "read"]
    assert facts[1].startswith("reused ") and not facts[1].startswith("reused 0 ")
    assert lines[-1].startswith("there is no /nonsense")


def test_a_chat_without_a_server_says_so() -> None:
    done = subprocess.run(
        regrow("chat", "--url", "http://127.0.0.1:9"), input="", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("regrow: no connection to http://127.0.0.1:9")


def test_doctor_says_what_was_found() -> None:
    printed = run("doctor")
    for subject in ("python", "torch", "device", "dtype", "threads", "memory", "model directory"):
        assert any(line.startswith(subject) for line in printed.splitlines()), subject


def test_models_says_what_can_be_loaded() -> None:
    printed = run("models")
    for name in ("demo", "random:FAMILY[:SIZE]", "DIRECTORY", "FILE.gguf", "qwen3_5"):
        assert name in printed
