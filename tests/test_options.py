"""Options: four sources in their order, and clear words for what is wrong."""

from pathlib import Path

import pytest

from regrow.errors import BadConfig
from regrow.options import (
    NAMES,
    ON_OFF,
    PATH,
    SWITCH,
    Kind,
    Option,
    Parser,
    add_options,
    one_of,
    read_file,
    real,
    resolve,
    text,
    whole,
)

SIZE = Option("batch-size", "size", whole(1, 10), 4, "how many")


def resolved(kind: Kind, value: str) -> object:
    return resolve([Option("x", "x", kind, None, "")], {"x": value}, {}, {})["x"]


def test_the_command_line_wins_over_the_environment_the_file_and_the_default() -> None:
    given, environment, file = {"batch-size": "1"}, {"REGROW_BATCH_SIZE": "2"}, {"batch-size": 3}
    assert resolve([SIZE], given, environment, file) == {"size": 1}
    assert resolve([SIZE], {"batch-size": None}, environment, file) == {"size": 2}
    assert resolve([SIZE], {}, {}, file) == {"size": 3}
    assert resolve([SIZE], {}, {}, {}) == {"size": 4}


@pytest.mark.parametrize(
    ("given", "environment", "file", "place"),
    [
        ({"batch-size": "11"}, {}, {}, "--batch-size: '11'"),
        ({}, {"REGROW_BATCH_SIZE": "many"}, {}, "REGROW_BATCH_SIZE: 'many'"),
        ({}, {}, {"batch-size": 2.5}, "batch-size in here.toml: '2.5'"),
    ],
)
def test_a_wrong_value_is_told_with_its_place_and_what_is_allowed(
    given, environment, file, place: str
) -> None:
    with pytest.raises(BadConfig) as caught:
        resolve([SIZE], given, environment, file, "here.toml")
    assert str(caught.value) == f"{place} is not allowed; give a whole number from 1 to 10"


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (whole(0), "7", 7),
        (whole(0, auto=True), "auto", None),
        (whole(64, multiple=64), "128", 128),
        (real(0, 1), "0.25", 0.25),
        (one_of("a", "b"), "b", "b"),
        (one_of("a", auto=True), "auto", None),
        (ON_OFF, "off", False),
        (SWITCH, "TRUE", True),
        (text("T"), "", ""),
        (PATH, "a/b", Path("a/b")),
        (NAMES, "a,b", ("a", "b")),
    ],
)
def test_a_value_is_read_from_text(kind: Kind, value: str, expected: object) -> None:
    assert resolved(kind, value) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (whole(1), "0"),
        (whole(1), "auto"),
        (whole(1), "1.0"),
        (whole(1, 5), "6"),
        (whole(64, multiple=64), "100"),
        (real(0, 1), "1.5"),
        (real(0), "nan"),
        (real(0), "inf"),
        (real(0), "x"),
        (one_of("a", "b"), "c"),
        (ON_OFF, "perhaps"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(kind: Kind, value: str) -> None:
    with pytest.raises(BadConfig, match=r"--x: .* is not allowed; give "):
        resolved(kind, value)


def test_a_file_gives_values_by_option_name_with_dashes_or_underscores(tmp_path: Path) -> None:
    path = tmp_path / "regrow.toml"
    path.write_text('batch_size = 3\nlog-json = true\nnames = ["a", "b"]\n')
    values = read_file(path, {"batch-size", "log-json", "names"})
    options = [SIZE, Option("log-json", "json", SWITCH, False, ""), Option("names", "names", NAMES, (), "")]
    assert resolve(options, {}, {}, values) == {"size": 3, "json": True, "names": ("a", "b")}


@pytest.mark.parametrize(
    ("content", "words"),
    [("sizes = 3", "there is no option 'sizes'"), ("size = ", "is not TOML"), (None, "No such file")],
)
def test_a_file_that_cannot_be_used_is_told(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "regrow.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadConfig, match=words) as caught:
        read_file(path, {"size"})
    assert str(path) in str(caught.value)


def test_the_help_shows_each_option_under_its_subject_with_its_default() -> None:
    parser = Parser("x")
    add_options(
        parser,
        {
            "sizes": [SIZE],
            "words": [
                Option("share", "share", real(0, 1), 0.5, "at 100%"),
                Option("auto", "auto", whole(0, auto=True), None, "decided"),
                Option("shown", "shown", text("T"), None, "with words", "the model's"),
                Option("quiet", "quiet", SWITCH, False, "say nothing"),
            ],
        },
    )
    lines = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    start = lines.index("sizes:")
    assert lines[start : start + 8] == [
        "sizes:",
        "--batch-size N how many (default: 4)",
        "",
        "words:",
        "--share X at 100% (default: 0.5)",
        "--auto N decided (default: auto)",
        "--shown T with words (default: the model's)",
        "--quiet say nothing (default: off)",
    ]
