"""Loading a model by name, ready to be served, or refusing it with the reason.

Nothing here needs a network but the first fetch of `demo` and models of the hub.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from regrow.config import DType
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.directory import load_directory
from regrow.models.identity import module_fingerprint
from regrow.models.once import model_directory
from regrow.models.packed import PackedWeights
from regrow.models.precision import choose_dtype
from regrow.models.progress import Progress, silent
from regrow.models.random_models import PREFIX, build_random, parse_random
from regrow.models.sources import locate
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.request import SamplingParams, ToolFormat

UNLIMITED = 32_768  # the context of a model that names no limit of its own
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. name: what it is served as. module: in eval mode, without gradients.

    fingerprint: a hash that differs when weights or configuration differ. context: the positions it was made
    for. eos_ids: what ends an answer. source: the directory it was loaded from, None for random ones. packed:
    weights that its file holds as codes of 4 or 8 bits, by layer.
    """

    name: str
    module: PreTrainedModel
    tokenizer: ChatTokenizer
    fingerprint: str
    context: int
    eos_ids: frozenset[int]
    default_sampling: SamplingParams
    source: Path | None
    packed: PackedWeights


def load_model(
    name: str,
    *,
    dtype: DType = "auto",
    device: torch.device = CPU,
    model_dir: Path | None = None,
    chat_template: str | None = None,
    tool_format: ToolFormat | None = None,
    progress: Progress = silent,
) -> LoadedModel:
    """Load `demo`, `random:FAMILY[:SIZE]`, a directory, a .gguf file or a model of the hub.

    model_dir: where fetched and converted models are kept. chat_template: a Jinja template or its file.
    tool_format: how the model writes tool calls; None: as its template says.
    Raises ModelRefused with the reason, or BadConfig for a template that is none.
    """
    chosen, _ = choose_dtype(dtype, device)
    path: Path | None = None
    if name.startswith(PREFIX):
        progress(f"building {name}", None)
        served, (module, tokenizer) = name, _random(name, chosen, device)
    else:
        path, served = locate(name, model_directory(model_dir), progress)
        progress(f"loading {served}", None)
        module, tokenizer = load_directory(path, chosen, device)
    module.requires_grad_(False).eval()
    rows = module.get_input_embeddings().weight.shape[0]
    chat = ChatTokenizer(tokenizer, _end_ids(module), chat_template, rows, tool_format)
    return LoadedModel(
        name=served,
        module=module,
        tokenizer=chat,
        fingerprint=module_fingerprint(module),
        context=context_of(module.config, tokenizer),
        eos_ids=chat.eos_ids,
        default_sampling=sampling_of(module.generation_config),
        source=path,
        packed=PackedWeights(path),
    )


def sampling_of(generation: GenerationConfig) -> SamplingParams:
    """Return the sampling that the model's makers recommend; greedy where they name none."""
    if not generation.do_sample:
        return SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    named = {name: value for name in names if (value := getattr(generation, name, None)) is not None}
    return SamplingParams(**{"temperature": 1.0, **named})


def _random(
    name: str, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    family, size = parse_random(name)
    module = build_random(family, size, dtype).to(device)
    config = module.config.get_text_config()
    return module, byte_tokenizer(config.vocab_size, config.max_position_embeddings)


def _end_ids(module: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for config in (module.generation_config, module.config.get_text_config()):
        end = getattr(config, "eos_token_id", None)
        ids.update(end if isinstance(end, list | tuple) else [] if end is None else [end])
    return frozenset(ids)


def context_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the positions that a model was made for."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit or min(tokenizer.model_max_length, UNLIMITED))
