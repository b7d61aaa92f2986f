"""From settings to something that can be served: the model loaded, its slots sized, what holds said."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from regrow.config import EngineSettings
from regrow.errors import BadConfig
from regrow.gpu.memory import MIB, cache_budget, context_that_fits, device_memory, host_memory
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Geometry, Runner
from regrow.models.identity import arithmetic
from regrow.models.load import LoadedModel, load_model
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.keys import Namespace
from regrow.policy.plan import ChunkTable
from regrow.policy.request import Exactness, SamplingParams

log = structlog.get_logger(__name__)
FORMAT_VERSION = 1
LEAST_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class RunsOn:
    """What was decided at start: the device and the dtype as torch names them, threads of its library."""

    device: str
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class Served:
    """A model ready to be served: its runner, its tokenizer, the read plan's table, and its namespace.

    budget: bytes of the cache ledger. runs_on: None where the runner is no model.
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


def load_served(settings: EngineSettings, progress: Callable[[str, float | None], None]) -> Served:
    """Load the model that `settings` name and allocate its slots. Blocks; run it off the event loop.

    Raises ModelRefused with the reason, or BadConfig naming the option.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = _device(settings)
    loaded = load_model(
        settings.model,
        dtype=settings.dtype,
        device=device,
        model_dir=settings.model_dir,
        chat_template=settings.chat_template,
        tool_format=settings.tool_format,
        progress=progress,
    )
    exact: Exactness = settings.exact or ("full" if device.type == "cuda" else "cache")
    progress("allocating slots", None)
    runner = ModelRunner(
        loaded.module,
        settings.parallel + settings.verify,
        lambda geometry: _context(settings, loaded, geometry, device),
        exact,
    )
    budget = _budget(settings)
    served = Served(
        name=loaded.name,
        runner=runner,
        tokenizer=loaded.tokenizer,
        table=ChunkTable.uniform(settings.chunk),
        namespace=Namespace.of(
            FORMAT_VERSION,
            loaded.fingerprint,
            str(loaded.module.dtype),
            arithmetic(device),
            settings.chunk,
            exact == "off",
        ),
        exact=exact,
        default_sampling=loaded.default_sampling,
        budget=budget,
        runs_on=RunsOn(str(device), str(loaded.module.dtype).removeprefix("torch."), torch.get_num_threads()),
    )
    _say_what_holds(settings, served, device)
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


def _budget(settings: EngineSettings) -> int:
    if not settings.cache:
        return 0
    if settings.cache_mib is not None:
        return settings.cache_mib * MIB
    return cache_budget(*host_memory())


def _say_what_holds(settings: EngineSettings, served: Served, device: torch.device) -> None:
    """One line at the start says what is effective (E3)."""
    geometry, runner = served.runner.geometry, served.runner
    checkpoint = geometry.bytes_per_checkpoint
    slot_mib = geometry.bytes_per_token * runner.context * runner.slots // MIB
    log.info(
        "serving",
        model=served.name,
        device=str(device),
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
        message_cuts=served.tokenizer.marks_note or "learned from the chat template",
    )
