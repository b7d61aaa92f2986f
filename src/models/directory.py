"""Loading a Hugging Face directory: safetensors (one file or shards), config.json, a fast tokenizer.

What cannot be served is refused with the reason before the weights are read, where that can be known. Code
that comes with a model is never run.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from regrow.errors import ModelRefused
from regrow.models.quiet import quiet
from regrow.models.refusal import refuse_incomplete, refusing

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


def load_directory(
    path: Path, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return the model on `device` and its tokenizer; raises ModelRefused with the reason."""
    with quiet(), refusing(f"{path} cannot be loaded"):
        config, tokenizer = read_directory(path)
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            device_map={"": device} if device.type == "cuda" else None,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        refuse_incomplete(path, info["missing_keys"], info["mismatched_keys"])
        return model, tokenizer


def read_directory(path: Path) -> tuple[PreTrainedConfig, PreTrainedTokenizerFast]:
    """Return all but the weights, which are only looked at; raises ModelRefused with the reason."""
    with quiet(), refusing(f"{path} cannot be loaded"):
        config = _config(path)
        _check_weights(path)
        return config, _tokenizer(path)


def _config(path: Path) -> PreTrainedConfig:
    file = path / "config.json"
    if not file.exists():
        raise ModelRefused(f"{path} has no config.json")
    declared = json.loads(file.read_text())
    kind = declared.get("model_type")
    if kind not in CONFIG_MAPPING:
        own = ", and code that comes with a model is not run" if "auto_map" in declared else ""
        raise ModelRefused(f"{path} is of the unknown architecture {kind!r}{own}")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    classes = declared.get("architectures") or []
    if config.is_encoder_decoder:
        raise ModelRefused(
            f"{path} is an encoder-decoder model ({kind}); only causal language models are served"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or (
        classes and not any(name.endswith(_GENERATIVE) for name in classes)
    ):
        raise ModelRefused(f"{path} is no causal language model, but {', '.join(classes) or kind}")
    return config


def _check_weights(path: Path) -> None:
    """Refuse missing, truncated or damaged weight files, by name."""
    if (path / INDEX).exists():
        files = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
    else:
        files = [SINGLE]
    for name in files:
        if not (path / name).exists():
            others = sorted(file.name for file in path.glob("*.bin"))
            instead = f"; {others[0]} is not used, since such files can run code" if others else ""
            raise ModelRefused(f"{path} has no {name}{instead}")
        with refusing(f"{path / name} is damaged"), safe_open(path / name, "pt"):
            pass


def _tokenizer(path: Path) -> PreTrainedTokenizerFast:
    if not any((path / name).exists() for name in _TOKENIZERS):
        raise ModelRefused(f"{path} has no tokenizer (tokenizer.json)")
    with refusing(f"the tokenizer of {path} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not tokenizer.is_fast:
        raise ModelRefused(f"the tokenizer of {path} has no fast form (tokenizer.json)")
    return tokenizer
