"""One frozen settings object, read once at start (command line, `cli.py`; Python, `EngineSettings(...)`)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from regrow.errors import BadConfig
from regrow.policy.request import Exactness, ToolFormat

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quant = Literal["none", "int8", "int4", "auto"]
RootCells = Literal["auto", "always", "never"]

CHUNK_STEP = 64
AT_LEAST_1 = ("parallel", "context", "threads", "chunk")
AT_LEAST_0 = ("checkpoints", "checkpoint_every", "roots", "root_min", "cache_mib", "queue", "hang_s")
LEAST = dict.fromkeys(AT_LEAST_1, 1) | dict.fromkeys(AT_LEAST_0, 0)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is started with. None means: decided at start, and said so in the log.

    model: a preset ("demo", "random:FAMILY[:SIZE]") or a local directory. context: cells a slot holds.
    chunk: tokens a read chunk holds, a multiple of 64; None: as many, at each depth, as keep it under
    max_stall_ms milliseconds, which is also how long running streams may wait while a chunk is read. quant:
    what linear layers keep their weights in; "auto": in the codes of the model's file, where it holds any.
    cache_mib: the budget of the ledger (B1). decode_share: the part of a chunk's time that running streams
    get after it. model_dir: where converted models, and what was chosen for a model, are kept. root_cells:
    whether a root gets a copy of its cells at once, when its last holder is about to go, or never.
    repack_cold: leave old tool results out of conversations that are not kept any more and have rested for
    over conversation_ttl seconds; data_dir: where is noted which. verify: read again what is mounted, and
    compare (V2). debug_digest: a hash of all that the slot holds with every answer (V1). cache_dir: where
    conversations and roots are kept across restarts, up to cache_disk_gib GiB; None keeps nothing. deadline:
    seconds that any request may take. ask_deadline_s bounds every ask between actors. save_after_s: how long
    a session is idle before it is written to disk (D5). hang_s: how long one chunk, step or copy may take
    before the device is restarted; 0 is any time. scrub_s: how often what lies in memory is held against its
    checksums while nothing is served; 0 is never.
    debug: check integrity after every step.
    """

    model: str = "demo"
    parallel: int = 4
    context: int | None = None
    dtype: DType = "auto"
    quant: Quant = "auto"
    device: Device = "auto"
    threads: int | None = None
    chunk: int | None = None
    max_stall_ms: float = 200.0
    decode_share: float = 0.5
    exact: Exactness | None = None
    cache: bool = True
    checkpoints: int = 6
    checkpoint_every: int = 16384
    roots: int = 8
    root_min: int = 256
    root_cells: RootCells = "auto"
    verify: bool = False
    debug_digest: bool = False
    cache_mib: int | None = None
    cache_dir: Path | None = None
    cache_disk_gib: float | None = None
    queue: int = 64
    deadline: float | None = None
    event_buffer: int = 4096
    ask_deadline_s: float = 60.0
    save_after_s: float = 1.0
    drain_s: float = 30.0
    hang_s: float = 600.0
    scrub_s: float = 300.0
    repack_cold: bool = False
    conversation_ttl: float = 600.0
    data_dir: Path | None = None
    model_dir: Path | None = None
    chat_template: str | None = None
    tool_format: ToolFormat | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        """Raises BadConfig naming the field."""
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise BadConfig(f"{name}: {value} is not allowed; give a number of {least} or more")
        if self.chunk is not None and self.chunk % CHUNK_STEP:
            raise BadConfig(f"chunk: {self.chunk} is no multiple of {CHUNK_STEP}")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the HTTP server listens.

    api_keys: one of them must be shown with every request; none: anybody is let in. cors: origins whose pages
    may use the server, "*" for any. body_limit in bytes. idle_s: how long a connection may take until the
    head of a request is there; body_s: until the body is. socket_idle_s: how long a WebSocket may have
    nothing to do. keep_stamps: leave what `api/stamps.py` takes out of system prompts.
    """

    host: str = "127.0.0.1"
    port: int = 8420
    served_names: tuple[str, ...] = ()
    keepalive_s: float = 5.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors: tuple[str, ...] = ()
    body_limit: int = 32 * 1024 * 1024
    idle_s: float = 75.0
    body_s: float = 60.0
    socket_idle_s: float = 900.0
    message_limit: int = 10_000
    keep_stamps: bool = False


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """How the relay runs. upstream: the provider's URL. style: of the prompts it looks into; None: both.

    repack_cold, prune: what it may change (C6, C10). data_dir: where its state is kept; None: nowhere.
    """

    upstream: str
    style: Literal["anthropic", "openai"] | None = None
    repack_cold: bool = False
    prune: bool = False
    dry_run: bool = False
    data_dir: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8421
