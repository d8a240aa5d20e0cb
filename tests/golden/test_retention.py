"""The choice of an age, and the record that states groups, in format version 1: read for ever, and as docs/internals/formats.md
says."""

from __future__ import annotations

from pathlib import Path

import google_crc32c

from fairway.batch import checksum
from fairway.storage import action_log, record, retention
from fairway.storage.record import RecordHeader, RecordKind

FOLDER = Path(__file__).parent
WEEK_MS = 604_800_000
LOG_ID, POSITION, PICTURE = 0x1122_3344_5566_7788, 4_096, b"a picture of the groups"


def u(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def test_the_choice_is_read_and_written_alike() -> None:
    data = (FOLDER / "retention-v1.bin").read_bytes()
    assert retention.unpack(data) == WEEK_MS
    assert retention.pack(WEEK_MS) == data
    assert (data[:8], u(data, 8, 2), u(data, 10, 2), u(data, 12, 4)) == (b"FWYRET\r\n", 1, len(data), 0)
    assert (u(data, 16, 8), u(data, 24, 4), u(data, 28, 4)) == (WEEK_MS, google_crc32c.value(data[:24]), 0)


def test_the_record_that_states_the_groups_is_read_and_written_alike() -> None:
    data = (FOLDER / "groups-record-v1.bin").read_bytes()
    header = record.parse_header(data, 0, POSITION, LOG_ID)
    body = data[record.HEADER_BYTES :]
    record.check_body(header, body)
    assert (header.kind, header.count, u(data, 5, 1)) == (RecordKind.GROUPS, 0, 10)
    assert action_log.unpack_groups(body) == PICTURE == body[8 : 8 + u(body, 0, 8)]
    packed = action_log.pack_groups(PICTURE)
    made = RecordHeader(RecordKind.GROUPS, 0, POSITION, 4_000, 7, 0, 1_700_000_000_000, 0, len(packed), checksum(packed))
    assert record.pack_header(made, LOG_ID) + packed == data
