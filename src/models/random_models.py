"""Random models of real architectures, by name: `random:FAMILY[:SIZE]`. No file, no network.

A name always gives the same weights. They are scaled so that greedy text varies and every kind of state
carries signal: unit gain everywhere, decay rates and step sizes as in trained recurrences.
"""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from regrow.errors import ModelRefused
from regrow.models.random_configs import FAMILIES, Size

PREFIX = "random:"
_SHARP = 2.0  # gain of queries and of keys: flat attention averages the context away and greedy text loops

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
    return FAMILIES[family].config(size)


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
        convolution = parameter.ndim == 3 and parameter.shape[1] == 1  # else the weights of all experts
        inputs = parameter[0].numel() if convolution else parameter.shape[-1]
        parameter.copy_(drawn.normal_(0.0, gain * inputs**-0.5, generator=generator))
