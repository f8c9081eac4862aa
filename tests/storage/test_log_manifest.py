"""Recovery returns a prefix of the appended records, or reports a damaged file."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import LogCorrupted, LogError, StorageFull
from holdfast.storage.manifest import HEADER, Manifest, frame
from holdfast.storage.records import (
    Ack,
    Added,
    Boundary,
    Counter,
    DropState,
    Ended,
    Epoch,
    Note,
    Open,
    Query,
    Record,
    Retired,
    State,
    Tentative,
    Token,
    Trim,
    Undo,
    decode,
    encode,
)
from holdfast.types import Segment, SegmentId, Stability

SEGMENT = Segment(
    SegmentId("täp", 1, -7, 2, 3), Stability.TENTATIVE, "segments/a", 5, "0" * 16, -1, 99, 4, 6
)
#: Every kind of record, in appends of one to three.
APPENDS: list[list[Record]] = [
    [Epoch(1, "node a"), Query("0123456789abcdef")],
    [Open("täp", "ts timestamp", "ts", -8), Note("two\nlines \0 and a \U0001f41a")],
    [Added(SEGMENT), Boundary("täp", -7), Token("täp", "offset 5")],
    [Ack("b", "täp", -7, -8, 2)],
    [Trim("täp", -7), Counter("late", 2**53 + 1)],
    [State("out", 5, {"files": ["state/x"], "n": {"k": [1.5, None]}}), DropState("out", 5)],
    [Tentative("täp", -6, -5, ("näh", "far"), 0.5, 0.25), Tentative("täp", -4, -4, ())],
    [Undo("täp", -7, 1)],
    [Ended("täp")],
    [Retired("täp", -6, "it is gone")],
]


def recover(path: Path) -> list[Record]:
    manifest, records = Manifest.open(path, "never")
    manifest.close()
    return records


def prefixes() -> Iterator[list[Record]]:
    for count in range(len(APPENDS) + 1):
        yield [record for records in APPENDS[:count] for record in records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A manifest of all of `APPENDS`."""
    path = tmp_path / "manifest"
    manifest, records = Manifest.open(path, "always")
    assert records == []
    for group in APPENDS:
        manifest.append(group)
    manifest.close()
    return path


def test_all_records_are_recovered(path: Path) -> None:
    assert recover(path) == list(prefixes())[-1]
    assert {type(record) for record in recover(path)} == set(get_args(Record))
    for group in APPENDS:
        assert decode(encode(group)) == group


def test_the_encoding_of_records_never_changes() -> None:
    """Existing logs must remain readable: this is the encoding of the first version."""
    assert encode([Added(SEGMENT), Boundary("täp", -7)]) == (
        rb'[{"kind":"added","stream":"t\u00e4p","partition":1,"bucket":-7,"version":2,"part":3,'
        rb'"stability":"TENTATIVE","path":"segments/a","rows":5,"checksum":"0000000000000000",'
        rb'"t_max_us":-1,"size_bytes":99,"epoch":4,"crc":6},'
        rb'{"kind":"boundary","stream":"t\u00e4p","upto":-7}]'
    )
    assert encode([State("out", 5, {"n": {"k": [1.5, None]}}), Ack("b", "x", -7, -8, 2)]) == (
        b'[{"kind":"state","path":"out","bucket":5,"body":{"n":{"k":[1.5,null]}}},'
        b'{"kind":"ack","reader":"b","stream":"x","received":-7,"needed":-8,"epoch":2}]'
    )


def test_tentative_records_are_encoded_as_plain_json() -> None:
    records = [Tentative("s", 4, 6, ("a", "b"), 0.5, 0.25), Undo("s", 3, 2)]
    assert encode(records) == (
        b'[{"kind":"tentative","stream":"s","since":4,"upto":6,"missing":["a","b"],'
        b'"inputs":0.5,"rows":0.25},'
        b'{"kind":"undo","stream":"s","upto":3,"number":2}]'
    )
    assert decode(encode(records)) == records


def test_a_tentative_record_of_an_older_version_has_full_shares() -> None:
    old = b'[{"kind":"tentative","stream":"s","since":4,"upto":6,"missing":["a"]}]'
    assert decode(old) == [Tentative("s", 4, 6, ("a",), inputs=1.0, rows=1.0)]


def test_a_manifest_cut_at_any_length_recovers_the_complete_appends(path: Path) -> None:
    data = path.read_bytes()
    ends = [len(HEADER)]
    for group in APPENDS:
        ends.append(ends[-1] + len(frame(encode(group))))
    assert ends[-1] == len(data)
    expected = list(prefixes())
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        complete = sum(end <= length for end in ends[1:])
        manifest, records = Manifest.open(path, "never")
        assert records == expected[complete]
        assert manifest.cut_bytes == (length - ends[complete] if length >= len(HEADER) else 0)
        manifest.append([Note("goes on")])
        manifest.close()
        assert recover(path) == [*expected[complete], Note("goes on")]


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_is_cut_in_the_last_frame_and_refused_before_it(
    path: Path, flip: int
) -> None:
    data = path.read_bytes()
    last = len(data) - len(frame(encode(APPENDS[-1])))
    *_, before, _ = prefixes()
    for offset in range(len(data)):
        bad = bytearray(data)
        bad[offset] ^= flip
        path.write_bytes(bad)
        if offset >= last:
            assert recover(path) == before
        else:
            with pytest.raises(LogCorrupted, match="manifest"):
                recover(path)
            assert path.read_bytes() == bad, "a damaged file is not modified"


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_damage_is_refused_or_recovers_a_subsequence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damage") / "manifest"
    good = HEADER + b"".join(frame(encode(group)) for group in APPENDS)
    start = data.draw(st.integers(0, len(good)))
    length = data.draw(st.integers(0, len(good) - start))
    path.write_bytes(good[:start] + data.draw(st.binary(max_size=40)) + good[start + length :])
    try:
        records = recover(path)
    except LogCorrupted:
        return
    # Removed complete frames cannot be detected; any other damage leaves a prefix.
    appended = list(prefixes())[-1]
    assert [record for record in appended if record in records] == records


def test_a_page_of_zeros_at_the_end_is_cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(4096))
    manifest, records = Manifest.open(path, "always")
    manifest.close()
    assert records == list(prefixes())[-1]
    assert manifest.cut_bytes == 4096


def test_the_error_for_a_damaged_manifest_names_the_offset_and_the_remedy(path: Path) -> None:
    data = bytearray(path.read_bytes())
    first = len(HEADER)
    data[first + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogCorrupted, match=f"damaged at byte {first}.*such a node is then rebuilt"):
        recover(path)


@pytest.mark.parametrize("torn", [b"", b"H", HEADER[:-1]])
def test_a_torn_header_is_treated_as_a_new_file(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "manifest"
    path.write_bytes(torn)
    assert recover(path) == []
    assert path.read_bytes() == HEADER


def test_headers_of_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    cases = {
        b"HOLDFAST 4\nxyz": "found 4",
        b"HOLDFAST 2\n": "found 2",
        b"PAR1": "expected the header of a manifest",
        b"HOLDFAST 3x": "found other content",
    }
    for data, message in cases.items():
        path.write_bytes(data)
        with pytest.raises(LogCorrupted, match=message):
            recover(path)


@pytest.mark.parametrize(
    "payload", [b'[{"kind":"vote"}]', b'[{"kind":"note","text":"","mood":1}]', b'[{"text":""}]']
)
def test_records_of_newer_versions_are_refused(path: Path, payload: bytes) -> None:
    path.write_bytes(path.read_bytes() + frame(payload))
    with pytest.raises(LogCorrupted, match="another version of Holdfast"):
        recover(path)


def test_a_rewritten_manifest_holds_the_new_records_and_accepts_appends(path: Path) -> None:
    manifest, _ = Manifest.open(path, "always")
    counters: list[Record] = [Counter(f"c{number}", number) for number in range(2_500)]
    manifest.rewrite(counters)
    manifest.append([Note("on")])
    manifest.close()
    assert recover(path) == [*counters, Note("rewritten as 2500"), Note("on")]
    assert [p.name for p in path.parent.iterdir()] == ["manifest"]


def test_damage_to_the_rewritten_part_is_never_treated_as_a_torn_tail(path: Path) -> None:
    manifest, _ = Manifest.open(path, "always")
    manifest.rewrite([Counter("late", 1)])
    manifest.close()
    data = bytearray(path.read_bytes())
    data[len(HEADER) + 12] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogCorrupted):
        recover(path)


def test_a_full_disk_loses_no_record_and_appends_continue_after_space_is_freed(
    tiny_disk: Path,
) -> None:
    manifest, _ = Manifest.open(tiny_disk / "manifest", "always")
    filler = tiny_disk / "filler"
    filler.write_bytes(bytes(100 * 1024))
    appended: list[Record] = []
    with pytest.raises(StorageFull):
        while True:
            note = Note(f"{len(appended)} " + "x" * 1_000)
            manifest.append([note])
            appended.append(note)
    with pytest.raises(StorageFull):
        manifest.rewrite(appended)
    assert len(appended) > 5
    filler.unlink()
    manifest.append([Note("room again")])
    manifest.close()
    assert recover(tiny_disk / "manifest") == [*appended, Note("room again")]
    assert sorted(p.name for p in tiny_disk.iterdir()) == ["manifest"]


def test_a_partial_write_is_rolled_back(tmp_path: Path) -> None:
    """With a file size limit, the kernel writes one part and refuses the rest."""
    path = tmp_path / "manifest"
    script = f"""
import resource
from holdfast.errors import StorageFull
from holdfast.storage.manifest import Manifest
from holdfast.storage.records import Note
manifest, _ = Manifest.open({str(path)!r}, "always")
manifest.append([Note("first")])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    manifest.append([Note("y" * 500)])
except StorageFull:
    print("full")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
manifest.append([Note("third")])
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("full\n", "")
    assert recover(path) == [Note("first"), Note("third")]


def test_an_append_that_cannot_be_rolled_back_poisons_the_manifest(path: Path) -> None:
    manifest, records = Manifest.open(path, "always")
    os.close(manifest._file._fd)  # type: ignore[attr-defined]  # the disk is lost: writing and truncating fail
    with pytest.raises(LogError, match="Bad file descriptor"):
        manifest.append([Note("lost")])
    manifest._file._fd = -1  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(LogError, match="not rolled back"):
            manifest.append([Note("refused")])
    with pytest.raises(LogError, match="not rolled back"):
        manifest.rewrite([])
    assert recover(path) == records
