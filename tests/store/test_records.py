"""What was written comes back as it was, or not at all (D1, D2, D4, D5); equal parts are there once; budget
and floor hold."""

import errno
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from regrow.policy.keys import Namespace
from regrow.store import records as module
from regrow.store.files import OsFiles
from regrow.store.record import LENGTH_BYTES, Broken, Tensor, decode_head, unpacked
from regrow.store.records import ASIDE, MOST_FILES, UNFINISHED, NewRecord, NoRoom, Records
from tests.store.disk import PowerCut, SimulatedDisk
from tests.store.talks import IDENTITY, ROOT, ends, is_true, parts_of, talk, write

LARGE = 1 << 30


def opened(disk: SimulatedDisk, identity: str = IDENTITY, budget: int = LARGE, floor: int = 0) -> Records:
    records = Records(disk, identity, budget, floor)
    records.open()
    return records


def end(new: NewRecord) -> tuple[int, bytes]:
    return new.cuts[-1]


def test_what_was_written_comes_back_after_a_restart_byte_for_byte() -> None:
    disk = SimulatedDisk()
    new = talk(7, (1, 2))
    write(opened(disk), new)
    records = opened(disk)
    [stored] = records.live().values()
    header = stored.header
    assert np.array_equal(unpacked(header.keys), new.keys)
    assert (header.cuts, header.namespace, header.identity) == (new.cuts, new.namespace, IDENTITY)
    assert (header.pure_length, header.last_start, header.length) == (128, 128, 128)
    assert is_true(records, stored)
    assert records.used == len(disk.names[stored.name].data) == stored.size


def test_a_record_is_a_safetensors_file_that_others_can_read(tmp_path: Path) -> None:
    records = Records(OsFiles(tmp_path), IDENTITY, LARGE, 0)
    new = replace(talk(1), tensors={})
    tensor = Tensor("L0.k", "I64", (2, 3), np.arange(6, dtype=np.int64).view(np.uint8))
    write(records, replace(new, states=(), tensors={new.spans[0]: [tensor]}))
    [path] = tmp_path.glob("*.safetensors")
    assert load_file(path)[f"cells.0-{ROOT}.L0.k"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_parts_that_are_on_disk_already_are_named_and_not_written_again() -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    write(records, talk(7))
    for turn in range(4):
        write(records, talk(7, (turn,)))
    root, *chats = records.live().values()
    assert root.header.kind == "root"
    assert all({part.file for part in chat.header.spans} == {root.name, chat.name} for chat in chats)
    whole = SimulatedDisk()
    write(opened(whole), talk(7, (0,)))
    assert all(chat.size < 0.7 * whole.facts()[next(iter(whole.names))].size for chat in chats)
    again = opened(disk)
    assert all(is_true(again, stored) for stored in again.live().values())


def test_of_a_conversation_only_what_is_new_need_be_in_memory_and_old_states_do_not_pile_up() -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    turns = tuple(range(4 * MOST_FILES))
    for n in range(1, len(turns) + 1):
        new = talk(7, turns[:n])
        missing = {key: tensors for key, tensors in new.tensors.items() if not records.has(key)}
        assert len(missing) == (2 if n > 1 else 4)
        write(records, replace(new, tensors=missing))
        assert ends(records) == {end(new)}
        assert len(disk.names) <= MOST_FILES + 1
    again = opened(disk)
    [stored] = again.live().values()
    assert is_true(again, stored)


def test_d4_a_record_is_no_match_before_it_is_written_and_one_that_is_given_up_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    monkeypatch.setattr(module, "PIECE", 1 << 10)
    writing = records.write(talk(7, range(200)))
    next(writing)
    assert records.live() == {}
    assert [name for name in disk.names if not name.endswith(UNFINISHED)] == []
    writing.close()
    assert disk.names == {}


SEQUENCE = (talk(7), talk(7, (1,)), talk(7, (1, 2)), talk(8, (5, 6)), talk(7, (3,)), talk(7, (1, 2, 4)))


def live(disk: SimulatedDisk, done: list[NewRecord]) -> None:
    """Two conversations under one root and one under another, the first one going on; then one is removed."""
    records = opened(disk)
    for new in SEQUENCE:
        missing = {key: tensors for key, tensors in new.tensors.items() if not records.has(key)}
        write(records, replace(new, tensors=missing))
        done.append(new)
    done.pop(4)
    records.purge(frozenset({end(SEQUENCE[4])[1]}))


def operations() -> int:
    disk = SimulatedDisk()
    live(disk, [])
    return disk.operations


@pytest.mark.parametrize("seed", range(12))
def test_d1_power_cut_at_any_operation_never_half_a_record_and_no_older_one_lost(seed: int) -> None:
    for operation in range(operations()):
        disk, done = SimulatedDisk(), list[NewRecord]()
        disk.ends_at = operation
        with pytest.raises(PowerCut):
            live(disk, done)
        found = disk.power_cut(random.Random(seed * 1000 + operation))
        again = opened(found)
        assert not again.broken
        assert not [name for name in found.names if name.endswith((UNFINISHED, ASIDE))]
        assert all(is_true(again, stored) for stored in again.live().values())
        there = {cut for stored in again.live().values() for cut in stored.header.cuts}
        assert {end(new) for new in done} <= there
        write(again, talk(7, (1, 2, 9)))
        assert end(talk(7, (1, 2, 9))) in ends(opened(found))


def test_a_disk_that_did_not_sync_would_be_found_out() -> None:
    """The power cuts above find what they are there to find."""

    class Careless(SimulatedDisk):
        def sync(self) -> None:
            """Forgotten."""

    lost = 0
    for seed in range(20):
        disk, done = Careless(), list[NewRecord]()
        live(disk, done)
        again = opened(disk.power_cut(random.Random(seed)))
        lost += len(again.live()) < len(done) - 1
    assert lost


def test_d2_every_region_of_a_record_flipped_in_turn_is_set_aside_named_and_not_used() -> None:
    disk = SimulatedDisk()
    write(opened(disk), talk(7, (1,)))
    write(opened(disk), talk(8, (1,)))
    name, other = sorted(disk.names)
    data = bytes(disk.names[name].data)
    length = int.from_bytes(data[:LENGTH_BYTES], "little") + LENGTH_BYTES
    _, regions = decode_head(data[:length], len(data))
    assert len(regions) == 6
    flips = {f"length {i}": i for i in range(LENGTH_BYTES)}
    flips |= {f"head {i}": i for i in range(LENGTH_BYTES, length, 7)}
    flips |= {r.name: r.offset + at for r in regions.values() for at in (0, r.nbytes // 2, r.nbytes - 1)}
    for region, at in flips.items():
        disk.names[name].data[at] ^= 1 << (at % 8)
        records = opened(disk)
        if not records.broken:  # then it is in a tensor, which is read when it is used
            assert region in regions
            with pytest.raises(Broken, match=region.replace(".", r"\.")):
                is_true(records, records.live()[name])
        assert set(records.broken) == {name}
        assert ("head" in records.broken[name]) == (region not in regions)
        assert set(records.live()) == {other}
        assert is_true(records, records.live()[other])
        assert set(disk.names) == {name + ASIDE, other}
        assert set(opened(disk).live()) == {other}
        disk.names[name] = disk.names.pop(name + ASIDE)
        disk.names[name].data[:] = data
    assert is_true(opened(disk), opened(disk).live()[name])


@pytest.mark.parametrize("cut", [0, 4, LENGTH_BYTES, 100, -1])
def test_d2_a_file_that_was_cut_short_or_grew_is_set_aside(cut: int) -> None:
    for change in ("cut", "grow"):
        disk = SimulatedDisk()
        write(opened(disk), talk(7, (1,)))
        [(name, content)] = disk.names.items()
        content.data[:] = content.data[:cut] if change == "cut" else content.data + b"\0" * (cut + 2)
        records = opened(disk)
        assert set(records.broken) == {name}
        assert records.live() == {}
        assert set(disk.names) == {name + ASIDE}


def test_d2_a_record_whose_parts_were_set_aside_is_set_aside_with_them() -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    for new in (talk(7), talk(7, (1,)), talk(8, (1,))):
        write(records, new)
    root, chat, other = sorted(disk.names)
    disk.names[root].data[-1] ^= 1
    with pytest.raises(Broken, match=f"^{root}: state"):
        is_true(records, records.live()[chat])
    assert set(records.broken) == {root, chat}
    assert root in records.broken[chat]
    assert set(records.live()) == {other}
    assert set(opened(disk).live()) == {other}


def test_a_record_whose_file_vanished_or_cannot_be_read_is_a_miss() -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    for number in (1, 2):
        write(records, talk(number))
    first, second = records.live().values()
    del disk.names[first.name]
    with pytest.raises(Broken):
        is_true(records, first)
    disk.fails["read"] = errno.EIO
    with pytest.raises(Broken):
        is_true(records, second)
    assert records.live() == {}
    with pytest.raises(Broken, match="not there any more"):
        records.read(first.name, parts_of(first))


def test_a_process_without_free_files_takes_no_record_for_broken() -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    write(records, talk(1))
    [stored] = records.live().values()
    disk.fails["read"] = errno.EMFILE
    with pytest.raises(OSError, match="fails"):
        is_true(records, stored)
    with pytest.raises(OSError, match="fails"):
        opened(disk)
    disk.fails.clear()
    assert is_true(records, stored)
    assert is_true(opened(disk), stored)


def test_d3_records_of_another_identity_are_ignored_and_stay_and_are_found_again_by_their_own() -> None:
    disk = SimulatedDisk()
    write(opened(disk), talk(7))
    write(opened(disk), talk(7, (1,)))
    other = opened(disk, "another model")
    assert other.live() == {}
    assert len(other.foreign) == 2
    assert not other.has(talk(7).spans[0])
    write(other, talk(7, namespace=Namespace("another")))
    assert other.used == sum(len(content.data) for content in disk.names.values())
    records = opened(disk)
    assert ends(records) == {end(talk(7)), end(talk(7, (1,)))}
    assert all(is_true(records, stored) for stored in records.live().values())
    assert len(Records(disk, None, 0, 0).live()) == 0
    every = Records(disk, None, LARGE, 0)
    every.open()
    assert len(every.live()) == 3


def test_files_of_another_version_of_the_format_are_ignored_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    monkeypatch.setattr(module, "VERSION", 2)
    write(opened(disk), talk(7))
    records = opened(disk)
    assert (records.live(), records.broken, len(records.foreign)) == ({}, {}, 1)
    assert len(disk.names) == 1


def test_other_files_in_the_directory_are_left_alone() -> None:
    disk = SimulatedDisk()
    for name in ("notes.txt", "x.safetensors", "0000000001-chat-zz.safetensors"):
        disk.create(name).write(b"mine")
    records = opened(disk)
    assert (records.live(), records.used, len(disk.names)) == ({}, 0, 3)


def sizes(*records: NewRecord) -> int:
    disk = SimulatedDisk()
    for new in records:
        write(opened(disk), new)
    return disk.capacity - disk.free()


def test_the_budget_holds_and_what_was_used_longest_ago_leaves_first() -> None:
    disk = SimulatedDisk()
    budget = sizes(talk(1, (1,)), talk(2, (1,)), talk(3, (1,)))
    records = opened(disk, budget=budget)
    for number in (1, 2, 3):
        write(records, talk(number, (1,)))
    first, second, third = records.live().values()
    assert is_true(records, first)
    write(records, talk(4, (1,)))
    assert {first.name, third.name} < set(records.live())
    assert second.name not in disk.names
    assert records.used <= budget
    with pytest.raises(NoRoom, match="do not fit"):
        write(records, talk(5, range(40)))
    assert len(records.live()) == 3


def test_room_is_not_made_of_what_others_name_nor_of_what_the_new_record_names() -> None:
    disk = SimulatedDisk()
    chats = [talk(7, (n,)) for n in range(4)]
    budget = sizes(talk(7), *chats[:2])
    records = opened(disk, budget=budget)
    for new in (talk(7), *chats):
        write(records, new)
        assert records.used <= budget
    assert ends(records) == {end(talk(7)), end(chats[2]), end(chats[3])}
    assert all(is_true(records, stored) for stored in records.live().values())


def test_room_is_made_of_what_is_set_aside_first() -> None:
    disk = SimulatedDisk()
    budget = sizes(talk(1, (1,)), talk(2, (1,)))
    records = opened(disk, budget=budget)
    for number in (1, 2):
        write(records, talk(number, (1,)))
    records.set_aside(sorted(records.live())[1], "a test")
    write(records, talk(3, (1,)))
    assert ends(records) == {end(talk(1, (1,))), end(talk(3, (1,)))}
    assert len(disk.names) == 2


def test_the_file_system_keeps_its_floor() -> None:
    size = sizes(talk(1))
    disk = SimulatedDisk(capacity=5 * size)
    records = opened(disk, floor=3 * size)
    for number in range(1, 5):
        write(records, talk(number))
        assert disk.free() >= 3 * size
    disk.create("something else").write(b"\0" * 2 * size)
    with pytest.raises(NoRoom, match="stay free"):
        write(records, talk(6))
    assert len(records.live()) == 2


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(operation: str) -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    write(records, talk(7, (1,)))
    before = set(disk.names)
    disk.fails[operation] = errno.ENOSPC
    with pytest.raises(OSError, match="fails"):
        write(records, talk(7, (1, 2)))
    assert set(disk.names) == before
    disk.fails.clear()
    write(records, talk(7, (1, 2)))
    assert ends(records) == {end(talk(7, (1, 2)))}


def test_a_directory_that_cannot_be_written_is_still_read_and_broken_files_are_not_used() -> None:
    disk = SimulatedDisk()
    for number in (1, 2):
        write(opened(disk), talk(number))
    first, second = sorted(disk.names)
    disk.names[first].data[50] ^= 1
    disk.names["0000000009-chat-0000000000000000.safetensors" + UNFINISHED] = disk.names[first]
    disk.fails = dict.fromkeys(("unlink", "rename", "touch", "sync names", "create"), errno.EROFS)
    records = opened(disk)
    assert set(records.live()) == {second}
    assert is_true(records, records.live()[second])


def test_purge_removes_every_record_that_shares_a_cut_and_remove_what_names_the_record() -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    for new in (talk(7), talk(7, (1,)), talk(7, (2,)), talk(8, (1,)), talk(9), talk(9, (1,))):
        write(records, new)
    assert records.purge(frozenset({talk(7, (1,)).cuts[-1][1]})) == 1
    assert ends(records) == {
        end(talk(7)),
        end(talk(7, (2,))),
        end(talk(8, (1,))),
        end(talk(9)),
        end(talk(9, (1,))),
    }
    assert records.purge(frozenset({talk(7).cuts[0][1]})) == 2
    [root] = [name for name, stored in records.live().items() if end(talk(9)) == stored.header.cuts[-1]]
    assert records.remove([root]) == 2
    assert ends(records) == ends(opened(disk)) == {end(talk(8, (1,)))}


def test_a_part_that_is_lost_while_a_record_that_names_it_is_written_ends_the_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    write(records, talk(7))
    [root] = records.live().values()
    monkeypatch.setattr(module, "PIECE", 1 << 10)
    writing = records.write(talk(7, range(100)))
    next(writing)
    disk.names[root.name].data[-1] ^= 1
    with pytest.raises(Broken):
        is_true(records, root)
    with pytest.raises(Broken, match="not there any more"):
        list(writing)
    assert records.live() == {}
    assert [name for name in disk.names if not name.endswith(ASIDE)] == []


def test_a_shorter_record_of_a_conversation_is_replaced_by_a_longer_one_and_a_branch_is_not() -> None:
    disk = SimulatedDisk()
    records = opened(disk)
    for new in (talk(7, (1,)), talk(7, (1, 2)), talk(7, (1, 3)), talk(7, (1,))):
        write(records, new)
    assert ends(records) == {end(talk(7, (1, 2))), end(talk(7, (1, 3)))}
    assert ends(opened(disk)) == ends(records)
