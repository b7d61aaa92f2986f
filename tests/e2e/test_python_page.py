"""The example of the Python page runs as it stands there."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_example_answers_and_reuses_what_it_read(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    reused = [int(n) for n in re.findall(r"reused (\d+), read \d+", printed)]
    assert len(reused) == 2
    assert reused[1] > reused[0] == 0
    assert re.search(r"session: \d+ tokens, digest [0-9a-f]{32}", printed)
