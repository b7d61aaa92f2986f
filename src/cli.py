"""`regrow`: serve, chat, models, doctor, bench. What is heavy is imported by the command that needs it."""

import argparse
import ast
import asyncio
import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from regrow import __version__
from regrow.config import EngineSettings, RelaySettings, ServerSettings
from regrow.errors import BadConfig, RegrowError
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

OK, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130
BENCH = Path(__file__).resolve().parent.parent / "bench"
Settings = TypeVar("Settings", EngineSettings, ServerSettings)

DEFAULTS = {
    field.name: field.default
    for kind in (EngineSettings, ServerSettings)
    for field in dataclasses.fields(kind)
}


def _setting(name: str, kind: Kind, about: str, shown: str | None = None, field: str | None = None) -> Option:
    """An option that fills a field of EngineSettings or ServerSettings, and shows that field's default."""
    field = field or name.replace("-", "_")
    return Option(name, field, kind, DEFAULTS[field], about, shown)


MODEL = _setting(
    "model",
    text("MODEL"),
    "demo, random:FAMILY[:SIZE], a directory with safetensors, a .gguf file, or ORG/NAME of the hub",
)
CONFIG = Option("config", "config", PATH, None, "a TOML file with options by name", "none")
MODEL_DIR = _setting("model-dir", PATH, "where fetched and converted models are kept", "~/.cache/regrow")
CACHE_DIR = _setting("cache-dir", PATH, "where conversations and roots are kept across restarts", "nowhere")
CHAT_TEMPLATE = _setting(
    "chat-template", text("FILE"), "a Jinja template, or the path of its file", "the model's"
)
DTYPES = one_of("auto", "float32", "bfloat16", "float16")
QUANT = _setting(
    "quant",
    one_of("none", "int8", "int4", "auto"),
    "how weights are kept; auto = as the codes of 4 or 8 bits that the model's file holds, if any",
)
LEVELS = one_of("debug", "info", "warning", "error")
NATURAL = whole(0)
DEADLINE = real(0.001)
VERIFY = Kind("off|reread", "one of off, reread", {"off": False, "reread": True}.__getitem__)
API_KEY = _setting(
    "api-key", NAMES, "keys, one of which requests must show (better REGROW_API_KEY)", "none", "api_keys"
)
ALLOW_OPEN = Option("allow-open", "allow_open", SWITCH, False, "allow an address that others can reach")
LOGGING = (
    Option("log-level", "log_level", LEVELS, "info", "what to log"),
    Option("log-json", "log_json", SWITCH, False, "log as JSON lines"),
    CONFIG,
)

SERVE = {
    "model": (
        _setting("ctx", whole(64, auto=True), "tokens a slot holds", "the model's, or what fits", "context"),
        _setting("dtype", DTYPES, "what weights and cells are kept in"),
        QUANT,
        CHAT_TEMPLATE,
        _setting(
            "tool-format",
            one_of("auto", "hermes", "qwen-xml", "llama", "lfm2", auto=True),
            "how the model writes tool calls; auto = as its chat template says",
        ),
        MODEL_DIR,
        _setting("served-model-name", NAMES, "what requests call it", "the model's own", "served_names"),
    ),
    "device": (
        _setting("device", one_of("auto", "cpu", "cuda"), "where the model runs"),
        _setting("threads", whole(1, auto=True), "threads of the math library"),
        _setting("parallel", whole(1, 256), "slots: requests that are served at once"),
        _setting("chunk", whole(64, auto=True, multiple=64), "tokens read in one piece", "by --max-stall-ms"),
        _setting("max-stall-ms", real(1), "how long running streams may wait for a piece of a read"),
        _setting("decode-share", real(0, 1), "part of a chunk's time that running streams get after it"),
        _setting(
            "hang-s", real(0), "seconds a chunk or step may take before the device is restarted; 0 = any"
        ),
        _setting(
            "exact",
            one_of("full", "cache", "off", auto=True),
            "what answers do not depend on: full = cache and load, cache = the cache",
        ),
    ),
    "cache": (
        _setting("cache", ON_OFF, "keep what was read, and use it"),
        _setting("checkpoints", NATURAL, "copies of the running state kept per slot"),
        _setting("checkpoint-every", NATURAL, "read tokens between two of them; 0 = none of these"),
        _setting("roots", NATURAL, "system prompts kept; 0 = none"),
        _setting("root-min", NATURAL, "tokens a system prompt needs to be kept"),
        _setting(
            "root-cells",
            one_of("auto", "always", "never"),
            "when a root gets cells of its own; auto = in need",
        ),
        _setting("cache-mib", whole(0, auto=True), "budget of all that is kept", "a quarter of the memory"),
        CACHE_DIR,
        _setting("cache-disk-gib", real(0, auto=True), "budget of that directory", "half of what is free"),
        _setting("verify", VERIFY, "reread = read again what was mounted, and compare"),
        _setting("scrub-s", real(0), "seconds between checks of what lies in memory, while idle; 0 = none"),
        _setting("debug-digest", SWITCH, "tell with every answer a hash of all that its slot holds"),
        _setting(
            "repack-cold", SWITCH, "shorten old tool results of conversations that are not kept any more"
        ),
        _setting("conversation-ttl", real(0), "seconds without use before that, at least"),
        _setting("data-dir", PATH, "where the state of --repack-cold is kept", "~/.local/state/regrow"),
    ),
    "server": (
        _setting("host", text("ADDRESS"), "address to listen on"),
        _setting("port", whole(0, 65535), "port to listen on; 0 = any free one"),
        API_KEY,
        Option("api-key-file", "api_key_file", PATH, None, "a file with such keys, one a line", "none"),
        ALLOW_OPEN,
        _setting("cors", NAMES, "origins whose pages may use the server; * = any", "none"),
        _setting("keep-stamps", SWITCH, "leave the stamps of agents in system prompts (/v1/messages)"),
        _setting("queue", NATURAL, "requests that may wait for a slot"),
        _setting("deadline", DEADLINE, "seconds that a request may take, waiting included", "none"),
        _setting("keepalive-s", real(0.1, 3600), "seconds of silence before a stream gets a comment"),
        _setting("drain-s", real(0), "seconds that running requests get at the end"),
    ),
    "other": LOGGING,
}
CHAT = {
    "chat": (
        Option("url", "url", text("URL"), "http://127.0.0.1:8420", "the server"),
        API_KEY,
        Option("system", "system", text("TEXT"), "", "the system prompt", "none"),
        CONFIG,
    )
}
CACHE = {"cache": (CACHE_DIR, CONFIG)}
MODELS = {"models": (MODEL_DIR, CONFIG)}
DOCTOR = {"model": (CHAT_TEMPLATE, QUANT, MODEL_DIR, CONFIG)}
BENCHES = {
    "bench": (Option("quick", "quick", SWITCH, False, "small sizes"), CONFIG),
    "a server": (
        Option("url", "url", text("URL"), "", "measure this server instead", "none"),
        Option("model-name", "model_name", text("NAME"), "", "the model to ask", "its first"),
        Option("clients", "clients", whole(1, 1000), 4, "conversations at once"),
        Option("turns", "turns", whole(1), 4, "turns of each"),
        Option("tokens", "tokens", whole(1), 64, "tokens an answer"),
        API_KEY,
    ),
}


RELAYED = {field.name: field.default for field in dataclasses.fields(RelaySettings)}
RELAY = {
    "upstream": (
        Option(
            "upstream", "upstream", text("URL"), "", "the provider, such as https://api.anthropic.com", "none"
        ),
        Option(
            "style",
            "style",
            one_of("anthropic", "openai", auto=True),
            RELAYED["style"],
            "whose prompts are looked into; auto = both, by their path",
        ),
    ),
    "what it may change": (
        Option(
            "repack-cold", "repack_cold", SWITCH, False, "shorten old tool results once a prefix has expired"
        ),
        Option("prune", "prune", SWITCH, False, "shorten old tool results behind the cached prefix"),
        Option("dry-run", "dry_run", SWITCH, False, "decide and log, change nothing"),
    ),
    "relay": (
        Option("host", "host", text("ADDRESS"), RELAYED["host"], "address to listen on"),
        Option("port", "port", whole(0, 65535), RELAYED["port"], "port to listen on; 0 = any free one"),
        ALLOW_OPEN,
        Option(
            "data-dir", "data_dir", PATH, None, "where state and prices are kept", "~/.local/state/regrow"
        ),
    ),
    "other": LOGGING,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 (failed), 2 (wrong usage) or 130 (interrupted)."""
    try:
        arguments = build_parser().parse_args(argv)
        return cast(int, arguments.run(arguments))
    except BadConfig as error:
        print(f"regrow: {error}", file=sys.stderr)
        return BAD_USAGE
    except RegrowError as error:
        print(f"regrow: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> Parser:
    """Return the parser of all commands. Values stay text until `values_of` reads them."""
    parser = Parser(
        "regrow", description="An inference server for hybrid models that reads every prompt once."
    )
    parser.add_argument("--version", action="version", version=f"regrow {__version__}")
    parser.set_defaults(run=lambda _: _print(parser.format_help()))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(
        name: str, about: str, run: Callable[[argparse.Namespace], int], usage: str = "[options]"
    ) -> Parser:
        added: Parser = commands.add_parser(
            name, help=about, description=f"{about}.", usage=f"regrow {name} {usage}"
        )
        added.set_defaults(run=run)
        return added

    serve = command("serve", "serve a model over HTTP", _serve, "[options] [MODEL]")
    add_options(serve, SERVE)
    about = "relay a provider's API, and shorten prompts whose cached prefix has expired"
    add_options(command("relay", about, _relay), RELAY)
    add_options(command("chat", "chat with a server in the terminal", _chat), CHAT)
    about = "show, check or remove what a cache directory holds"
    cache = command("cache", about, _cache, "{ls,verify,rm} [options] [NAME ...]")
    cache.add_argument("action", choices=("ls", "verify", "rm"), help="rm takes names, all, or broken")
    cache.add_argument("names", nargs="*", default=[], metavar="NAME", help="which records to remove")
    add_options(cache, CACHE)
    add_options(command("models", "show what can be loaded", _models), MODELS)
    about = "show what was found on this machine and what will be used for a model"
    doctor = command("doctor", about, _doctor, "[options] [MODEL]")
    add_options(doctor, DOCTOR)
    for loading in (serve, doctor):
        loading.add_argument(
            "model", nargs="?", metavar="MODEL", help=f"{MODEL.help} (default: {MODEL.default})"
        )
    about = "run the benchmarks of a checkout, or measure any OpenAI server"
    bench = command("bench", about, _bench, "[options] [NAME ...]")
    bench.add_argument("names", nargs="*", metavar="NAME", help="which to run (default: all)")
    bench.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    add_options(bench, BENCHES)
    return parser


def _print(text: str) -> int:
    print(text)
    return OK


def values_of(groups: Mapping[str, Sequence[Option]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return field -> value, from the command line, the environment, the file, the defaults."""
    given = vars(arguments)
    path = cast(Path | None, resolve([CONFIG], given, os.environ, {})["config"])
    known = {option.name for option in all_options(SERVE, RELAY, CHAT, BENCHES)}
    in_file = {} if path is None else read_file(path, known)
    return resolve(all_options(groups), given, os.environ, in_file, str(path))


def all_options(*commands: Mapping[str, Sequence[Option]]) -> list[Option]:
    """Return the options of some commands; MODEL and CONFIG are anybody's."""
    rows = [option for groups in commands for options in groups.values() for option in options]
    return [MODEL, *(row for row in rows if row is not CONFIG)]


def serve_settings(values: Mapping[str, Any]) -> tuple[EngineSettings, ServerSettings]:
    """Return the settings that the values of SERVE make; raises BadConfig for an open host without keys."""
    from regrow.api.keys import keys_in

    if (path := values["api_key_file"]) is not None:
        values = {**values, "api_keys": (*values["api_keys"], *keys_in(path))}
    _check_host(values)

    def fill(kind: type[Settings]) -> Settings:
        names = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in values.items() if name in names})

    return fill(EngineSettings), fill(ServerSettings)


def _check_host(values: Mapping[str, Any]) -> None:
    from regrow.api.guard import is_loopback

    host = values["host"]
    if not is_loopback(host) and not values.get("api_keys") and not values["allow_open"]:
        keys = "--api-key, " if "api_keys" in values else ""
        raise BadConfig(
            f"--host {host}: others could reach the server there, and it has no keys; "
            f"give a loopback address such as 127.0.0.1, {keys}or --allow-open"
        )


def relay_settings(values: Mapping[str, Any]) -> RelaySettings:
    """Return the settings that the values of RELAY make; raises BadConfig."""
    from regrow.api.relay.serve import check
    from regrow.store.data_directory import data_directory

    _check_host(values)
    settings = RelaySettings(**{name: values[name] for name in RELAYED})
    check(settings)
    return dataclasses.replace(settings, data_dir=data_directory(settings.data_dir))


def _relay(arguments: argparse.Namespace) -> int:
    values = values_of(RELAY, arguments)
    settings = relay_settings(values)
    from rich.console import Console

    from regrow.api.logs import configure_logs
    from regrow.api.relay.serve import serve_relay

    configure_logs(values["log_level"], values["log_json"])
    console = Console(highlight=False, markup=False)
    asyncio.run(serve_relay(settings, lambda text: console.print(text, soft_wrap=True)))
    return OK


def _serve(arguments: argparse.Namespace) -> int:
    values = values_of(SERVE, arguments)
    engine_settings, server_settings = serve_settings(values)
    from rich.console import Console

    from regrow.api.loading import open_engine
    from regrow.api.logs import configure_logs
    from regrow.api.server import serve

    configure_logs(values["log_level"], values["log_json"])
    console = Console(highlight=False, markup=False)
    opening = open_engine(engine_settings, console)
    asyncio.run(serve(server_settings, opening, lambda text: console.print(text, soft_wrap=True)))
    return OK


def _chat(arguments: argparse.Namespace) -> int:
    values = values_of(CHAT, arguments)
    from regrow.api.terminal import chat

    return chat(values["url"], values["system"], next(iter(values["api_keys"]), None))


def _cache(arguments: argparse.Namespace) -> int:
    directory = values_of(CACHE, arguments)["cache_dir"]
    if directory is None:
        raise BadConfig("cache: give the directory with --cache-dir")
    if bool(arguments.names) != (arguments.action == "rm"):
        raise BadConfig("cache: rm takes names of records, or all, or broken; ls and verify take none")
    from regrow.api.logs import configure_logs
    from regrow.store.listing import HEADS, Listing

    configure_logs("error", as_json=False)
    listing = Listing(directory)
    try:
        if arguments.action == "ls":
            return _print_rows(HEADS, listing.rows())
        if arguments.action == "rm":
            return _print(f"removed: {listing.remove(arguments.names)}")
        if not list(listing.rows()):
            return _print("there are no records")
        broken = list(listing.verify())
        if not broken:
            return _print("every record is as it was written")
        _print_rows(HEADS, broken)
        return FAILED
    except OSError as error:
        raise RegrowError(f"cache: {error}") from None
    finally:
        listing.close()


def _models(arguments: argparse.Namespace) -> int:
    model_dir = values_of(MODELS, arguments)["model_dir"]
    from regrow.models.report import model_rows

    return _print_rows(("model", "what it is", "note"), model_rows(model_dir))


def _doctor(arguments: argparse.Namespace) -> int:
    values = values_of(DOCTOR, arguments)
    from regrow.gpu.fast import native
    from regrow.models.outlook import REFUSED, model_rows_of
    from regrow.models.report import doctor_rows

    machine = doctor_rows(values["model_dir"])
    kernels = ("native kernels", native.state(), "decode steps" if native.library() else "torch's are used")
    model = model_rows_of(values["model"], values["model_dir"], values["chat_template"], values["quant"])
    _print_rows(("subject", "found", "what it means"), [*machine, kernels, *model])
    return FAILED if any(meaning.startswith(REFUSED) for _, _, meaning in model) else OK


def _print_rows(heads: tuple[str, str, str], rows: Iterable[tuple[str, str, str]]) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
    return OK


def _bench(arguments: argparse.Namespace) -> int:
    values = values_of(BENCHES, arguments)
    if values["url"]:
        from regrow.api.measure import Load, show

        load = Load(values["clients"], values["turns"], values["tokens"], values["model_name"])
        return OK if show(values["url"], next(iter(values["api_keys"]), None), load) else FAILED
    quick = ["--quick"] if values["quick"] else []
    if not (BENCH / "harness.py").exists():
        raise BadConfig("the benchmarks are not installed with the package; run this from a checkout")
    texts = {path.stem: path.read_text() for path in sorted(BENCH.glob("*.py"))}
    scripts = {name: text for name, text in texts.items() if "__main__" in text}
    names = arguments.names or list(scripts)
    for name in names:
        if name not in scripts:
            raise BadConfig(f"bench: there is no {name!r}; there are {', '.join(scripts)}")
    if arguments.list:
        width = max(map(len, names), default=0)
        return _print("\n".join(f"{name:{width}}  {_about(scripts[name])}" for name in names))
    for name in names:
        print(f"bench/{name}.py", flush=True)
        if subprocess.run([sys.executable, BENCH / f"{name}.py", *quick], check=False).returncode:
            return FAILED
    return OK


def _about(script: str) -> str:
    """Return the first sentence of a script's docstring, up to a line's width."""
    return textwrap.shorten((ast.get_docstring(ast.parse(script)) or "").partition(".")[0], 80)
