"""The one hook between loading a model and running it: its linear layers become fast ones, and its decoder
layers single calls where they have the common shape.

A layer whose weight the model's code uses itself stays as it is (`gpu/fast/called.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from regrow.config import Quant
from regrow.errors import BadConfig
from regrow.gpu.fast.called import Named, called_layers
from regrow.gpu.fast.delta import use_native_deltas
from regrow.gpu.fast.layer import use_native_layers
from regrow.gpu.fast.linear import FastLinear, Kin, NativeProduct, Product, Shared, TorchPackedProduct
from regrow.gpu.fast.native import library, state
from regrow.gpu.fast.packing import BLOCK, OUTPUTS, Bits, Codes, Quantized, quantize
from regrow.gpu.fast.parts import use_native_parts


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the linear layers of a model became. quant: "none" where nothing is packed. packed: how many keep
    codes of so many bits; plain: how many are as they were but for their kernel; left: how many are
    untouched; nbytes: of all of their weights; layers: how many decoder layers, or gated delta nets in them,
    are one native call in decode steps."""

    quant: Quant
    packed: Mapping[Bits, int]
    plain: int
    left: int
    nbytes: int
    layers: int

    def __str__(self) -> str:
        kinds = [f"{count} of {bits} bits" for bits, count in sorted(self.packed.items()) if count]
        same = self.plain + self.left
        return ", ".join([*kinds, *([f"{same} as they are"] if same else [])]) or "none"

    @property
    def identity(self) -> tuple[object, ...]:
        """What of it decides the bits of a computation (D3)."""
        return self.quant, sorted(self.packed.items()), self.plain, self.layers


def prepare(model: PreTrainedModel, quant: Quant, given: Mapping[str, Codes]) -> Prepared:
    """Replace the linear layers of `model` in place.

    given: weights that the model's file holds as codes, by layer. "auto" packs these alone, and loses
    nothing; "int4" and "int8" take them where they have as many bits, and round all others. On a GPU and in
    float16 only "none" and "auto" are served, which then change nothing.
    Raises BadConfig with the reason for what is not served.
    """
    rounding = quant in ("int8", "int4")
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float32):
        if rounding:
            on = f"{model.device.type} in {str(model.dtype).removeprefix('torch.')}"
            raise _refusal(quant, f"such weights are for a CPU in bfloat16 or float32, not for {on}")
        return Prepared("none", {}, 0, len(_linear(model)), _bytes(_linear(model)), 0)
    if rounding and library() is None and model.dtype != torch.bfloat16:
        raise _refusal(quant, f"in float32 such weights need the native kernels, which are {state()}")
    packed: dict[Bits, int] = {4: 0, 8: 0}
    plain = nbytes = 0
    head = model.get_output_embeddings()
    products: dict[str, Kin] = {}
    groups = called_layers(model)
    while groups:
        group = groups.pop(0)  # and with it, once it is replaced, its weights
        codes = {} if quant == "none" else {name: given[name] for name, _ in group if name in given}
        for bits, members in _by_bits(group, quant, codes, head).items():
            product = _product(
                [layer for _, layer in members], bits, [codes.get(name) for name, _ in members]
            )
            if product is None:
                continue
            shared, start = Shared(product, len(members)), 0
            for name, layer in members:
                if isinstance(product, NativeProduct):
                    products[name] = product, tuple(other for other, _ in members)
                stop = start + layer.out_features
                model.set_submodule(name, FastLinear(shared, start, stop))
                start = stop
            nbytes += product.nbytes
            if bits is None:
                plain += len(members)
            else:
                packed[bits] += len(members)
    if rounding and not any(packed.values()):
        raise _refusal(quant, "this model has no linear layer that can be packed")
    left = _linear(model)
    held: Quant = quant if any(packed.values()) else "none"
    if library() is not None:
        use_native_parts(model, products, model.dtype)
    layers = use_native_layers(model, products) + use_native_deltas(model, products, model.dtype)
    return Prepared(held, packed, plain, len(left), nbytes + _bytes(left), layers)


def _refusal(quant: Quant, why: str) -> BadConfig:
    return BadConfig(f"--quant {quant}: {why}; give none or auto")


def _linear(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear]


def _bytes(layers: Sequence[nn.Linear]) -> int:
    return sum(layer.weight.nbytes for layer in layers)


def _by_bits(
    group: Sequence[Named], quant: Quant, given: Mapping[str, Codes], head: nn.Module | None
) -> dict[Bits | None, list[Named]]:
    out: dict[Bits | None, list[Named]] = {}
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
