"""What a crash may remove from the in-memory disk."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from holdfast.verify.sim.simulated_disk import Crashed, MemoryDisk


def outcomes(scenario: Callable[[MemoryDisk], object], power: bool = True) -> set[object]:
    """The possible files after a crash, over many seeds."""
    contents: set[object] = set()
    for seed in range(200):
        disk = MemoryDisk(random.Random(seed))
        disk.make_folder("/d", fsync=True)
        scenario(disk)
        disk.crash(power=power)
        contents.add(tuple((name, disk.read(f"/{name}")) for name in disk.files("/")))
    return contents


# Effects of a crash


def test_an_unsynced_tail_is_torn_at_any_length() -> None:
    def appends(disk: MemoryDisk) -> None:
        disk.put("/d/f", b"ab", fsync=True)
        disk.open_append("/d/f", fsync=True).append(b"cd")
        disk.open_append("/d/f", fsync=False).append(b"efgh")

    torn = [b"abcdefgh"[:length] for length in range(4, 9)]
    # A file system may have written the length and not the bytes.
    torn += [data.ljust(8, bytes(1)) for data in torn]
    assert outcomes(appends) == {(("d/f", data),) for data in torn}
    assert outcomes(appends, power=False) == {(("d/f", b"abcdefgh"),)}


def test_rot_flips_one_bit_of_one_file() -> None:
    """Neither of the lock, whose content is never read, nor of an empty file."""
    disk = MemoryDisk(random.Random(1))
    assert disk.rot() is None
    disk.make_folder("/d", fsync=True)
    files = {"/d/a": b"some", "/d/b": b"bytes", "/d/empty": b""}
    for path, data in files.items():
        disk.put(path, data, fsync=True)
    disk.lock("/d/lock")
    hit: set[str] = set()
    for _ in range(40):
        before = {path: disk.read(path) for path in files}
        rotten, restore = disk.rot() or ("", None)
        assert restore is not None
        hit.add(rotten)
        changed = [
            (path, bits) for path in files if (bits := _bits(before[path]) ^ _bits(disk.read(path)))
        ]
        assert [path for path, _ in changed] == [rotten]
        assert changed[0][1].bit_count() == 1
        restore()
        assert {path: disk.read(path) for path in files} == before
    assert hit == {"/d/a", "/d/b"}


def test_rot_of_the_state_flips_no_other_bits() -> None:
    disk = MemoryDisk(random.Random(1))
    for folder in ("/d", "/d/state"):
        disk.make_folder(folder, fsync=True)
    disk.put("/d/log", b"some", fsync=True)
    assert disk.rot(state=True) is None
    disk.put("/d/state/keys", b"bytes", fsync=True)
    for state, path in ((True, "/d/state/keys"), (False, "/d/log")):
        hit = {rotten[0] for _ in range(20) if (rotten := disk.rot(state=state)) is not None}
        assert hit == {path}


def _bits(data: bytes) -> int:
    return int.from_bytes(data, "big")


def test_an_unreadable_disk_can_be_written() -> None:
    disk = MemoryDisk(random.Random(1))
    disk.put("/f", b"old", fsync=True)
    disk.unreadable = True
    with pytest.raises(OSError, match="Input/output error"):
        disk.read("/f")
    disk.put("/f", b"new", fsync=True)
    disk.unreadable = False
    assert disk.read("/f") == b"new"


def test_data_of_a_failed_sync_is_lost_although_a_later_sync_succeeds() -> None:
    """A process that continues after the error has a hole in its file when the power is lost."""

    def appends(disk: MemoryDisk) -> None:
        disk.put("/d/f", b"ab", fsync=True)
        file = disk.open_append("/d/f", fsync=True)
        disk.unsyncable = True
        with pytest.raises(OSError, match="Input/output error"):
            file.append(b"cd")
        with pytest.raises(OSError, match="Input/output error"):
            disk.put("/d/other", b"x", fsync=True)
        disk.unsyncable = False
        file.append(b"ef")

    assert outcomes(appends) == {(("d/f", b"ab\0\0ef"),)}
    assert outcomes(appends, power=False) == {(("d/f", b"abcdef"),)}


def test_data_of_a_failed_sync_that_is_truncated_leaves_no_hole() -> None:
    def appends(disk: MemoryDisk) -> None:
        disk.put("/d/f", b"ab", fsync=True)
        file = disk.open_append("/d/f", fsync=True)
        disk.unsyncable = True
        with pytest.raises(OSError, match="Input/output error"):
            file.append(b"cd")
        disk.unsyncable = False
        file.truncate(2)
        file.append(b"ef")

    assert outcomes(appends) == {(("d/f", b"abef"),)}


def test_an_unsynced_truncation_may_be_undone_but_a_synced_truncation_is_not() -> None:
    def cuts(disk: MemoryDisk, fsync: bool) -> None:
        disk.put("/d/f", b"good", fsync=True)
        file = disk.open_append("/d/f", fsync=False)
        file.append(b"BAD")
        file = disk.open_append("/d/f", fsync=fsync)
        file.truncate(4)
        file.append(b"+")

    assert outcomes(lambda disk: cuts(disk, True)) == {(("d/f", b"good+"),)}
    contents = [b"good", b"good+", b"goodB", b"goodBA", b"goodBAD"]
    contents += [data + bytes(1) for data in (b"good",)]
    contents += [data.ljust(7, bytes(1)) for data in (b"good", b"goodB", b"goodBA")]
    assert outcomes(lambda disk: cuts(disk, False)) == {(("d/f", data),) for data in contents}


def test_a_name_is_durable_once_its_folder_is_synced() -> None:
    def puts(disk: MemoryDisk) -> None:
        disk.put("/d/f", b"old", fsync=True)
        disk.put("/d/f", b"new", fsync=False)
        disk.sync_tree("/d/f", "/d/f")  # the file, not its folder

    assert outcomes(puts) == {(("d/f", b"old"),), (("d/f", b"new"),)}

    def puts_two(disk: MemoryDisk) -> None:
        puts(disk)
        disk.put("/d/g", b"", fsync=True)

    assert outcomes(puts_two) == {(("d/f", b"new"), ("d/g", b""))}


def test_a_deleted_file_may_reappear_until_its_folder_is_synced() -> None:
    def deletes(disk: MemoryDisk) -> None:
        disk.put("/d/f", b"x", fsync=True)
        disk.delete("/d/f")

    assert outcomes(deletes) == {(), (("d/f", b"x"),)}
    assert outcomes(lambda disk: (deletes(disk), disk.sync_tree("/d", "/d"))) == {()}
    assert outcomes(deletes, power=False) == {()}


def test_a_lost_folder_loses_its_files() -> None:
    def makes(disk: MemoryDisk) -> None:
        disk.make_folder("/d/e", fsync=False)
        disk.put("/d/e/f", b"x", fsync=True)

    assert outcomes(makes) == {(), (("d/e/f", b"x"),)}

    def makes_again(disk: MemoryDisk) -> None:
        makes(disk)
        disk.make_folder("/d/e", fsync=True)

    assert outcomes(makes_again) == {(("d/e/f", b"x"),)}
    assert outcomes(lambda disk: (makes(disk), disk.sync_tree("/d/e/f", "/d"))) == {
        (("d/e/f", b"x"),)
    }


@pytest.mark.parametrize("power", [True, False])
def test_handles_and_locks_do_not_outlive_the_process(power: bool) -> None:
    disk = MemoryDisk(random.Random(1))
    disk.put("/f", b"x", fsync=True)
    file, lock = disk.open_append("/f", fsync=True), disk.lock("/lock")
    disk.crash(power=power)
    for use in (
        lambda: file.append(b"y"),
        lambda: file.truncate(0),
        file.in_place,
        file.close,
        lambda: disk.unlock(lock),
    ):
        with pytest.raises(Crashed):
            use()
    assert disk.read("/f") == b"x"
    disk.unlock(disk.lock("/lock"))


def test_the_machine_dies_in_the_scheduled_change() -> None:
    changes: tuple[Callable[[MemoryDisk], object], ...] = (
        lambda disk: disk.put("/d/f", b"1234", fsync=True),
        lambda disk: disk.open_append("/d/f", fsync=True).append(b"56"),
        lambda disk: disk.open_append("/d/f", fsync=True).truncate(5),
        lambda disk: disk.make_folder("/d/e", fsync=True),
        lambda disk: disk.sync_tree("/d", "/d"),
        lambda disk: disk.lock("/d/lock"),
        lambda disk: disk.delete("/d/f"),
    )

    def run(disk: MemoryDisk, last: int) -> None:
        disk.crash_after = last
        before = disk.operations
        with pytest.raises(Crashed):
            for change in changes:
                change(disk)
        assert disk.operations == before + last
        for use in (lambda: disk.read("/d/f"), lambda: disk.exists("/d"), lambda: disk.files("/")):
            with pytest.raises(Crashed):
                use()

    parts = [(("d/f.tmp", b"1234"[:length]),) for length in range(5)]
    assert outcomes(lambda disk: run(disk, 1), power=False) == {
        (),
        (("d/f", b"1234"),),
        *parts,
    }
    contents = [b"1234", b"12345", b"123456", b"1234\0", b"1234\0\0", b"12345\0"]
    torn = {(("d/f", data),) for data in contents}
    assert outcomes(lambda disk: run(disk, 2)) == torn
    assert outcomes(lambda disk: run(disk, 3)) == {
        (("d/f", data),) for data in (b"12345", b"123456", b"12345\0")
    }
    assert outcomes(lambda disk: run(disk, 4)) == {(("d/f", b"12345"),)}
    assert outcomes(lambda disk: run(disk, 7), power=False) == {
        (("d/f", b"12345"), ("d/lock", b"1\n")),
        (("d/lock", b"1\n"),),
    }


def test_the_disk_works_again_after_a_crash_and_is_empty_after_a_wipe() -> None:
    disk = MemoryDisk(random.Random(1))
    disk.crash_after = 2
    disk.put("/f", b"x", fsync=True)
    with pytest.raises(Crashed):
        disk.put("/g", b"y", fsync=True)
    disk.crash()
    disk.put("/g", b"z", fsync=True)
    assert (disk.read("/f"), disk.read("/g"), disk.crash_after) == (b"x", b"z", None)
    file = disk.open_append("/g", fsync=True)
    disk.wipe()
    assert disk.files("/") == {}
    with pytest.raises(Crashed):
        file.append(b"zombie")


def test_a_full_disk_writes_at_most_a_part_of_an_append() -> None:
    disk = MemoryDisk(random.Random(1))
    disk.put("/f", b"x", fsync=True)
    file = disk.open_append("/f", fsync=True)
    disk.full = True
    lengths = set()
    for _ in range(100):
        with pytest.raises(OSError) as caught:
            file.append(b"1234")
        assert caught.value.errno == errno.ENOSPC
        lengths.add(len(disk.read("/f")))
        file.truncate(1)
    assert lengths == {1, 2, 3, 4}
    for write in (lambda: disk.make_folder("/d", fsync=True), lambda: disk.lock("/lock")):
        with pytest.raises(OSError, match="No space left"):
            write()
