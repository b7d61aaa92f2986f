"""What published models would keep: bytes per token of cells, bytes per checkpoint of running state.

    python bench/geometry.py [MODEL ...]

The figures of bench/published.toml become a configuration, the configuration a model without contents, and
what its layers keep is found by running that (src/gpu/outline.py). Prints the table of docs/models.md.
"""

import argparse
import tomllib
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from regrow.gpu.outline import outline
from regrow.gpu.types import Geometry, StateSpec

PUBLISHED = tomllib.loads((Path(__file__).parent / "published.toml").read_text())
HEADER = """\
| model | family | KiB per token | MB per checkpoint | of it recurrent | convolution |
|---|---|--:|--:|--:|--:|"""


def published_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a model named in published.toml."""
    settings = dict(PUBLISHED[name])
    if "layer_types" in settings:
        types = cycle(settings["layer_types"])
        settings["layer_types"] = list(islice(types, settings["num_hidden_layers"]))
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def geometry_of(name: str) -> Geometry:
    """Return what the model keeps in bfloat16; a state that its code holds in float32 stays so."""
    return outline(published_config(name), torch.bfloat16)


def row(name: str) -> str:
    """Return the model's line of the table; MB are 10^6 bytes."""
    geometry = geometry_of(name)
    family = PUBLISHED[name]["model_type"].removesuffix("_text")
    token = f"{geometry.bytes_per_token / 1024:.1f}"
    recurrent, conv = ([s for s in geometry.states if s.kind == kind] for kind in ("recurrent", "conv"))
    cells = (name, family, token, _mb(geometry.states), _mb(recurrent), _mb(conv))
    return f"| {' | '.join(cells)} |"


def _mb(states: Iterable[StateSpec]) -> str:
    total = sum(state.nbytes for state in states)
    return f"{total / 1e6:.2f}" if total else "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What published models would keep.")
    parser.add_argument("models", nargs="*", default=list(PUBLISHED), help="names in bench/published.toml")
    print(HEADER)
    for name in parser.parse_args().models:
        print(row(name), flush=True)
