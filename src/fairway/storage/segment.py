"""A segment: one file of a log, named by the position of its first byte.

Positions count every byte of the log, segment headers too, so that `position - base` is the offset in the file, and a
replica's files are the master's, byte for byte. A segment opens with a 64-byte header of its own; the records follow.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from fairway.batch import checksum
from fairway.errors import RemoteProtocolError

MAGIC = b"FWYSEG\r\n"  # the line ending shows a copy that was made in text mode
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQQQ20x")  # magic, version, header length, must, may, log id, base, epoch
_CRC = struct.Struct("<I")
HEADER_BYTES = _COVERED.size + _CRC.size
SUFFIX = ".log"


@dataclass(slots=True)
class Segment:
    """One file of a log. `end` is the position after its last record; for the newest one it moves."""

    base: int
    end: int
    newest_ms: int = 0  # append time of its last record
    set_back_ms: int = 0  # append time of its first record, where the segment before it ends with a later one; else 0


class UnknownVersion(RemoteProtocolError):
    """The segment was written by a newer version."""


def file_name(directory: str, base: int) -> str:
    return f"{directory}/{base:020d}{SUFFIX}"


def base_of(name: str) -> int | None:
    """The base that a file name states, or None where the file is not a segment."""
    stem, dot, suffix = name.rpartition(".")
    if dot + suffix != SUFFIX or len(stem) != 20 or not (stem.isascii() and stem.isdigit()):
        return None
    return int(stem)


def pack_header(log_id: int, base: int, epoch: int) -> bytes:
    covered = _COVERED.pack(MAGIC, VERSION, HEADER_BYTES, 0, 0, log_id, base, epoch)
    return covered + _CRC.pack(checksum(covered))


def parse_header(data: bytes) -> tuple[int, int]:
    """(log id, base) of a segment header; `RemoteProtocolError` where it is none."""
    if len(data) < HEADER_BYTES:
        raise RemoteProtocolError("the segment header is cut short")
    covered = data[: _COVERED.size]
    magic, version, header_bytes, must_flags, _, log_id, base, _ = _COVERED.unpack(covered)
    if magic != MAGIC:
        raise RemoteProtocolError("the segment header has no magic")
    if _CRC.unpack_from(data, _COVERED.size)[0] != checksum(covered):
        raise RemoteProtocolError("the segment header fails its checksum")
    if version != VERSION or must_flags or header_bytes != HEADER_BYTES:
        raise UnknownVersion(
            f"segment format version {version} is newer than this program, which reads {VERSION}: "
            "use the version that wrote it"
        )
    return log_id, base
