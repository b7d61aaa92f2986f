"""The records on disk: an index of their heads, and writing, reading and removing them (D1, D2, D4, D5).

A record is one file; parts of it that another file has already (a system prompt's root, the turns before)
are named, not written again. Files never change: a newer record of a conversation is written beside the
older one, which is unlinked once nothing names it. What cannot be used is renamed aside; what belongs to
another model or another arithmetic stays as it is. All of this runs on one thread.
"""

import errno
import itertools
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import structlog

from regrow.policy.directory import CutHash
from regrow.policy.keys import Keys
from regrow.store.files import FileFacts, Files
from regrow.store.record import (
    LENGTH_BYTES,
    MOST_HEAD,
    VERSION,
    Broken,
    Header,
    OtherVersion,
    Part,
    RecordKind,
    Region,
    Tensor,
    checksum,
    decode_head,
    encode_head,
    nbytes_of,
    packed,
)

log = structlog.get_logger(__name__)
SUFFIX, UNFINISHED, ASIDE = ".safetensors", ".part", ".broken"
NAME = re.compile(r"(\d{10})-(chat|root)-[0-9a-f]{16}\.safetensors")
NOT_THE_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR})  # errors of the process
PIECE = 16 << 20  # bytes written at once
MOST_FILES = 6  # a record with parts in more files is written whole, so that old states do not pile up
PartKey = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to be written. spans: (start, stop, prefix hash at stop), contiguous from 0. states:
    (position, prefix hash). tensors: those of the parts that may not be on disk yet, by the part's key."""

    kind: RecordKind
    namespace: str
    keys: Keys
    cuts: tuple[CutHash, ...]
    pure_length: int
    last_start: int
    spans: tuple[PartKey, ...]
    states: tuple[CutHash, ...]
    tensors: Mapping[PartKey, Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A record on disk; every part of its header names its file, and the sums stay there. size: bytes of its
    own file."""

    name: str
    header: Header
    size: int


class NoRoom(Exception):
    """The record does not fit; the message says why."""


class Records:
    """identity: of the model that is served (D3); None means any, to look at what is there.

    budget: bytes of all files here. floor: bytes that stay free on the file system. Methods raise OSError
    where the disk does.
    """

    def __init__(self, files: Files, identity: str | None, budget: int, floor: int) -> None:
        self.files = files
        self.budget, self.floor = budget, floor
        self.broken: dict[str, str] = {}
        self.foreign: set[str] = set()
        self._identity = identity
        self._facts: dict[str, FileFacts] = {}
        self._stored: dict[str, Stored] = {}
        self._needs: dict[str, frozenset[str]] = {}
        self._owners: dict[PartKey, list[str]] = {}
        self._by_cut: dict[CutHash, set[str]] = {}
        self._numbers = itertools.count(1)

    @property
    def used(self) -> int:
        """Bytes of all files, those included that are not used."""
        return sum(facts.size for facts in self._facts.values())

    @property
    def names(self) -> list[str]:
        """All files, those included that are not used."""
        return list(self._facts)

    def used_at(self, name: str) -> float:
        """Return when a file was last written or read, in seconds since 1970."""
        return self._facts[name].used

    def find(self, name: str) -> Stored | None:
        """Return what a file that can be read holds."""
        return self._stored.get(name)

    @property
    def files_aside(self) -> list[str]:
        return [name for name in self._facts if name.endswith(ASIDE)]

    def open(self) -> None:
        """Read the head of every record. What a kill left unfinished goes, what is broken is set aside."""
        for name, facts in sorted(self.files.facts().items()):
            if name.endswith(SUFFIX + UNFINISHED):
                with suppress(OSError):  # a directory that cannot be written is read all the same
                    self.files.unlink(name)
            elif NAME.fullmatch(name):
                self._facts[name] = facts
                self._open(name)
            elif name.endswith(SUFFIX + ASIDE):
                self._facts[name] = facts
        last = max((int(found[1]) for name in self._facts if (found := NAME.match(name))), default=0)
        self._numbers = itertools.count(last + 1)
        for name in list(self._stored):
            self._check_needs(name)
        self._remove_unneeded()

    def live(self) -> dict[str, Stored]:
        """Return the records that can be used, oldest first: not those that a longer one of the same
        conversation has replaced, and that are only parts of it now."""
        return {name: stored for name, stored in self._stored.items() if not self._replaced(stored)}

    @property
    def stored(self) -> tuple[str, ...]:
        """The files of this identity, parts of others included."""
        return tuple(self._stored)

    def is_named(self, name: str) -> bool:
        """Say whether a record has parts in this file."""
        return name in self._named()

    def has(self, part: PartKey) -> bool:
        """Say whether the tensors of a part are on disk."""
        return part in self._owners

    def write(self, new: NewRecord) -> Generator[None, None, None]:
        """Write a record, piece by piece: each `next` goes on by about `PIECE` bytes. It is a match once this
        has ended (D4). Raises NoRoom, or Broken where a part that it names has been lost meanwhile."""
        taken = self._taken(new)
        spans = tuple(Part(*key, taken.get(key, "")) for key in new.spans)
        states = tuple(Part(p, p, prefix, taken.get((p, p, prefix), "")) for p, prefix in new.states)
        own = [part for part in (*spans, *states) if not part.file]
        sources = [source for part in own for source in self._sources(part, new.tensors)]
        header = Header(
            version=VERSION,
            kind=new.kind,
            identity=self._identity or "",
            namespace=new.namespace,
            keys=packed(new.keys),
            cuts=new.cuts,
            pure_length=new.pure_length,
            last_start=new.last_start,
            spans=spans,
            states=states,
            sums={tensor.name: total for tensor, _, total in sources},
        )
        head = encode_head(header, [tensor for tensor, _, _ in sources])
        size = len(head) + sum(nbytes_of(tensor) for tensor, _, _ in sources)
        copied = {file for _, file, _ in sources} - {""}
        self._make_room(size, copied | header.needs)
        name = f"{next(self._numbers):010}-{new.kind}-{new.cuts[-1][1].hex()[:16]}{SUFFIX}"
        try:
            yield from self._written(name + UNFINISHED, head, sources)
            if lost := [file for file in header.needs if file not in self._stored]:
                raise Broken(f"{lost[0]}: it is not there any more")
            self.files.rename(name + UNFINISHED, name)
            self.files.sync()
        except (OSError, Broken, GeneratorExit):
            with suppress(OSError):
                self.files.unlink(name + UNFINISHED)
            raise
        self._facts[name] = self.files.facts()[name]
        self._add(name, header, size)
        self._remove_unneeded()

    def read(self, name: str, parts: Iterable[PartKey]) -> dict[PartKey, list[Tensor]]:
        """Return the tensors of some parts of a record, every one of them checked (S5).

        Raises Broken, and sets aside what is, with all that names it; OSError where it is not the file.
        """
        stored = self._stored.get(name)
        if stored is None:
            raise Broken(f"{name}: it is not there any more")
        of = {_key(part): part.file for part in (*stored.header.spans, *stored.header.states)}
        by_file: dict[str, list[PartKey]] = {}
        for key in parts:
            by_file.setdefault(of[key], []).append(key)
        read: dict[PartKey, list[Tensor]] = {}
        for file, keys in by_file.items():
            try:
                header, regions = self._head(file)
                for key in keys:
                    label = Part(*key).label
                    own = [region for region in regions.values() if region.name.startswith(label)]
                    read[key] = [self._tensor(file, region, header.sums[region.name]) for region in own]
            except (Broken, OtherVersion, KeyError, OSError) as error:
                if isinstance(error, OSError) and error.errno in NOT_THE_FILES:
                    raise
                self.set_aside(file, str(error))
                raise Broken(str(error) if file == name else f"{file}: {error}") from None
        with suppress(OSError):
            for file in {name, *by_file}:
                self.files.touch(file)
            self._facts.update((n, f) for n, f in self.files.facts().items() if n in self._facts)
        return read

    def verify(self, name: str) -> None:
        """Read all that is in a record's own file; raises Broken as `read` does."""
        stored = self._stored[name]
        parts = (*stored.header.spans, *stored.header.states)
        self.read(name, [_key(part) for part in parts if part.file == name])

    def set_aside(self, name: str, reason: str) -> None:
        """Rename a file that cannot be used, and those that name it; they are never read again."""
        log.warning("record set aside", record=name, reason=reason)
        self._forget(name)
        self.broken[name] = reason
        facts = self._facts.pop(name)
        with suppress(OSError):  # it is out of the index, and at the next start it is broken again
            self.files.rename(name, name + ASIDE)
            self._facts[name + ASIDE] = facts
            self.files.sync()
        for other in [other for other, needs in self._needs.items() if name in needs]:
            if other in self._stored:
                self.set_aside(other, f"{name}, which it needs, was set aside")

    def remove(self, names: Collection[str]) -> int:
        """Remove these files and the records that name them; return how many went."""
        doomed = set(names) & self._facts.keys()
        while more := {n for n, needs in self._needs.items() if n not in doomed and needs & doomed}:
            doomed |= more
        ordered = sorted(doomed, key=lambda n: len(self._needs.get(n, ())), reverse=True)
        for name in ordered:  # from now on nobody finds them, whatever the disk says
            self._forget(name)
        for name in ordered:
            self._unlink(name)
        self._remove_unneeded()
        return len(doomed)

    def purge(self, prefixes: frozenset[bytes]) -> int:
        """Remove every record that shares one of these cuts."""
        sharing = [n for n, s in self._stored.items() if any(p in prefixes for _, p in s.header.cuts)]
        return self.remove(sharing)

    def _taken(self, new: NewRecord) -> dict[PartKey, str]:
        """Return the files that have parts of this already, by part; none but roots where they are many."""
        keys = (*new.spans, *((p, p, prefix) for p, prefix in new.states))
        taken = {key: self._owners[key][-1] for key in keys if key in self._owners}
        roots = {name for name, stored in self._stored.items() if stored.header.kind == "root"}
        if len({*taken.values()} - roots) <= MOST_FILES:
            return taken
        return {key: file for key, file in taken.items() if file in roots}

    def _sources(
        self, part: Part, tensors: Mapping[PartKey, Sequence[Tensor]]
    ) -> Iterator[tuple[Tensor | Region, str, str]]:
        """Give the tensors of a part, each with the file it is copied from ("": it is in memory) and its
        checksum."""
        if _key(part) in tensors:
            for tensor in tensors[_key(part)]:
                named = replace(tensor, name=part.label + tensor.name)
                yield named, "", checksum(tensor.data.data)
            return
        if _key(part) not in self._owners:
            raise Broken(f"{part.label}: it is not there any more")
        file = self._owners[_key(part)][-1]
        header, regions = self._head(file)
        for region in regions.values():
            if region.name.startswith(part.label):
                yield region, file, header.sums[region.name]

    def _written(
        self, name: str, head: bytes, sources: Iterable[tuple[Tensor | Region, str, str]]
    ) -> Iterator[None]:
        """Write a file's bytes and sync them as they come, so that the last sync is a short one."""
        output = self.files.create(name)
        try:
            output.write(head)
            unsynced = len(head)
            for tensor, file, total in sources:
                whole = self._tensor(file, tensor, total) if isinstance(tensor, Region) else tensor
                for start in range(0, whole.data.nbytes, PIECE):
                    piece = whole.data[start : start + PIECE]
                    output.write(piece.data)
                    unsynced += piece.nbytes
                    if unsynced >= PIECE:
                        output.sync()
                        unsynced = 0
                        yield
            output.sync()
        finally:
            output.close()

    def _head(self, name: str) -> tuple[Header, Mapping[str, Region]]:
        size = self._facts[name].size
        begin = np.empty(LENGTH_BYTES, dtype=np.uint8)
        length = int.from_bytes(begin, "little") if self.files.read(name, 0, begin) == len(begin) else -1
        if not 0 <= length <= min(size - LENGTH_BYTES, MOST_HEAD):
            raise Broken("head: its length is wrong")
        head = np.empty(LENGTH_BYTES + length, dtype=np.uint8)
        if self.files.read(name, 0, head) < len(head):
            raise Broken("head: it is cut short")
        return decode_head(head.tobytes(), size)

    def _tensor(self, name: str, region: Region, total: str) -> Tensor:
        data = np.empty(region.nbytes, dtype=np.uint8)
        if self.files.read(name, region.offset, data) < region.nbytes:
            raise Broken(f"{region.name}: it is cut short")
        if checksum(data.data) != total:
            raise Broken(f"{region.name}: its checksum is wrong")
        return Tensor(region.name.split(".", 2)[2], region.dtype, region.shape, data)

    def _open(self, name: str) -> None:
        try:
            header, _ = self._head(name)
        except OtherVersion:
            self.foreign.add(name)
        except (Broken, OSError) as error:
            if isinstance(error, OSError) and error.errno in NOT_THE_FILES:
                raise
            self.set_aside(name, str(error))
        else:
            if self._identity in (None, header.identity):
                self._add(name, header, self._facts[name].size)
            else:
                self.foreign.add(name)
                self._needs[name] = header.needs

    def _add(self, name: str, header: Header, size: int) -> None:
        self._needs[name] = header.needs
        spans = tuple(msgspec.structs.replace(part, file=part.file or name) for part in header.spans)
        states = tuple(msgspec.structs.replace(part, file=part.file or name) for part in header.states)
        header = msgspec.structs.replace(header, spans=spans, states=states, sums={})
        self._stored[name] = Stored(name, header, size)
        for cut in header.cuts:
            self._by_cut.setdefault(cut, set()).add(name)
        for part in (*spans, *states):
            if part.file == name:
                self._owners.setdefault(_key(part), []).append(name)

    def _forget(self, name: str) -> None:
        stored = self._stored.pop(name, None)
        self._needs.pop(name, None)
        self.foreign.discard(name)
        for cut in stored.header.cuts if stored else ():
            self._by_cut[cut].discard(name)
            if not self._by_cut[cut]:
                del self._by_cut[cut]
        for part in (*stored.header.spans, *stored.header.states) if stored else ():
            if part.file == name:
                self._owners[_key(part)].remove(name)
                if not self._owners[_key(part)]:
                    del self._owners[_key(part)]

    def _check_needs(self, name: str) -> None:
        for needed in self._needs.get(name, ()):
            if needed not in self._stored and name in self._stored:
                self.set_aside(name, f"{needed}, which it needs, is not there")

    def _replaced(self, stored: Stored) -> bool:
        """Say whether another record begins with all of this one, and is newer or has all its states (K1)."""
        header, name = stored.header, stored.name
        states = {part.prefix for part in header.states}
        others = [self._stored[other] for other in self._by_cut[header.cuts[-1]] if other != name]
        return any(
            other.name > name
            or (other.header.length > header.length and states <= {p.prefix for p in other.header.states})
            for other in others
            if other.header.kind == header.kind
            and (header.kind == "chat" or other.header.length == header.length)
        )

    def _remove_unneeded(self) -> None:
        """Unlink what was replaced and is named by nobody."""
        while unneeded := self._stored.keys() - self._named() - self.live().keys():
            for name in sorted(unneeded):
                self._unlink(name)

    def _named(self) -> set[str]:
        return set[str]().union(*self._needs.values())

    def _make_room(self, size: int, wanted: Collection[str]) -> None:
        """Unlink what is aside, then what was used longest ago and is named by nobody, until `size` bytes
        fit; nothing where that cannot be (B2)."""
        spared = self._all_needed(wanted)
        going = {name: facts.size for name, facts in self._facts.items() if name not in spared}
        missing = self._missing(size)
        if missing > sum(going.values()):
            raise NoRoom(
                f"{size} bytes do not fit: {self.used} of {self.budget} are used, "
                f"{self.files.free()} are free on the disk and {self.floor} of them stay free"
            )
        while self._missing(size) > 0:
            free = going.keys() & self._facts.keys() - self._named()
            self._unlink(min(free, key=lambda n: (not n.endswith(ASIDE), self._facts[n].used, n)))

    def _missing(self, size: int) -> int:
        return max(self.used + size - self.budget, self.floor + size - self.files.free())

    def _all_needed(self, names: Collection[str]) -> set[str]:
        """Return these files and all that they name."""
        found = set(names)
        for name in names:
            found |= self._all_needed(self._needs.get(name, frozenset()))
        return found

    def _unlink(self, name: str) -> None:
        """Remove a file for good before another goes: whenever the power fails, what is named is there."""
        self.files.unlink(name)
        self.files.sync()
        self._facts.pop(name)
        self._forget(name)


def _key(part: Part) -> PartKey:
    return part.start, part.stop, part.prefix
