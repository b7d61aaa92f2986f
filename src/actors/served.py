"""From settings to something that can be served: the model loaded, its slots sized, what holds said."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog
import torch

from regrow.config import EngineSettings, Quant
from regrow.errors import BadConfig, ModelRefused
from regrow.gpu.chunk_times import time_chunks
from regrow.gpu.fast import native
from regrow.gpu.fast.prepare import Prepared, prepare
from regrow.gpu.memory import MIB, cache_budget, context_that_fits, device_memory, host_memory
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Geometry, Runner
from regrow.models.answer_reader import ThinkingTags
from regrow.models.chosen import chosen_once
from regrow.models.identity import arithmetic, math_environment
from regrow.models.load import LoadedModel, load_model
from regrow.models.once import model_directory
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.chunks import NOT_MEASURED, USUAL, ChosenChunks, choose_chunks
from regrow.policy.keys import Namespace
from regrow.policy.plan import ChunkTable
from regrow.policy.request import Exactness, SamplingParams, ToolFormat

log = structlog.get_logger(__name__)
FORMAT_VERSION = 1
LEAST_CONTEXT = 256
MOST = {"cpu": 512, "cuda": 2048}  # tokens of a chunk: larger ones are not read faster, and cut coarser


@dataclass(frozen=True, slots=True)
class RunsOn:
    """What was decided at start: the device and the dtype as torch names them, threads of its library.

    linear: what the linear layers became, in words; linear_bytes: of their weights. native: the state of the
    native kernels. environment: what the math library and OpenMP were told.
    """

    device: str
    dtype: str
    threads: int
    quant: Quant
    linear: str
    linear_bytes: int
    native_layers: int
    native: str
    environment: dict[str, str]

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, prepared: Prepared) -> "RunsOn":
        return cls(
            str(device),
            str(dtype).removeprefix("torch."),
            torch.get_num_threads(),
            prepared.quant,
            str(prepared),
            prepared.nbytes,
            prepared.layers,
            native.state(),
            math_environment(),
        )


@dataclass(frozen=True, slots=True)
class Served:
    """A model ready to be served: its runner, its tokenizer, the read plan's table, and its namespace.

    budget: bytes of the cache ledger, without what the copy lanes keep (B1). runs_on: None where the runner
    is no model. stall: in words, whether chunks take no longer than `--max-stall-ms`.
    """

    name: str
    runner: Runner
    tokenizer: ChatTokenizer
    table: ChunkTable
    namespace: Namespace
    exact: Exactness
    default_sampling: SamplingParams
    budget: int
    runs_on: RunsOn | None = None
    stall: str = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served. context: tokens a slot holds. created: seconds since 1970 when it was loaded. chunks:
    what is read in one piece; stall: whether that takes no longer than `--max-stall-ms`; both in words."""

    name: str
    context: int
    vocab_size: int
    exact: Exactness
    created: int
    default_sampling: SamplingParams
    has_template: bool
    tool_format: ToolFormat
    parallel_calls: bool
    thinking: ThinkingTags | None
    hybrid: bool
    bytes_per_token: int
    bytes_per_checkpoint: int
    runs_on: RunsOn | None
    chunks: str
    stall: str

    @classmethod
    def of(cls, served: Served) -> "ModelInfo":
        geometry, tokenizer = served.runner.geometry, served.tokenizer
        return cls(
            name=served.name,
            context=served.runner.context,
            vocab_size=tokenizer.vocab_size,
            exact=served.exact,
            created=int(time.time()),
            default_sampling=served.default_sampling,
            has_template=tokenizer.has_template,
            tool_format=tokenizer.tool_format,
            parallel_calls=tokenizer.parallel_calls,
            thinking=tokenizer.thinking,
            hybrid=geometry.hybrid,
            bytes_per_token=geometry.bytes_per_token,
            bytes_per_checkpoint=geometry.bytes_per_checkpoint,
            runs_on=served.runs_on,
            chunks=served.table.told,
            stall=served.stall,
        )


def load_served(settings: EngineSettings, progress: Callable[[str, float | None], None]) -> Served:
    """Load the model that `settings` name and allocate its slots. Blocks; run it off the event loop.

    The thread that loads ends with it, and so do its OpenMP threads: where more of them live than there are
    cores, none spins for the next piece of work, and a decode step takes twice as long.
    Raises ModelRefused with the reason, or BadConfig naming the option.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as once:
        return once.submit(_load_served, settings, progress).result()


def _load_served(settings: EngineSettings, progress: Callable[[str, float | None], None]) -> Served:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = _device(settings)
    try:
        loaded = load_model(
            settings.model,
            dtype=settings.dtype,
            device=device,
            model_dir=settings.model_dir,
            chat_template=settings.chat_template,
            tool_format=settings.tool_format,
            progress=progress,
        )
    except OSError as error:
        place = model_directory(settings.model_dir)
        raise ModelRefused(
            f"{settings.model} cannot be loaded: {error}; fetched and converted models are kept in {place} "
            "(--model-dir)"
        ) from error
    dtype = loaded.module.dtype
    progress("preparing weights", None)
    prepared = prepare(loaded.module, settings.quant, loaded.packed)
    exact: Exactness = settings.exact or ("full" if device.type == "cuda" else "cache")
    progress("allocating slots", None)
    runner = ModelRunner(
        loaded.module,
        settings.parallel + settings.verify,
        lambda geometry: _context(settings, loaded, geometry, device),
        exact,
    )
    budget = max(_budget(settings) - runner.lane_bytes, 0)
    codes = "" if prepared.quant == "none" else loaded.packed.digest
    computed = (arithmetic(device), native.identity(), *prepared.identity)
    identity = (loaded.fingerprint, str(dtype), codes, *computed)
    chunks = _chunks(settings, loaded, runner, identity, device, progress)
    runs_on = RunsOn.of(device, dtype, prepared)
    served = Served(
        name=loaded.name,
        runner=runner,
        tokenizer=loaded.tokenizer,
        table=chunks.table,
        namespace=Namespace.of(FORMAT_VERSION, *identity, chunks.table.steps, exact == "off"),
        exact=exact,
        default_sampling=loaded.default_sampling,
        budget=budget,
        runs_on=runs_on,
        stall=chunks.stall,
    )
    _say_what_holds(settings, served, runs_on)
    return served


def _device(settings: EngineSettings) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BadConfig("--device cuda: this torch build sees no CUDA device; use cpu or auto")
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def _context(settings: EngineSettings, loaded: LoadedModel, geometry: Geometry, device: torch.device) -> int:
    wanted = settings.context or loaded.context
    if wanted > loaded.context:
        raise BadConfig(f"--ctx {wanted}: the model was made for at most {loaded.context} tokens")
    free = device_memory(device)[1]
    slots = settings.parallel + settings.verify
    fits = context_that_fits(wanted, geometry.bytes_per_token, slots, free)
    if fits < (settings.context or min(wanted, LEAST_CONTEXT)):
        raise BadConfig(
            f"--ctx {wanted} with --parallel {settings.parallel} needs "
            f"{wanted * geometry.bytes_per_token * slots // MIB} MiB for the slots; "
            f"half of the {free // MIB} MiB that are free holds {fits} tokens each"
        )
    return fits


def _chunks(
    settings: EngineSettings,
    loaded: LoadedModel,
    runner: Runner,
    identity: tuple[object, ...],
    device: torch.device,
    progress: Callable[[str, float | None], None],
) -> ChosenChunks:
    """Return the chunks that were asked for, or those that keep `--max-stall-ms`, measured once. Models that
    are built in memory are not measured: what they answer is to be the same anywhere."""
    if settings.chunk is not None or loaded.source is None:
        return ChosenChunks(ChunkTable.uniform(settings.chunk or USUAL), NOT_MEASURED)
    most_s = settings.max_stall_ms / 1e3
    vocab = loaded.tokenizer.vocab_size

    def choose() -> ChosenChunks:
        def now() -> float:
            progress("measuring how long chunks take", None)
            return time.perf_counter()

        timed = time_chunks(runner, MOST[device.type], vocab, most_s, now)
        return choose_chunks(timed, most_s, loaded.context)

    folder = model_directory(settings.model_dir)
    chosen_for = (*identity, torch.get_num_threads())
    return chosen_once(folder, loaded.name, chosen_for, settings.max_stall_ms, choose, progress)


def _budget(settings: EngineSettings) -> int:
    if not settings.cache:
        return 0
    if settings.cache_mib is not None:
        return settings.cache_mib * MIB
    return cache_budget(*host_memory())


def _say_what_holds(settings: EngineSettings, served: Served, runs_on: RunsOn) -> None:
    """One line at the start says what is effective (E3)."""
    geometry, runner = served.runner.geometry, served.runner
    checkpoint = geometry.bytes_per_checkpoint
    slot_mib = geometry.bytes_per_token * runner.context * runner.slots // MIB
    log.info(
        "serving",
        model=served.name,
        device=runs_on.device,
        kind="hybrid" if geometry.hybrid else "attention only",
        exact=served.exact,
        slots=runner.slots,
        context=runner.context,
        bytes_per_token=geometry.bytes_per_token,
        slots_mib=slot_mib,
        bytes_per_checkpoint=checkpoint,
        cache=f"{served.budget // MIB} MiB" if settings.cache else "off",
        checkpoints_fit=served.budget // checkpoint if checkpoint else "not needed",
        roots=settings.roots if settings.cache else 0,
        parked="in host memory" if settings.cache else "off",
        disk=str(settings.cache_dir) if settings.cache and settings.cache_dir else "off",
        linear=runs_on.linear,
        linear_mib=runs_on.linear_bytes // MIB,
        quant=runs_on.quant,
        native_kernels=runs_on.native,
        threads=runs_on.threads,
        chunks=served.table.told,
        max_stall_ms=settings.max_stall_ms,
        stall=served.stall,
        message_cuts=served.tokenizer.marks_note or "learned from the chat template",
    )
