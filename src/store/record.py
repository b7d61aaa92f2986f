"""The format of a record: a safetensors file whose metadata is the record's header as JSON.

Anything that reads safetensors reads the tensors. The header says what the file is about (keys, cuts,
lineage, identity), which cells and running states the record consists of, which of them lie in other files,
and the checksum of each tensor. A checksum at a fixed place of the file's head covers the rest of the head.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import xxhash

from regrow.policy.directory import CutHash
from regrow.policy.keys import Keys
from regrow.store.files import Bytes

VERSION = 1
LENGTH_BYTES = 8
_SUM_AT = LENGTH_BYTES + len('{"__metadata__":{"sum":"')
_NO_SUM = b"0" * 32
MOST_HEAD = 1 << 28
RecordKind = Literal["chat", "root"]


class Broken(Exception):
    """A file is not what was written; the message names the part."""


class OtherVersion(Exception):
    """A file of a version of the format that is not read here."""


class _Version(msgspec.Struct, frozen=True):
    version: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Cells [start, stop) below the prefix hash `prefix`, or, where start is stop, the running state there.

    file: the file that holds its tensors; "" in a header means the file itself.
    """

    start: int
    stop: int
    prefix: bytes
    file: str = ""

    @property
    def label(self) -> str:
        """How names of its tensors begin."""
        return f"state.{self.stop}." if self.start == self.stop else f"cells.{self.start}-{self.stop}."


class Header(msgspec.Struct, frozen=True):
    """What a record says of itself.

    identity: of the model and its arithmetic (D3). namespace: that of the keys, a cache salt included.
    keys: int64, compressed. cuts: those of the read plan, up to the end. pure_length: keys below it were read
    by the plan (R5). spans: contiguous from 0 to the end. sums: of each tensor of this file, by its name.
    """

    version: int
    kind: RecordKind
    identity: str
    namespace: str
    keys: bytes
    cuts: tuple[CutHash, ...]
    pure_length: int
    last_start: int
    spans: tuple[Part, ...]
    states: tuple[Part, ...]
    sums: dict[str, str]

    @property
    def length(self) -> int:
        return self.spans[-1].stop

    @property
    def needs(self) -> frozenset[str]:
        """The other files that hold parts of it."""
        return frozenset(part.file for part in (*self.spans, *self.states)) - {""}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in memory: its name in the file, its safetensors dtype, and its bytes [nbytes]."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor in a file, its bytes from `offset` of the file on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def packed(keys: Keys) -> bytes:
    return zlib.compress(np.ascontiguousarray(keys, dtype="<i8").tobytes(), 1)


def unpacked(data: bytes) -> Keys:
    return np.frombuffer(zlib.decompress(data), dtype="<i8")


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def encode_head(header: Header, tensors: Sequence[Tensor | Region]) -> bytes:
    """Return a file's head: all of it but the bytes of the tensors, which follow in this order."""
    table: dict[str, object] = {
        "__metadata__": {"sum": _NO_SUM.decode(), "regrow": msgspec.json.encode(header).decode()}
    }
    end = 0
    for tensor in tensors:
        begin, end = end, end + nbytes_of(tensor)
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return head[:_SUM_AT] + checksum(head).encode() + head[_SUM_AT + len(_NO_SUM) :]


def decode_head(head: bytes, size: int) -> tuple[Header, Mapping[str, Region]]:
    """Return what a head says of a file of `size` bytes; raises Broken or OtherVersion."""
    said = head[_SUM_AT : _SUM_AT + len(_NO_SUM)]
    bare = head[:_SUM_AT] + _NO_SUM + head[_SUM_AT + len(_NO_SUM) :]
    if checksum(bare).encode() != said:
        raise Broken("head: its checksum is wrong")
    try:
        table = json.loads(head[LENGTH_BYTES:])
        told = table.pop("__metadata__")["regrow"]
        if msgspec.json.decode(told, type=_Version).version != VERSION:
            raise OtherVersion
        header = msgspec.json.decode(told, type=Header)
        regions = {
            name: Region(name, entry["dtype"], tuple(entry["shape"]), len(head) + begin, end - begin)
            for name, entry in table.items()
            for begin, end in [entry["data_offsets"]]
        }
    except (ValueError, KeyError, TypeError) as error:  # whatever wrote this, the checksum is right
        raise Broken(f"head: {error}") from None
    if len(head) + sum(region.nbytes for region in regions.values()) != size:
        raise Broken(f"size: {size} bytes are not what the head says")
    return header, regions


def nbytes_of(tensor: Tensor | Region) -> int:
    return tensor.nbytes if isinstance(tensor, Region) else tensor.data.nbytes
