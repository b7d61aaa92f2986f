"""The header of a GGUF file: its metadata and where each tensor lies, checked against the size of the file.

Read in one pass over the mapped file: of the long tables (vocabulary, merges) only the extent is noted. So a
damaged, truncated or foreign file is refused before anything else looks at it.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quant_shape_to_byte_shape
from gguf.quants import dequantize

from regrow.errors import ModelRefused

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_F32, _F16, _BF16 = 0, 1, 30
Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape as torch has it. kind: ggml's type number. start, size: its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says of itself. values: metadata but for arrays. spans: the bytes [a, b) of each entry."""

    path: Path
    version: int
    values: dict[str, Scalar]
    spans: dict[str, tuple[int, int]]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.values["general.architecture"])

    @property
    def stored_dtype(self) -> str:
        """The torch dtype that loses nothing worth keeping: the file's own float type, or bfloat16 for
        quantised blocks, whose rounding (1 part in 512) is below their own quantisation error."""
        kinds = {tensor.kind for tensor in self.tensors}
        if kinds == {_F32}:
            return "float32"
        return "float16" if kinds <= {_F32, _F16} else "bfloat16"

    def floats(self, tensor: GgufTensor) -> npt.NDArray[np.float32]:
        """Return the dequantised values of `tensor`, float32 [*shape]."""
        kind = GGMLQuantizationType(tensor.kind)
        shape = quant_shape_to_byte_shape(tensor.shape, kind)
        raw = np.asarray(np.memmap(self.path, np.uint8, "r", tensor.start, shape))
        values: npt.NDArray[np.float32] = dequantize(raw, kind)
        return values

    def skeleton(self, longest: int = 4096) -> bytes:
        """Return a GGUF file with the same short metadata and tensor names, but no tables and no weights."""
        with self.path.open("rb") as file:
            blob = file.read(max(stop for _, stop in self.spans.values()))
        entries = [blob[a:b] for a, b in self.spans.values() if b - a <= longest]
        names = [tensor.name.encode() for tensor in self.tensors]
        infos = [struct.pack("<Q", len(n)) + n + struct.pack("<IQIQ", 1, 1, _F32, 0) for n in names]
        head = MAGIC + struct.pack("<IQQ", self.version, len(names), len(entries))
        return b"".join([head, *entries, *infos, bytes(4096)])


def read_header(path: Path) -> GgufHeader:
    """Read the header of `path`; raises ModelRefused with the file and the cause."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except (struct.error, EOFError, OverflowError):
        cause = "the file ends inside its header"
    except UnicodeDecodeError:
        cause = "a name in its header is not text"
    except (ValueError, OSError) as error:
        cause = str(error)
    raise ModelRefused(f"{path} is damaged, truncated or no GGUF file: {cause}")


class _Parser:
    """Walks over the header once."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not start with GGUF")
        version, tensors, entries = self._unpack("<IQQ")
        if version not in VERSIONS:
            raise ValueError(f"it is of GGUF version {version}, known are {VERSIONS}")
        values: dict[str, Scalar] = {}
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(entries):
            start = self._at
            key = self._string()
            value = self._value(self._unpack("<I")[0])
            if value is not None:
                values[key] = value
            spans[key] = (start, self._at)
        if not isinstance(values.get("general.architecture"), str):
            raise ValueError("it names no architecture")
        table = [self._tensor_info() for _ in range(tensors)]
        align = int(values.get("general.alignment", 32))
        if align <= 0:
            raise ValueError(f"its alignment is {align}")
        base = -(-self._at // align) * align
        placed = tuple(self._place(base, *info) for info in table)
        return GgufHeader(self._path, version, values, spans, placed)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (rank,) = self._unpack("<I")
        dims = self._unpack(f"<{min(rank, 8)}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(dims)), kind, offset

    def _place(self, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        nbytes = prod(shape) // block * size
        if base + offset + nbytes > len(self._data):
            raise ValueError(
                f"tensor {name} ends at byte {base + offset + nbytes}, the file at {len(self._data)}"
            )
        return GgufTensor(name, shape, kind, base + offset, nbytes)

    def _value(self, kind: int) -> Scalar | None:
        """Read a scalar, or step over an array and return None."""
        if kind in _SCALARS:
            scalar: Scalar = self._unpack("<" + _SCALARS[kind])[0]
            return scalar
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"its metadata has a value of the unknown kind {kind}")
        element, count = self._unpack("<IQ")
        if element in _SCALARS:
            self._at += count * struct.calcsize("<" + _SCALARS[element])
        elif element == _STRING:
            for _ in range(count):
                (length,) = self._unpack("<Q")
                self._at += length
        else:
            raise ValueError(f"its metadata has an array of the unknown kind {element}")
        return None

    def _string(self) -> str:
        return self._bytes(self._unpack("<Q")[0]).decode()

    def _bytes(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) < count:
            raise EOFError
        self._at += count
        return piece

    def _unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values
