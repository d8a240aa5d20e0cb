"""A half-made installation of format version 1 is finished by every later version, and is what docs/internals/formats.md says."""

from __future__ import annotations

from pathlib import Path

import google_crc32c

from fairway.delay.install import MOVE_IN, InstallPlan, pack, unpack
from fairway.storage.directory import DirectoryIdentity

FILE = Path(__file__).parent / "installing-v1.bin"
PLAN = InstallPlan(0x1111_2222_3333_4444, DirectoryIdentity(0x5555, 0x6666, 0x7777), 3, MOVE_IN)


def u(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def test_the_golden_file_is_read_and_written_alike() -> None:
    data = FILE.read_bytes()
    assert unpack(data) == PLAN
    assert pack(PLAN) == data


def test_the_table_of_the_document_is_enough_to_read_it() -> None:
    data = FILE.read_bytes()
    assert (data[:8], u(data, 8, 2), u(data, 10, 2), u(data, 12, 2)) == (b"FWYINS\r\n", 1, len(data), 0)
    assert [u(data, at, 8) for at in range(16, 64, 8)] == [PLAN.old_id, *PLAN.identity, PLAN.epoch, PLAN.step]
    assert (u(data, 64, 4), u(data, 68, 4)) == (google_crc32c.value(data[:64]), 0)
