"""Converting a GGUF file to a Hugging Face directory (safetensors, tokenizer.json, config.json), once.

What a file's fields and tensors mean is transformers' knowledge and is taken from there: configuration,
tokenizer, tensor names and layouts. But for most architectures it parses the vocabulary again and again, and
builds the table of tensor names once for every module. Here the configuration is read from a skeleton of the
file, the table is built once, and a later load needs no GGUF at all.

Quantised weights are stored as bfloat16 (see `GgufHeader.stored_dtype`), and those of linear layers as the
codes that the file holds too (`models/packed.py`).
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from safetensors.torch import save_file
from tokenizers import Regex, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from regrow.errors import ModelRefused
from regrow.models.gguf_header import GgufHeader, read_header
from regrow.models.gguf_packing import packed_tensors
from regrow.models.identity import file_digest
from regrow.models.once import made_once
from regrow.models.packed import FILE
from regrow.models.progress import Progress
from regrow.models.quiet import quiet
from regrow.models.refusal import refuse_incomplete, refusing

CONVERTER = 2  # raised when a conversion gives other bytes: older copies are then left alone
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")


def converted_path(path: Path, model_dir: Path, identity: str) -> Path:
    """Return where the converted copy of a file with this content hash is kept."""
    return model_dir / "converted" / f"{path.stem}-{identity[:16]}-v{CONVERTER}"


def convert_gguf(path: Path, model_dir: Path, progress: Progress, identity: str | None = None) -> Path:
    """Return the converted copy of the GGUF file at `path`, made if there is none.

    identity: the hash of its content where it is known. Raises ModelRefused with the file and the cause.
    """
    target = converted_path(path, model_dir, identity or file_digest(path))
    return made_once(target, partial(_convert, path, progress=progress), progress)


def _convert(path: Path, part: Path, progress: Progress) -> None:
    header = read_header(path)
    with quiet(), refusing(f"{path} cannot be converted"):
        progress(f"converting {path.name}", 0.0)
        fast = is_gguf_arch_supported(header.architecture)
        config = _config(header, fast)
        model = _fast_model(header, config) if fast else _model(header, config, progress)
        _set_generation(model, header)
        progress(f"writing the converted copy of {path.name}", None)
        model.save_pretrained(part, max_shard_size="4GB")
        names = _tensor_names(header.architecture, model, _processor(header, model))
        save_file(packed_tensors(header, model, names), part / FILE)
        _tokenizer(header).save_pretrained(part)


def _fast_model(header: GgufHeader, config: PreTrainedConfig) -> PreTrainedModel:
    """Load an architecture for which transformers has a reader that is fast."""
    model, info = AutoModelForCausalLM.from_pretrained(
        header.path.parent,
        config=config,
        gguf_file=header.path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, header.stored_dtype),
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    refuse_incomplete(header.path, info["missing_keys"], info["mismatched_keys"])
    return model


def _model(header: GgufHeader, config: PreTrainedConfig, progress: Progress) -> PreTrainedModel:
    dtype = getattr(torch, header.stored_dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in _weights(header, model, progress).items()}
    shapes = {name: parameter.shape for name, parameter in model.state_dict().items()}
    wrong = [(n, t.shape, shapes[n]) for n, t in tensors.items() if n in shapes and t.shape != shapes[n]]
    refuse_incomplete(header.path, (), wrong)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    refuse_incomplete(header.path, [name for name, p in model.named_parameters() if p.is_meta], ())
    return model


def _config(header: GgufHeader, fast: bool) -> PreTrainedConfig:
    """Read the configuration, and set what transformers takes from its defaults although the file says it."""
    with TemporaryDirectory() as folder:
        path = header.path if fast else Path(folder, "skeleton.gguf")
        if not fast:
            path.write_bytes(header.skeleton())
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    head_dim = header.values.get(f"{header.architecture}.attention.key_length")
    if head_dim is not None and hasattr(config, "head_dim"):
        config.head_dim = head_dim
    embedding = next((t for t in header.tensors if t.name == "token_embd.weight"), None)
    if embedding is not None:
        config.vocab_size = embedding.shape[0]  # padded rows included
    return config


def _weights(header: GgufHeader, model: PreTrainedModel, progress: Progress) -> dict[str, torch.Tensor]:
    """Return the tensors under transformers' names and in its layouts, float32."""
    processor = _processor(header, model)
    names = _tensor_names(header.architecture, model, processor)
    if not names:
        raise ModelRefused(f"the architecture {header.architecture} has no table of tensor names")
    out: dict[str, torch.Tensor] = {}
    for i, tensor in enumerate(header.tensors):
        processed = processor.process(
            weights=header.floats(tensor),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": out},
        )
        if processed.name in names:
            out[names[processed.name]] = torch.from_numpy(processed.weights.copy())
        progress(f"converting {header.path.name}", (i + 1) / len(header.tensors))
    return out


def _processor(header: GgufHeader, model: PreTrainedModel) -> TensorProcessor:
    return TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())


def _tensor_names(architecture: str, model: PreTrainedModel, processor: TensorProcessor) -> dict[str, str]:
    """Return GGUF tensor name -> parameter name; nothing where there is no table for this architecture.

    A parameter is looked up by its whole name first, then without its leading modules one by one, since some
    files were written from the inner model.
    """
    arch = next((number for number, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if arch is None:
        return {}
    table = get_tensor_name_map(arch, model.config.get_text_config().num_hidden_layers)
    names: dict[str, str] = {}
    parameters = [name.split(".") for name in model.state_dict()]
    for depth in range(max(map(len, parameters)) - 1):
        level: dict[str, str] = {}
        for parts in parameters:
            if len(parts) - depth < 2:
                continue
            prefix = "".join(f"{part}." for part in parts[:depth])
            name = processor.preprocess_name(".".join(parts[depth:]))
            stem, dot, leaf = name.rpartition(".")
            stem, suffix = (stem, dot + leaf) if leaf in ("weight", "bias") else (name, "")
            found = table.get_name(stem)
            if found is None:
                processor.perform_fallback_tensor_mapping(level, suffix, prefix, name)
            else:
                level[found + suffix] = prefix + name
        names = level | names
    return names


def _tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        header.path.parent, gguf_file=header.path.name, local_files_only=True
    )
    if header.values.get("tokenizer.ggml.pre") in SINGLE_DIGITS:  # transformers would join digits and spaces
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return tokenizer


def _set_generation(model: PreTrainedModel, header: GgufHeader) -> None:
    """Take over the end tokens and, where the file has some, the sampling it recommends."""
    generation, values = model.generation_config, header.values
    ends = {values[key] for key in map("tokenizer.ggml.{}_token_id".format, ("eos", "eot")) if key in values}
    if ends:
        generation.eos_token_id = sorted(ends)
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    for key, name in names.items():
        if (value := values.get(f"general.sampling.{key}")) is not None:
            generation.do_sample = True
            setattr(generation, name, value)
