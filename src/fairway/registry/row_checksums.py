"""Checksums of the rows in the SQLite registry: one digest per row, and a seal over all of them.

SQLite does not check its data: it serves a flipped bit in a value, and a flipped bit in a page's cell table makes a row
vanish. Therefore each row has a digest, which shows which row is damaged. One more row, the seal, has the number of all
rows and the XOR of their digests, so a missing or doubled row breaks it. The seal changes in the same transaction as
the rows, at a cost that does not depend on their number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

DIGEST_BYTES = 16
PROBLEMS_MAX = 100  # listed one by one; a damaged page has hundreds of rows

RowKey: TypeAlias = str | int  # a node's path, or the number of a session
SealedRow: TypeAlias = tuple[Any, ...]

_NODE = struct.Struct("<4sIIqqq")  # node, lengths of path and value, version, owner, numbered
_SESSION = struct.Struct("<4sqqq")  # sess, id, timeout, lent


def node_digest(path: str, value: bytes, version: int, owner: int, numbered: int) -> bytes:
    name = path.encode()
    head = _NODE.pack(b"node", len(name), len(value), version, owner, numbered)
    return blake2b(head + name + value, digest_size=DIGEST_BYTES).digest()


def session_digest(session: int, timeout_ms: int, is_lent: int) -> bytes:
    return blake2b(_SESSION.pack(b"sess", session, timeout_ms, is_lent), digest_size=DIGEST_BYTES).digest()


class RowChecksums:
    """The digests of all rows, by key, and their seal."""

    def __init__(self) -> None:
        self._digests: dict[RowKey, bytes] = {}
        self._sum = 0

    @property
    def row(self) -> tuple[int, bytes]:
        """The seal as stored: how many rows, and the XOR of their digests."""
        return len(self._digests), self._sum.to_bytes(DIGEST_BYTES)

    def after(self, changes: Mapping[RowKey, bytes | None]) -> tuple[int, bytes]:
        """The seal to write with these changes. A digest of None removes the row."""
        rows, total = len(self._digests), self._sum
        for key, digest in changes.items():
            before = self._digests.get(key)
            rows += (digest is not None) - (before is not None)
            total ^= _number(before) ^ _number(digest)
        return rows, total.to_bytes(DIGEST_BYTES)

    def apply(self, changes: Mapping[RowKey, bytes | None]) -> None:
        """Note that these changes were written."""
        self._sum = int.from_bytes(self.after(changes)[1])
        for key, digest in changes.items():
            if digest is None:
                self._digests.pop(key, None)
            else:
                self._digests[key] = digest


def _number(digest: bytes | None) -> int:
    return 0 if digest is None else int.from_bytes(digest)


def problems(nodes: Iterable[SealedRow], sessions: Iterable[SealedRow], seals: Iterable[SealedRow]) -> list[str]:
    """The problems of a registry's rows, each row with its digest at the end. Empty if all rows are as written."""
    found: list[str] = []
    seen: dict[RowKey, bytes | None] = {}
    for row in nodes:
        _judge(row, f"node {str(row[0])[:100]!r}", _is_node, node_digest, seen, found)
    for row in sessions:
        _judge(row, f"session {str(row[0])[:100]}", _is_session, session_digest, seen, found)
    stored = list(seals)
    seal = RowChecksums()
    seal.apply(seen)
    if not found and stored != [seal.row]:
        found.append(f"its {len(seen):,} rows are not those that were sealed: some are gone, or the seal is damaged")
    return found


def _judge(
    row: SealedRow, name: str, is_whole: Any, digest_of: Any, seen: dict[RowKey, bytes | None], found: list[str]
) -> None:
    *values, digest = row
    if not is_whole(values) or digest_of(*values) != digest:
        wrong = f"{name} fails its checksum"
    elif values[0] in seen:
        wrong = f"{name} is there twice"
    else:
        seen[values[0]] = digest
        return
    if len(found) < PROBLEMS_MAX:
        found.append(wrong)


def _is_node(values: SealedRow) -> bool:
    path, value, *numbers = values
    return isinstance(path, str) and isinstance(value, bytes) and _are_numbers(numbers)


def _is_session(values: SealedRow) -> bool:
    return _are_numbers(values)


def _are_numbers(values: Iterable[object]) -> bool:
    return all(isinstance(each, int) and -(1 << 63) <= each < 1 << 63 for each in values)
