"""Which linear layers a model calls, and which of them with the same input: found by running a few tokens."""

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

Named = tuple[str, nn.Linear]


class _Watched(nn.Linear):
    """A layer for the time of a few passes: notes its calls, and whether anybody takes its weight or bias
    without calling it."""

    own_name: str
    calls: list[tuple[str, torch.Tensor]]
    in_call: bool
    taken: bool

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and not self.in_call:
            self.taken = True
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.own_name, x))
        self.in_call = True
        try:
            return super().forward(x)
        finally:
            self.in_call = False


def called_layers(model: PreTrainedModel) -> list[list[Named]]:
    """Return the linear layers that a forward pass calls once, and whose weights the model's code never uses
    itself; those that are called in turn with one tensor and lie in one module stand together."""
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    calls: list[tuple[str, torch.Tensor]] = []  # the tensors are kept, so that identities stay apart
    for name, layer in layers.items():
        vars(layer).update(own_name=name, calls=calls, in_call=False, taken=False)
        layer.__class__ = _Watched
    past = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([[1, 2, 3]]), cache=past, use_cache=True)
        once = calls.copy()
        model(input_ids=torch.tensor([[4]]), cache=past, use_cache=True)
    taken = {name for name, layer in layers.items() if vars(layer)["taken"]}
    for layer in layers.values():
        layer.__class__ = nn.Linear
        for note in _Watched.__annotations__:
            del vars(layer)[note]
    groups: list[list[Named]] = []
    last: tuple[str, torch.Tensor] | None = None
    for name, x in once:
        if name in taken or sum(other == name for other, _ in once) > 1:
            last = None
            continue
        if last is None or last[1] is not x or _parent(last[0]) != _parent(name):
            groups.append([])
        groups[-1].append((name, layers[name]))
        last = (name, x)
    return groups


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
