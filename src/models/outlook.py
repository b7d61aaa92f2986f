"""What `regrow doctor` says of the model that would be served, without reading its weights."""

import dataclasses
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from regrow.config import Quant
from regrow.errors import ModelRefused
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.chosen import all_chosen
from regrow.models.directory import read_directory
from regrow.models.load import context_of, sampling_of
from regrow.models.once import model_directory
from regrow.models.packed import PackedWeights
from regrow.models.random_models import PREFIX, parse_random, random_config
from regrow.models.report import Row
from regrow.models.sources import present
from regrow.models.tokenizer import ChatTokenizer
from regrow.policy.request import SamplingParams

REFUSED = "cannot be served"
_GENERATION = "generation_config.json"


def model_rows_of(
    name: str,
    model_dir: Path | None = None,
    chat_template: str | None = None,
    quant: Quant = "auto",
) -> list[Row]:
    """Return what would be served under `name`; a model that cannot be served is a row with the reason.

    Raises BadConfig for a chat template that is none.
    """
    try:
        if name.startswith(PREFIX):
            config = random_config(*parse_random(name))
            tokenizer = byte_tokenizer(config.get_text_config().vocab_size, 0)
            return _rows(name, "random weights", config, tokenizer, GenerationConfig(), chat_template)
        folder = model_directory(model_dir)
        path = present(name, folder)
        if path is None:
            return [Row("model", name, "not here yet: `regrow serve` fetches or converts it once")]
        config, tokenizer = read_directory(path)
        rows = _rows(name, str(path), config, tokenizer, _generation(path, config), chat_template)
        return [*rows, _weights_row(path, quant), *_chunk_rows(name, folder)]
    except ModelRefused as error:
        return [Row("model", name, f"{REFUSED}: {error}")]


def _rows(
    name: str,
    source: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    generation: GenerationConfig,
    chat_template: str | None,
) -> list[Row]:
    chat = ChatTokenizer(tokenizer, chat_template=chat_template)
    return [
        Row("model", name, f"{config.model_type}, from {source}"),
        Row("context", f"{context_of(config, tokenizer):,} tokens", "what the model was made for"),
        _template_row(chat, chat_template),
        _sampling_row(sampling_of(generation)),
    ]


def _weights_row(path: Path, quant: Quant) -> Row:
    kinds = [f"{count} as codes of {bits} bits" for bits, count in PackedWeights(path).counts().items()]
    uses = {
        "auto": "uses these, where the native kernels are there" if kinds else "leaves all as they are",
        "none": "leaves all as they are",
        "int8": "rounds what has not so many to 8 bits",
        "int4": "rounds what has not so many to 4 bits, the head to 8",
    }
    return Row("linear layers", ", ".join(kinds) or "as weights alone", f"--quant {quant} {uses[quant]}")


def _chunk_rows(name: str, folder: Path) -> list[Row]:
    """What `--chunk auto` has chosen before, the last for each `--max-stall-ms`: other versions, numbers of
    threads and dtypes have files of their own."""
    last = {kept.max_stall_ms: kept for kept in all_chosen(folder) if kept.model == name}
    return [
        Row(
            "chunks",
            f"{kept.chosen.table.told} (tokens)",
            f"--max-stall-ms {kept.max_stall_ms:g}: {kept.stall}",
        )
        for kept in last.values()
    ] or [Row("chunks", "not measured yet", "--chunk auto measures at the first start")]


def _template_row(chat: ChatTokenizer, override: str | None) -> Row:
    if not chat.has_template:
        return Row("chat template", "none", "completions only; --chat-template can give one")
    cuts = chat.marks_note or "marks where every message ends"
    return Row("chat template", "the model's own" if override is None else "--chat-template", cuts)


def _sampling_row(sampling: SamplingParams) -> Row:
    default = SamplingParams()
    named = {
        field.name: value
        for field in dataclasses.fields(sampling)
        if (value := getattr(sampling, field.name)) != getattr(default, field.name)
    }
    if not named:
        return Row("default sampling", "greedy", "the model names none; a request can")
    fact = ", ".join(f"{name} {value:g}" for name, value in named.items())
    return Row("default sampling", fact, f"from the model's {_GENERATION}; a request can say otherwise")


def _generation(path: Path, config: PreTrainedConfig) -> GenerationConfig:
    if not (path / _GENERATION).exists():
        return GenerationConfig.from_model_config(config)
    return GenerationConfig.from_pretrained(path, local_files_only=True)
