"""The one hook between loading a model and running it: its linear layers become fast ones.

Which layers are called, and which with the same input, is found by running a few tokens. A layer that the
model's code does not call (it uses the weight itself) stays as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from regrow.gpu.fast.linear import (
    FastLinear,
    PackedProduct,
    PlainProduct,
    Product,
    Shared,
    TorchPackedProduct,
)
from regrow.gpu.fast.native import library
from regrow.gpu.fast.packing import BLOCK, OUTPUTS, Bits, Codes, Quantized, quantize

Quant = Literal["none", "int8", "int4", "auto"]
_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the linear layers of a model became. packed: how many keep codes of so many bits; plain: how many
    are as they were but for their kernel; nbytes: of all of their weights."""

    packed: Mapping[Bits, int]
    plain: int
    nbytes: int

    def __str__(self) -> str:
        kinds = [f"{count} of {bits} bits" for bits, count in sorted(self.packed.items()) if count]
        return ", ".join([*kinds, *([f"{self.plain} as they are"] if self.plain else [])]) or "none"


def prepare(model: PreTrainedModel, quant: Quant, given: Mapping[str, Codes]) -> Prepared:
    """Replace the linear layers of `model` in place.

    given: weights that the model's file holds as codes, by layer. "auto" packs these alone, and loses
    nothing; "int4" and "int8" take them where they have as many bits, and round all others. On a GPU and in
    float16 only "none" and "auto" are served, which then change nothing.
    Raises ValueError for what is not served.
    """
    served = model.device.type == "cpu" and model.dtype in (torch.bfloat16, torch.float32)
    if not served:
        if quant in ("int8", "int4"):
            raise ValueError(f"{quant} weights are for a CPU in bfloat16 or float32, not for {model.dtype}")
        return Prepared({}, 0, 0)
    packed: dict[Bits, int] = {4: 0, 8: 0}
    plain = nbytes = 0
    head = model.get_output_embeddings()
    for group in _groups(model):
        for bits, members in _by_bits(group, quant, given, head).items():
            product = _product(
                [layer for _, layer in members], bits, [given.get(name) for name, _ in members]
            )
            if product is None:
                continue
            shared, start = Shared(product, len(members)), 0
            for name, layer in members:
                stop = start + layer.out_features
                model.set_submodule(name, FastLinear(shared, start, stop))
                start = stop
            nbytes += product.nbytes
            if bits is None:
                plain += len(members)
            else:
                packed[bits] += len(members)
    return Prepared(packed, plain, nbytes)


def _groups(model: PreTrainedModel) -> list[list[tuple[str, nn.Linear]]]:
    """Return the linear layers that a forward pass calls, once; those that are called in turn with one tensor
    and lie in one module stand together."""
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    calls: list[tuple[str, torch.Tensor]] = []  # the tensors are kept, so that identities stay apart

    def note(name: str) -> RemovableHandle:
        return layers[name].register_forward_pre_hook(lambda _, args: calls.append((name, args[0])))

    hooks = [note(name) for name in layers]
    with torch.inference_mode():
        model(input_ids=torch.arange(1, 1 + _TOKENS)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    groups: list[list[tuple[str, nn.Linear]]] = []
    last: tuple[str, torch.Tensor] | None = None
    for name, x in calls:
        if sum(other == name for other, _ in calls) == 1:
            kin = last is not None and last[1] is x and _parent(last[0]) == _parent(name)
            if not kin:
                groups.append([])
            groups[-1].append((name, layers[name]))
        last = (name, x)
    return groups


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _by_bits(
    group: Sequence[tuple[str, nn.Linear]], quant: Quant, given: Mapping[str, Codes], head: nn.Module | None
) -> dict[Bits | None, list[tuple[str, nn.Linear]]]:
    out: dict[Bits | None, list[tuple[str, nn.Linear]]] = {}
    for name, layer in group:
        bits: Bits | None = None
        if layer.in_features % BLOCK == 0 and layer.out_features >= OUTPUTS:
            if quant == "auto" and name in given and library() is not None:
                bits = given[name].bits
            elif quant in ("int8", "int4"):
                bits = 8 if quant == "int8" or layer is head else 4
        out.setdefault(bits, []).append((name, layer))
    return out


def _product(layers: Sequence[nn.Linear], bits: Bits | None, given: Sequence[Codes | None]) -> Product | None:
    """Return the product of all of `layers`; None where the layers are best left alone."""
    dtype = layers[0].weight.dtype
    bias = None
    if any(layer.bias is not None for layer in layers):
        zeros = (layer.weight.new_zeros(layer.out_features) for layer in layers)
        bias = torch.cat([z if m.bias is None else m.bias for m, z in zip(layers, zeros, strict=True)])
    if bits is None:
        if library() is None or dtype != torch.bfloat16:
            return None
        weights = [layer.weight for layer in layers]
        return NativeProduct.plain(weights[0] if len(weights) == 1 else torch.cat(weights), bias)
    parts = [
        codes if codes is not None and codes.bits == bits else quantize(layer.weight, bits)
        for layer, codes in zip(layers, given, strict=True)
    ]
    joined = Quantized(
        bits,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat([part.offset for part in parts]),
    )
    return NativeProduct.packed(joined, bias) if library() is not None else TorchPackedProduct(joined, bias)
