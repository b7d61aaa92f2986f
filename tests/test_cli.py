"""The command line: what it starts, what it refuses, and how it reads."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from regrow import cli
from regrow.config import EngineSettings, ServerSettings
from regrow.errors import BadConfig

EVERY_OPTION = """
random:llama --ctx 512 --dtype bfloat16 --chat-template t.jinja --model-dir /m --served-model-name a,b
--device cpu --threads 2 --parallel 3 --chunk 128 --max-stall-ms 50 --decode-share 0.25 --exact off
--cache off --checkpoints 2 --checkpoint-every 64 --roots 1 --root-min 9 --cache-mib 77 --quant int8
--root-cells never --verify reread --scrub-s 9 --debug-digest
--repack-cold --conversation-ttl 60 --data-dir /d
--api-key one,two --cors http://a.org,http://b.org
--host ::1 --port 0 --queue 5 --keepalive-s 0.5 --drain-s 3
"""
HEAVY = ("torch", "transformers", "numpy", "aiohttp", "rich")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch):
    """Parse a command line of `serve`; returns the settings that would be served with."""
    for name in [name for name in cli.os.environ if name.startswith("REGROW_")]:
        monkeypatch.delenv(name)

    def parse(*argv: str) -> tuple[EngineSettings, ServerSettings]:
        arguments = cli.build_parser().parse_args(["serve", *argv])
        return cli.serve_settings(cli.values_of(cli.SERVE, arguments))

    return parse


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command line that is refused with 2; returns the one line it is told with."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("regrow: ")
    assert err.count("\n") == 1
    return err


def test_without_options_the_defaults_are_served(settings) -> None:
    assert settings() == (EngineSettings(), ServerSettings())


def test_every_option_reaches_its_setting(settings) -> None:
    engine, server = settings(*EVERY_OPTION.split())
    assert engine == EngineSettings(
        model="random:llama",
        context=512,
        dtype="bfloat16",
        quant="int8",
        chat_template="t.jinja",
        model_dir=Path("/m"),
        device="cpu",
        threads=2,
        parallel=3,
        chunk=128,
        max_stall_ms=50.0,
        decode_share=0.25,
        exact="off",
        cache=False,
        checkpoints=2,
        checkpoint_every=64,
        roots=1,
        root_min=9,
        root_cells="never",
        verify=True,
        scrub_s=9.0,
        debug_digest=True,
        repack_cold=True,
        conversation_ttl=60.0,
        data_dir=Path("/d"),
        cache_mib=77,
        queue=5,
        drain_s=3.0,
    )
    assert server == ServerSettings(
        host="::1",
        port=0,
        served_names=("a", "b"),
        keepalive_s=0.5,
        api_keys=("one", "two"),
        cors=("http://a.org", "http://b.org"),
    )


def test_an_option_sets_what_exists_and_shows_the_default_of_the_settings() -> None:
    fields = {
        f.name: f.default for kind in (EngineSettings, ServerSettings) for f in dataclasses.fields(kind)
    }
    for option in cli.all_options(cli.SERVE):
        if option.field not in ("allow_open", "api_key_file", "log_level", "log_json"):
            assert option.default == fields[option.field]


def test_every_setting_for_users_has_an_option() -> None:
    fields = {f.name for kind in (EngineSettings, ServerSettings) for f in dataclasses.fields(kind)}
    assert fields - {option.field for option in cli.all_options(cli.SERVE)} == {
        "ask_deadline_s",
        "save_after_s",
        "body_limit",
        "body_s",
        "debug",
        "event_buffer",
        "idle_s",
        "message_limit",
        "socket_idle_s",
    }


def test_the_environment_and_a_file_give_options_too(
    settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "regrow.toml"
    path.write_text('model = "random:lfm2"\nparallel = 2\nport = 1\nurl = "http://elsewhere"\n')
    monkeypatch.setenv("REGROW_CONFIG", str(path))
    monkeypatch.setenv("REGROW_PORT", "2")
    engine, server = settings("--parallel", "3")
    assert (engine.model, engine.parallel, server.port) == ("random:lfm2", 3, 2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--parallel", "0"], "--parallel: '0' is not allowed; give a whole number from 1 to 256"),
        (["serve", "--exact", "very"], "one of full, cache, off, auto"),
        (["serve", "--chunk", "100"], "multiple of 64"),
        (["serve", "--keepalive-s", "soon"], "a number from 0.1 to 3600"),
        (["serve", "--port"], "--port"),
        (["serve", "--paralel", "2"], "--paralel"),
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["serve", "a", "b"], "b"),
        (["dance"], "dance"),
        (["serve", "--served-model-name", " ,"], "give names, separated by commas"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line_and_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert words in refusal(capsys, *argv)


@pytest.mark.parametrize(
    "option",
    [o for o in cli.all_options(cli.SERVE) if o.kind.metavar in ("N", "X") or "|" in o.kind.metavar],
    ids=lambda option: option.name,
)
def test_a_wrong_value_of_any_option_names_where_it_stands_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: cli.Option
) -> None:
    told = f": '-5' is not allowed; give {option.kind.allowed}\n"
    assert refusal(capsys, "serve", option.flag, "-5") == f"regrow: {option.flag}{told}"
    path = tmp_path / "regrow.toml"
    path.write_text(f"{option.name} = -5\n")
    assert refusal(capsys, "serve", "--config", str(path)) == f"regrow: {option.name} in {path}{told}"
    monkeypatch.setenv(option.variable, "-5")
    assert refusal(capsys, "serve") == f"regrow: {option.variable}{told}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_that_others_can_reach_needs_allow_open(
    capsys: pytest.CaptureFixture[str], settings, host: str
) -> None:
    assert "--allow-open" in refusal(capsys, "serve", "--host", host)
    assert settings("--host", host, "--allow-open")[1].host == host


def test_with_a_key_any_address_is_served(settings) -> None:
    assert settings("--host", "0.0.0.0", "--api-key", "secret")[1].host == "0.0.0.0"


def test_keys_come_from_a_file_too(settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\n second \nthird\n")
    assert settings("--api-key", "first", "--api-key-file", str(path))[1].api_keys == (
        "first",
        "second",
        "third",
    )
    path.write_text("# none yet\n")
    assert "--api-key-file" in refusal(capsys, "serve", "--api-key-file", str(path))
    assert "--api-key-file" in refusal(capsys, "serve", "--api-key-file", str(tmp_path / "nowhere"))


def test_keys_stand_in_no_printed_settings(settings) -> None:
    assert "secret" not in repr(settings("--api-key", "secret"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_loopback_address_is_served_without_more(settings, host: str) -> None:
    assert settings("--host", host)[1].host == host


@pytest.mark.parametrize("command", [[], ["serve"], ["chat"], ["models"], ["doctor"], ["bench"]])
def test_the_help_fits_100_columns(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert out.startswith(" ".join(["usage: regrow", *command]))


def test_the_help_of_serve_has_every_option_and_default_under_its_subject(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    out = capsys.readouterr().out
    subjects = [line[:-1] for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert subjects == ["positional arguments", "options", *cli.SERVE]
    for options in cli.SERVE.values():
        for option in options:
            assert f"\n  {option.flag}" in out
    assert " ".join(out.split()).count("(default: ") == len(cli.all_options(cli.SERVE)) + 1


def test_the_help_is_quick_to_show_since_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from regrow.cli import build_parser; build_parser().format_help();"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_python_m_regrow_is_regrow() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regrow", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("regrow ")


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkout's bench/ with a bench that works, one that fails, and what they share."""
    (tmp_path / "good.py").write_text(
        '"""Shows that it ran. More."""\n'
        'import harness, sys; print("ran", *sys.argv[1:], __name__ == "__main__")'
    )
    (tmp_path / "worse.py").write_text("assert __name__ != '__main__'")
    (tmp_path / "harness.py").write_text("")
    monkeypatch.setattr(cli, "BENCH", tmp_path)
    return tmp_path


def test_bench_runs_the_scripts_of_the_checkout_and_tells_when_one_fails(
    benches: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["bench", "good"]) == 0
    assert "ran True" in capfd.readouterr().out
    assert cli.main(["bench", "good", "--quick"]) == 0
    assert "ran --quick True" in capfd.readouterr().out
    monkeypatch.setenv("REGROW_QUICK", "on")
    assert cli.main(["bench"]) == 1
    assert "ran --quick True" in capfd.readouterr().out


def test_bench_lists_what_there_is_and_runs_nothing(benches: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    assert capfd.readouterr().out.splitlines() == ["good   Shows that it ran", "worse  "]


def test_an_unknown_bench_is_told_with_those_there_are(
    benches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no 'harness'; there are good, worse" in refusal(capsys, "bench", "good", "harness")


def test_bench_measures_a_server_where_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", "http://127.0.0.1:9", "--clients", "1"]) == 1
    assert "no connection to http://127.0.0.1:9" in capsys.readouterr().err


def test_bench_outside_a_checkout_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "BENCH", tmp_path)
    assert "run this from a checkout" in refusal(capsys, "bench")


@pytest.mark.parametrize(
    ("command", "row"), [("models", "random:FAMILY[:SIZE]"), ("doctor", "model directory")]
)
def test_reports_are_tables_that_fit_100_columns(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    row: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main([command, "--model-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(row) for line in lines)
    assert max(map(len, lines)) <= 100


def test_doctor_tells_of_the_model_that_is_named_anywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def told(*argv: str) -> str:
        assert cli.main(["doctor", "--model-dir", str(tmp_path), *argv]) == 0
        return " ".join(capsys.readouterr().out.split())

    monkeypatch.setenv("COLUMNS", "200")
    assert "model demo not here yet" in told()
    assert "chat template the model's own" in told("random:llama")
    assert "native kernels" in told()
    monkeypatch.setenv("REGROW_MODEL", "random:falcon_h1")
    assert "falcon_h1, from random weights" in told()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "chat template --chat-template" in told("--chat-template", template)
    assert "--chat-template takes a Jinja template" in refusal(
        capsys, "doctor", "--chat-template", "/nowhere"
    )


def test_doctor_fails_for_a_model_that_cannot_be_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["doctor", "--model-dir", str(tmp_path), "nosuch"]) == 1
    assert "cannot be served" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("order", ["rm {d} all", "{d} rm all", "rm all {d}"])
def test_names_may_stand_before_and_after_the_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, order: str
) -> None:
    assert cli.main(["cache", *order.format(d=f"--cache-dir {tmp_path}").split()]) == 0
    assert capsys.readouterr().out == "removed: 0\n"


def test_a_cache_without_an_action_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "cache").strip() == "regrow: the following arguments are required: action"


def test_a_model_directory_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["serve", "demo", "--port", "0", "--model-dir", str(tmp_path / "file")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("regrow: demo cannot be loaded: ")
    assert "--model-dir" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("field", "value"), [("parallel", 0), ("context", 0), ("chunk", 100), ("cache_mib", -1), ("hang_s", -1.0)]
)
def test_settings_made_in_python_are_checked_too(field: str, value: float) -> None:
    with pytest.raises(BadConfig, match=rf"^{field}: {value}"):
        EngineSettings(**{field: value})
