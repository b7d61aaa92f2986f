"""Weights that a model's file holds as codes of 4 or 8 bits, kept beside what was made of them.

`packed.safetensors` in a model's directory has, for each such layer, three tensors: codes (two of 4 bits to a
byte: of each 32 inputs, input i in the low half of byte i, input 16 + i in its high half), scale and offset
(float16, for each 32 inputs). A weight is scale * code + offset.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open

from regrow.models.identity import file_digest

FILE = "packed.safetensors"
PARTS = ("codes", "scale", "offset")
BLOCK = 32  # inputs that share a scale


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs]. codes: uint8 [outputs, inputs]; scale, offset: float16
    [outputs, inputs / 32]."""

    bits: Literal[4, 8]
    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, stored: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> "PackedWeight":
        """Return the weight whose codes are `stored` as the file has them."""
        outputs, blocks = scale.shape
        if stored.shape[1] == blocks * BLOCK:
            return cls(8, stored, scale, offset)
        halves = stored.view(outputs, blocks, BLOCK // 2)
        codes = torch.stack((halves & 15, halves >> 4), dim=2)
        return cls(4, codes.view(outputs, -1), scale, offset)

    @property
    def floats(self) -> torch.Tensor:
        """What the codes stand for, float32 [outputs, inputs]."""
        codes = self.codes.view(*self.scale.shape, BLOCK).float()
        return codes.mul_(self.scale.float()[..., None]).add_(self.offset.float()[..., None]).flatten(1)


class PackedWeights(Mapping[str, PackedWeight]):
    """The packed weights of a model's directory by the name of their layer, read when they are asked for;
    none where it has no such file."""

    def __init__(self, directory: Path | None) -> None:
        path = None if directory is None else directory / FILE
        self._path = path if path is not None and path.exists() else None
        self._file = None if self._path is None else cast(Any, safe_open(self._path, "pt"))
        keys = [] if self._file is None else self._file.keys()
        self._names = dict.fromkeys(sorted(k.removesuffix(".codes") for k in keys if k.endswith(".codes")))

    def __getitem__(self, name: str) -> PackedWeight:
        if self._file is None or name not in self._names:
            raise KeyError(name)
        return PackedWeight.of(*(self._file.get_tensor(f"{name}.{part}") for part in PARTS))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def counts(self) -> dict[int, int]:
        """Return how many layers have codes of so many bits, without reading them."""
        if self._file is None:
            return {}
        shapes = [[self._file.get_slice(f"{n}.{part}").get_shape() for part in PARTS[:2]] for n in self]
        return dict(
            sorted(Counter(8 if codes[1] == scale[1] * BLOCK else 4 for codes, scale in shapes).items())
        )

    @cached_property
    def digest(self) -> str:
        """A hash (hex) of what the file holds."""
        return "" if self._path is None else file_digest(self._path)
