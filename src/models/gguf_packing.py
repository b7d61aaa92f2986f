"""The quantised blocks of a GGUF file as packed weights of the layers that were made from them.

Which rows of a tensor became which rows of a layer is transformers' knowledge (llama's queries and keys are
reordered, others are cut or joined). So it is found, not known: the rows of the layer are looked up among
those that the codes stand for. A layer that has other rows is not packed.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, quant_shape_to_byte_shape
from torch import nn
from transformers import PreTrainedModel

from regrow.models.gguf_header import GgufHeader, GgufTensor
from regrow.models.packed import BLOCK, PARTS, PackedWeight

_Q4_0, _Q4_1, _Q8_0 = 2, 3, 8  # ggml's numbers of these types
KINDS = (_Q4_0, _Q4_1, _Q8_0)


def packed_tensors(
    header: GgufHeader, model: PreTrainedModel, names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return what `packed.safetensors` holds of `model`, which was made from this file.

    names: GGUF tensor name -> parameter name.
    """
    made_from = {names[tensor.name]: tensor for tensor in header.tensors if tensor.name in names}
    out: dict[str, torch.Tensor] = {}
    for layer, weight, aliases in _linear_weights(model):
        tensor = next((made_from[name] for name in aliases if name in made_from), None)
        if tensor is None or tensor.kind not in KINDS or tensor.shape[-1] != weight.shape[1]:
            continue
        parts = _parts(header, tensor)
        rounded = _rounded(PackedWeight.of(*parts), tensor.kind, weight.dtype)
        order = next((found for rows in rounded if (found := _order(rows, weight)) is not None), None)
        if order is not None:
            for name, part in zip(PARTS, parts, strict=True):
                out[f"{layer}.{name}"] = part[order].contiguous()
    return out


def _linear_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor, list[str]]]:
    """Yield each linear layer with its weight and all names of that (a head is often the embedding)."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for layer, module in model.named_modules():
        if type(module) is nn.Linear:
            yield layer, module.weight.detach(), names[id(module.weight)]


def _parts(header: GgufHeader, tensor: GgufTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes as `PackedWeight.of` takes them, scale and offset, of a tensor [outputs, inputs]."""
    outputs, inputs = tensor.shape
    shape = quant_shape_to_byte_shape(tensor.shape, GGMLQuantizationType(tensor.kind))
    raw = np.memmap(header.path, np.uint8, "r", tensor.start, shape).reshape(outputs, inputs // BLOCK, -1)
    head = 4 if tensor.kind == _Q4_1 else 2
    codes = torch.from_numpy(raw[:, :, head:].reshape(outputs, -1))
    factors = torch.from_numpy(raw[:, :, :head].copy()).view(torch.float16)
    scale = factors[:, :, 0]
    if tensor.kind == _Q8_0:
        return codes ^ 128, scale, scale * -128  # int8 to uint8, 128 added
    return codes, scale, factors[:, :, 1] if tensor.kind == _Q4_1 else scale * -8


def _rounded(packed: PackedWeight, kind: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield what transformers' two readers make of the codes: one rounds at the end, one at every step."""
    yield packed.floats.to(dtype)
    zero = {_Q4_0: 8, _Q8_0: 128}.get(kind, 0)
    codes = packed.codes.view(*packed.scale.shape, BLOCK).to(torch.int16) - zero
    rows = packed.scale.to(dtype)[..., None] * codes
    yield (rows if zero else rows + packed.offset.to(dtype)[..., None]).flatten(1)


def _order(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | slice | None:
    """Return which of `rows` make `wanted`, bit for bit; None where some are not among them."""
    if torch.equal(rows, wanted):
        return slice(None)
    place = {row.tobytes(): i for i, row in enumerate(_bytes(rows))}
    order = [place.get(row.tobytes()) for row in _bytes(wanted)]
    known = [i for i in order if i is not None]
    return torch.tensor(known) if len(known) == len(order) else None


def _bytes(rows: torch.Tensor) -> npt.NDArray[np.uint8]:
    return (rows + 0).view(torch.uint8).numpy()  # -0.0 + 0 is 0.0: rows that are equal have equal bytes
