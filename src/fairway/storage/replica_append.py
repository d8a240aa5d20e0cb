"""Replica append: checks the next bytes of a master's log before a replica appends them.

The bytes are those of the master's file, so that a replica is a byte-identical prefix: whole records, with a segment's
header before its first record. Bytes that do not fit are refused as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fairway import batch
from fairway.errors import RemoteProtocolError, WrongDirectory
from fairway.group_events import ActionKind
from fairway.storage import action_log, dedupe, record, segment, subjects
from fairway.storage.log import Log
from fairway.storage.record import BadRecord, Record, RecordKind

_ACTION_KINDS = frozenset(int(kind) for kind in ActionKind)


class AcceptedBytes(NamedTuple):
    """Bytes that fit."""

    header_bytes: int  # of the segment's header, where a segment begins
    records: list[Record]


def check(log: Log, base: int, position: int, data: bytes) -> AcceptedBytes:
    """The records in `data`, which must continue this log; `RemoteProtocolError` says why they do not."""
    if position != log.end:
        raise RemoteProtocolError(
            f"bytes of {log.directory} at {position} do not follow on a copy that ends at {log.end}"
        )
    header_bytes = _check_place(log, base, position, data)
    records: list[Record] = []
    at, epoch = header_bytes, log.epoch
    while at < len(data):
        found = record_of(log, data, at, position + at)
        if found.header.epoch < epoch:
            raise RemoteProtocolError(f"the record at {position + at} is of epoch {found.header.epoch}, after {epoch}")
        _check_content(log, found)
        epoch = found.header.epoch
        at += record.HEADER_BYTES + found.header.body_bytes
        records.append(found)
    if not records:
        raise RemoteProtocolError(f"no record came for {log.directory} at {position}")
    return AcceptedBytes(header_bytes, records)


def _check_place(log: Log, base: int, position: int, data: bytes) -> int:
    """The length of the segment header in front; 0 where the bytes continue the newest segment."""
    if position == base:
        if segment.parse_header(data) != (log.log_id, base):
            raise RemoteProtocolError(f"the segment at {base} of {log.directory} belongs to another log or place")
        return segment.HEADER_BYTES
    newest = log.segments[-1] if log.segments else None
    if newest is None or newest.base != base:
        raise RemoteProtocolError(f"there is no segment {base} at the end of {log.directory} to go on with")
    if newest.end != position:
        raise RemoteProtocolError(
            f"{log.directory} lacks what lies from {newest.end} to {position}: mend it before it goes on"
        )
    return 0


def size_of(log: Log, data: bytes, at: int, position: int) -> int:
    """The length of the record at `at` of the data, from its header, which must belong at `position`."""
    try:
        return record.HEADER_BYTES + record.parse_header(data, at, position, log.log_id).body_bytes
    except (BadRecord, WrongDirectory) as bad:
        raise RemoteProtocolError(f"no record of {log.directory} came for {position}: {bad}") from bad


def record_of(log: Log, data: bytes, at: int, position: int) -> Record:
    """The record at `at` of the data, which must belong at `position`."""
    try:
        header = record.parse_header(data, at, position, log.log_id)
        body_at = at + record.HEADER_BYTES
        body = data[body_at : body_at + header.body_bytes]
        record.check_body(header, body)
    except BadRecord as bad:
        raise RemoteProtocolError(f"no intact record of {log.directory} came for {position}: {bad.why}") from bad
    except WrongDirectory as newer:
        raise RemoteProtocolError(f"the master is of a newer version: {newer}") from newer
    return Record(header, body)


def _check_content(log: Log, found: Record) -> None:
    """Check that the views will be able to read the record."""
    checks = _CHECKS.get(log.directory, {})
    check_body = checks.get(found.header.kind)
    if check_body is None:
        raise RemoteProtocolError(f"a record of kind {found.header.kind} does not belong into {log.directory}")
    check_body(found)


def _check_batch(found: Record) -> None:
    if batch.peek(found.body).count != found.header.count:
        raise RemoteProtocolError(f"the record at {found.header.position} does not hold {found.header.count} messages")


def _check_subjects(found: Record) -> None:
    for _ in subjects.unpack(found.body):
        pass


def _check_removal(found: Record) -> None:
    subjects.unpack_removal(found.body)


def _check_stream(found: Record) -> None:
    dedupe.unpack_statement(found.body)


def _check_actions(found: Record) -> None:
    unknown = [each.kind for each in action_log.walk(found.body) if each.kind not in _ACTION_KINDS]
    if unknown:
        raise RemoteProtocolError(
            f"action kind {unknown[0]} is not known here: use the master's version, or a newer one"
        )


def _check_groups(found: Record) -> None:
    action_log.unpack_groups(found.body)


def _no_check(_found: Record) -> None:
    """The record is empty, or only its owner can check it."""


_CHECKS: dict[str, dict[int, Callable[[Record], None]]] = {
    "messages": {
        RecordKind.DATA: _check_batch,
        RecordKind.SUBJECT: _check_subjects,
        RecordKind.STREAM: _check_stream,
        RecordKind.REMOVED: _check_removal,
        RecordKind.EPOCH: _no_check,
    },
    "actions": {
        RecordKind.ACTIONS: _check_actions,
        RecordKind.NAMES: _check_actions,
        RecordKind.GROUPS: _check_groups,
        RecordKind.DISPATCH: _no_check,
        RecordKind.EPOCH: _no_check,
    },
}
