"""A spool's journal of format version 1 is opened for ever, and is what docs/spool.md says it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from queue import SimpleQueue

import google_crc32c

from fairway.client.spool_journal import Journal
from fairway.client.spool_record import Entry
from fairway.world.clock import ManualClock
from fairway.world.real_disk import RealDisk
from tests.golden.spool import FOLDER, NUMBER, START_MS, data, files

HEADER_BYTES = 56


def stored() -> dict[str, bytes]:
    return {str(path.relative_to(FOLDER)): path.read_bytes() for path in sorted(FOLDER.glob("*/*"))}


def test_this_version_writes_the_same_bytes() -> None:
    assert files() == stored()


def test_it_is_opened_and_says_what_it_said(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "journal")
    disk = RealDisk(tmp_path / "journal", post=lambda callback, *args: callback(*args))
    journal = Journal.open(disk, NUMBER, ManualClock(START_MS))
    loaded: list[Entry] = []
    while journal.has_more:
        found: SimpleQueue[list[Entry]] = SimpleQueue()
        journal.load(found.put)
        loaded += found.get(timeout=30)
    asides = journal.asides()
    disk.close()
    assert loaded == [
        Entry(2, "orders", 1, False, data(3, b"")),
        Entry(3, "orders", 1, False, data(4, b"d" * 300)),
        Entry(4, "orders", 1, False, data(5, b"e")),
    ]
    assert (journal.sent_before, journal.messages, journal.since_ms) == (4, 3, START_MS)
    assert [journal.identity(77, sequence) for sequence in (2, 3, 5)] == [(77, 2), (78, 0), (78, 2)]
    assert [(each.number, each.subject, each.reason) for each in asides] == [(1, "bills.EU-1_x", "BAD_NAME: no")]


def test_the_header_is_as_documented() -> None:
    name, content = next((name, content) for name, content in stored().items() if name.startswith("log/"))
    position = int(name.removeprefix("log/"), 16)
    while content:
        header = content[:HEADER_BYTES]
        size = int.from_bytes(header[40:44], "little")
        body = content[HEADER_BYTES : HEADER_BYTES + size]
        assert header[:4] == b"FWS1"
        assert (header[4], header[6]) == (1, HEADER_BYTES)
        assert int.from_bytes(header[8:16], "little") == NUMBER
        assert int.from_bytes(header[16:24], "little") == position
        assert int.from_bytes(header[24:32], "little") <= position
        assert int.from_bytes(header[32:40], "little") == START_MS
        assert int.from_bytes(header[44:48], "little") == google_crc32c.value(body)
        assert int.from_bytes(header[48:52], "little") == google_crc32c.value(header[:48])
        content = content[HEADER_BYTES + size :]
        position += HEADER_BYTES + size
