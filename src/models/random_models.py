"""Random models of real architectures, by name: `random:FAMILY[:SIZE]`. No file, no network.

A name always gives the same weights. The shapes are chosen so that tests can fail: head dim 64, three queries
a key head. The weights are scaled so that greedy text varies and every kind of state carries signal: unit
gain everywhere, decay rates and step sizes as in trained recurrences.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from regrow.errors import ModelRefused
from regrow.models.byte_tokenizer import END_OF_TEXT, IM_END

PREFIX = "random:"
CONTEXT = 32_768
_SHARP = 2.0  # gain of queries and of keys: flat attention averages the context away and greedy text loops

Size = Literal["tiny", "135m"]
_SIZES: dict[str, Size] = {"": "tiny", "tiny": "tiny", "135m": "135m"}


def parse_random(name: str) -> tuple[str, Size]:
    """Split `random:FAMILY[:SIZE]`; raises ModelRefused for an unknown family or size."""
    family, _, size = name.removeprefix(PREFIX).partition(":")
    if family not in FAMILIES:
        raise ModelRefused(f"no random model of family {family!r}; there are {', '.join(sorted(FAMILIES))}")
    if size not in _SIZES:
        raise ModelRefused(f"no random model of size {size!r}; there are tiny and 135m")
    return family, _SIZES[size]


def random_config(family: str, size: Size = "tiny") -> PreTrainedConfig:
    """Return the `transformers` configuration of a random model."""
    return FAMILIES[family](size)


def build_random(family: str, size: Size = "tiny", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the random causal language model of that name in `dtype`."""
    return random_model(random_config(family, size), dtype)


def random_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of `config` with random weights; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator)
    return model.eval()


def _fill(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    drawn = torch.empty_like(parameter, dtype=torch.float32)  # so that dtypes differ by rounding only
    if name.endswith("A_log"):  # decay rates from slow to fast
        parameter.copy_(drawn.uniform_(-3.0, 1.0, generator=generator))
    elif name.endswith("dt_bias"):  # softplus of it is the step: 0.05 to 0.5
        parameter.copy_(drawn.uniform_(-3.0, -0.5, generator=generator))
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        parameter.add_(_SHARP - 1.0)
    elif parameter.ndim >= 2:
        gain = _SHARP if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
        parameter.copy_(drawn.normal_(0.0, gain * parameter[0].numel() ** -0.5, generator=generator))


def _base(size: Size, tiny: Mapping[str, object], m135: Mapping[str, object]) -> dict[str, Any]:
    shape = tiny if size == "tiny" else m135
    return {
        "vocab_size": 512 if size == "tiny" else 49_152,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": END_OF_TEXT,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "tie_word_embeddings": False,
        **shape,
    }


_TINY = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
}
_M135 = {
    "hidden_size": 576,
    "num_hidden_layers": 22,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
}


def _llama(size: Size) -> PreTrainedConfig:
    return AutoConfig.for_model("llama", **_base(size, _TINY, _M135))


def _gemma3(size: Size) -> PreTrainedConfig:
    shape = _base(size, _TINY, _M135)
    return AutoConfig.for_model(
        "gemma3_text",
        **shape,
        query_pre_attn_scalar=64,
        sliding_window=48 if size == "tiny" else 512,
        layer_types=_every(shape, 2, "full_attention", "sliding_attention"),
    )


def _qwen3_5(size: Size) -> PreTrainedConfig:
    shape = _base(size, _TINY, {**_M135, "num_hidden_layers": 20})
    heads = 2 if size == "tiny" else 4
    return AutoConfig.for_model(
        "qwen3_5_text",
        **shape,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=heads,
        linear_num_value_heads=2 * heads,
        layer_types=_every(shape, 2 if size == "tiny" else 4, "full_attention", "linear_attention"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    )


def _falcon_h1(size: Size) -> PreTrainedConfig:
    shape = _base(size, _TINY, {**_M135, "num_hidden_layers": 16})
    heads = 4 if size == "tiny" else 12
    return AutoConfig.for_model(
        "falcon_h1",
        **shape,
        mamba_d_ssm=64 * heads,
        mamba_n_heads=heads,
        mamba_d_head=64,
        mamba_d_state=32 if size == "tiny" else 128,
        mamba_chunk_size=64,
    )


def _every(shape: Mapping[str, Any], n: int, kind: str, other: str) -> list[str]:
    """Return layer types: every n-th layer is of `kind`."""
    return [kind if i % n == n - 1 else other for i in range(shape["num_hidden_layers"])]


FAMILIES: dict[str, Callable[[Size], PreTrainedConfig]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "qwen3_5": _qwen3_5,
    "falcon_h1": _falcon_h1,
}
