"""The index file: the consume log's entries for one segment of the message log, all subjects in one file.

Ten thousand subjects are ten thousand runs in this file, not ten thousand files. A start reads the 64-byte header and
a directory of 48 bytes per subject. A subject's run of entries is read on demand, and verified then. The file is a
view: if it is missing or unreadable, it is made again from its segment.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from fairway.batch import checksum
from fairway.errors import RemoteProtocolError
from fairway.runtime.disk import File, Part

MAGIC = b"FWYIDX\r\n"
VERSION = 1
DIRECTORY = "index"

# magic, version, header length, must, may, log id, base, covered end, subjects, zero, CRC of the directory
_COVERED = struct.Struct("<8sHHHHQQQIII8x")
_CRC = struct.Struct("<I")
HEADER_BYTES = _COVERED.size + _CRC.size
_RUN = struct.Struct("<IIQQQqII")  # subject, entries, first sequence, end sequence, offset, newest ms, CRC, zero

ENTRY = struct.Struct(
    "<QIIQqQQQQ"
)  # first sequence, count, size, position, append ms, tags, producer, its sequence, zero
ENTRY_BYTES = ENTRY.size


@dataclass(slots=True)
class IndexRun:
    """One subject's entries for one segment: in memory as `data`, otherwise at `offset` of the file."""

    base: int
    entries: int
    first_sequence: int
    end_sequence: int
    newest_ms: int
    offset: int
    crc: int
    data: bytes | None = None


def file_name(base: int) -> str:
    return f"{DIRECTORY}/{base:020d}.idx"


def pack(
    log_id: int, base: int, covered_end: int, entries: Mapping[int, bytes]
) -> tuple[list[Part], dict[int, IndexRun]]:
    """The parts of an index file for `entries` by subject, and its runs."""
    runs: dict[int, IndexRun] = {}
    directory: list[bytes] = []
    offset = HEADER_BYTES + len(entries) * _RUN.size
    for subject_id, data in sorted(entries.items()):
        first, last = ENTRY.unpack_from(data, 0), ENTRY.unpack_from(data, len(data) - ENTRY_BYTES)
        run = runs[subject_id] = IndexRun(
            base, len(data) // ENTRY_BYTES, first[0], last[0] + last[1], last[4], offset, checksum(data), data
        )
        fields = (run.entries, run.first_sequence, run.end_sequence, run.offset, run.newest_ms, run.crc, 0)
        directory.append(_RUN.pack(subject_id, *fields))
        offset += len(data)
    directory_bytes = b"".join(directory)
    covered = _COVERED.pack(
        MAGIC, VERSION, HEADER_BYTES, 0, 0, log_id, base, covered_end, len(runs), 0, checksum(directory_bytes)
    )
    header = covered + _CRC.pack(checksum(covered))
    return [header, directory_bytes, *(data for _, data in sorted(entries.items()))], runs


def read_directory(file: File, log_id: int, base: int) -> tuple[int, dict[int, IndexRun]]:
    """(covered end, runs by subject) of an index file; `RemoteProtocolError` where it cannot be trusted."""
    header = file.read(0, HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise RemoteProtocolError("the index is cut short")
    covered = header[: _COVERED.size]
    magic, version, _, must, _, own_log, own_base, covered_end, subjects, _, directory_crc = _COVERED.unpack(covered)
    if _CRC.unpack_from(header, _COVERED.size)[0] != checksum(covered):
        raise RemoteProtocolError("the index header fails its checksum")
    if (magic, version, must, own_log, own_base) != (MAGIC, VERSION, 0, log_id, base):
        raise RemoteProtocolError("the index is of another version or another log")
    if HEADER_BYTES + subjects * _RUN.size > file.size:
        raise RemoteProtocolError("the index is cut short")
    directory = file.read(HEADER_BYTES, subjects * _RUN.size)
    if checksum(directory) != directory_crc:
        raise RemoteProtocolError("the index directory fails its checksum")
    runs = {}
    for subject_id, entries, first, end, offset, newest_ms, crc, _ in _RUN.iter_unpack(directory):
        runs[subject_id] = IndexRun(base, entries, first, end, newest_ms, offset, crc)
    return covered_end, runs


def read_run(file: File, run: IndexRun) -> bytes:
    """A run's entries, verified."""
    data = file.read(run.offset, run.entries * ENTRY_BYTES)
    if not is_sound(run, data):
        raise RemoteProtocolError("a run of the index fails its checksum")
    return data


def read_runs(file: File, runs: Mapping[int, IndexRun]) -> dict[int, bytes]:
    """The entries of all these runs, verified."""
    start = min((run.offset for run in runs.values()), default=0)
    data = file.read(start, max(file.size - start, 0))
    found: dict[int, bytes] = {}
    for subject_id, run in runs.items():
        entries = data[run.offset - start : run.offset - start + run.entries * ENTRY_BYTES]
        if not is_sound(run, entries):
            raise RemoteProtocolError("a run of the index fails its checksum")
        found[subject_id] = entries
    return found


def is_sound(run: IndexRun, data: bytes) -> bool:
    """Whether these bytes are the run's entries."""
    return len(data) == run.entries * ENTRY_BYTES and checksum(data) == run.crc
