"""What is in a cache directory, for a person: listed, checked and removed while no server has it."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from regrow.errors import BadConfig
from regrow.store.files import FileFacts, OsFiles
from regrow.store.record import Broken
from regrow.store.records import ASIDE, SUFFIX, Records

MIB = 1 << 20
HEADS = ("record", "what it is", "note")
Row = tuple[str, str, str]


class Listing:
    """Opens the directory; raises BadConfig where it is not there, or a process uses it. Files that are not
    what was written are set aside, as at the start of a server."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise BadConfig(f"--cache-dir: {directory} is no directory; give the one that was served with")
        self._records = Records(OsFiles(directory), None, 0, 0)
        self._records.open()

    def rows(self) -> Iterator[Row]:
        """Give every file: its kind, tokens, size, age since its last use, and whether it is used."""
        records, live = self._records, self._records.live()
        for name, facts in sorted(records.files.facts().items()):
            stored = records.find(name)
            if stored is not None:
                header = stored.header
                model = f"model {header.identity[:8]}"
                note = model if name in live else f"{model}; replaced, and parts of newer records"
                states = f"{len(header.states)} states, " if header.states else ""
                yield _short(name), f"{header.kind}, {header.length} tokens, {states}{_size(facts)}", note
            elif name.endswith(ASIDE):
                reason = records.broken.get(name.removesuffix(ASIDE), "set aside")
                yield _short(name), _size(facts), f"broken: {reason}"
            elif name in records.foreign:
                yield _short(name), _size(facts), "of another version of the format"

    def verify(self) -> Iterator[Row]:
        """Read every record and compare it with its checksums; gives those that are broken now, or were."""
        for name in self._records.stored:
            if self._records.find(name) is not None:
                try:
                    self._records.verify(name)
                except Broken as error:
                    yield _short(name), "broken", str(error)
        for name in self._records.files_aside:
            if name.removesuffix(ASIDE) not in self._records.broken:
                yield _short(name), "broken", "set aside before"

    def remove(self, names: Sequence[str]) -> int:
        """Remove these files and the records that need them; "all" names all, "broken" what was set aside.

        Raises BadConfig for a name that is not there; nothing was removed then.
        """
        records = self._records
        known = {_short(name): [name] for name in records.names}
        known |= {name: [name] for name in records.names}
        known |= {"all": records.names, "broken": records.files_aside}
        for name in names:
            if name not in known:
                raise BadConfig(f"cache rm: there is no record {name}")
        return records.remove({file for name in names for file in known[name]})

    def close(self) -> None:
        self._records.files.close()


def _short(name: str) -> str:
    return name.replace(SUFFIX, "")


def _size(facts: FileFacts) -> str:
    days = (time.time() - facts.used) / 86400
    return f"{facts.size / MIB:.1f} MiB, used {days:.1f} days ago"
