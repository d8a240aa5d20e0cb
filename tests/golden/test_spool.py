"""A spool's journals of format versions 1 to 4 are opened for ever, and are what docs/how-to/spool.md says they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from queue import SimpleQueue

import google_crc32c
import pytest

from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import SpoolEntry, PlacementRecord
from fairway.runtime.clock import ManualClock
from fairway.runtime.real_disk import RealDisk
from tests.golden.spool import (
    CLUSTER_FOLDER,
    FOLDER,
    KEY,
    KEYED_CLUSTER_FOLDER,
    KEYED_FOLDER,
    NUMBER,
    START_MS,
    cluster_files,
    data,
    files,
)

HEADER_BYTES = 56
SECRETS = ["ff73cc73a77f5b82f89a6bf531d7862a", "0f38ba38dcf7708f7de8fdcda937b27b"]  # of streams 77 and 78, under that key


def stored(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*"))}


def opened(folder: Path, copy: Path) -> tuple[Journal, list[SpoolEntry]]:
    """A copy of it, and all that is not done."""
    shutil.copytree(folder, copy)
    disk = RealDisk(copy, post=lambda callback, *args: callback(*args))
    journal = Journal.open(disk, NUMBER, ManualClock(START_MS))
    loaded: list[SpoolEntry] = []
    while journal.has_more:
        found: SimpleQueue[list[SpoolEntry]] = SimpleQueue()
        journal.load(found.put)
        loaded += found.get(timeout=30)
    asides = [(each.number, each.subject, each.reason) for each in journal.asides()]
    disk.close()
    assert asides == [(1, "bills.EU-1_x", "BAD_NAME: no")]
    return journal, loaded


def test_this_version_writes_the_same_bytes() -> None:
    assert files() == stored(FOLDER)
    assert cluster_files() == stored(CLUSTER_FOLDER)
    assert files(KEY) == stored(KEYED_FOLDER)
    assert cluster_files(KEY) == stored(KEYED_CLUSTER_FOLDER)


@pytest.mark.parametrize(
    ("folder", "key"), [(FOLDER, b""), (CLUSTER_FOLDER, b""), (KEYED_FOLDER, KEY), (KEYED_CLUSTER_FOLDER, KEY)]
)
def test_the_secrets_of_its_streams_follow_from_its_key(tmp_path: Path, folder: Path, key: bytes) -> None:
    journal, _ = opened(folder, tmp_path / "journal")
    assert (journal.key, journal.is_keyed) == (key, bool(key))
    secrets = [journal.secret(stream) for stream in (77, 78)]
    if key:
        assert [each.hex() for each in secrets] == SECRETS
    else:
        assert secrets == [b"", b""]


@pytest.mark.parametrize("folder", [FOLDER, KEYED_FOLDER])
def test_it_is_opened_and_says_what_it_said(tmp_path: Path, folder: Path) -> None:
    journal, loaded = opened(folder, tmp_path / "journal")
    assert loaded == [
        SpoolEntry(2, "orders", 1, False, data(3, b"")),
        SpoolEntry(3, "orders", 1, False, data(4, b"d" * 300)),
        SpoolEntry(4, "orders", 1, False, data(5, b"e")),
    ]
    assert (journal.sent_before, journal.messages, journal.since_ms) == (4, 3, START_MS)
    assert [journal.identity(77, sequence) for sequence in (2, 3, 5)] == [(77, 2), (78, 0), (78, 2)]
    assert not journal.is_cluster


@pytest.mark.parametrize("folder", [CLUSTER_FOLDER, KEYED_CLUSTER_FOLDER])
def test_that_of_a_cluster_says_where_its_entries_were_sent(tmp_path: Path, folder: Path) -> None:
    journal, loaded = opened(folder, tmp_path / "journal")
    assert loaded == [
        SpoolEntry(0, "orders", 2, True, data(0, b"a", b"b"), "east"),
        SpoolEntry(2, "orders", 1, False, data(3, b""), "east"),
        SpoolEntry(3, "orders", 1, False, data(4, b"d" * 300), "west-2"),
        SpoolEntry(4, "orders", 1, False, data(5, b"e"), "east"),
    ]
    assert journal.is_cluster
    assert journal.placed == {2: PlacementRecord(2, "east", 79, 0)}
    assert journal.pinned() == {"east": 3}
    assert [journal.may_be_stored(entry) for entry in loaded] == [True, True, False, False]


@pytest.mark.parametrize(
    ("folder", "version"), [(FOLDER, 1), (CLUSTER_FOLDER, 2), (KEYED_FOLDER, 3), (KEYED_CLUSTER_FOLDER, 4)]
)
def test_the_header_is_as_documented(folder: Path, version: int) -> None:
    name, content = next((name, content) for name, content in stored(folder).items() if name.startswith("log/"))
    position = int(name.removeprefix("log/"), 16)
    while content:
        header = content[:HEADER_BYTES]
        size = int.from_bytes(header[40:44], "little")
        body = content[HEADER_BYTES : HEADER_BYTES + size]
        assert header[:4] == b"FWS1"
        assert (header[4], header[6]) == (version, HEADER_BYTES)
        assert int.from_bytes(header[8:16], "little") == NUMBER
        assert int.from_bytes(header[16:24], "little") == position
        assert int.from_bytes(header[24:32], "little") <= position
        assert int.from_bytes(header[32:40], "little") == START_MS
        assert int.from_bytes(header[44:48], "little") == google_crc32c.value(body)
        assert int.from_bytes(header[48:52], "little") == google_crc32c.value(header[:48])
        content = content[HEADER_BYTES + size :]
        position += HEADER_BYTES + size
