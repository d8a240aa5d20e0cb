"""The tables of docs/internals/formats.md are enough to read a data directory: here is a reader made from them alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec

from tests.golden.store import EXPECTED, FOLDER

HELD: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))
DIRECTORY_ID, MESSAGES_ID, ACTIONS_ID = (int(each, 16) for each in HELD["identity"])


def crc(data: bytes) -> int:
    return int(google_crc32c.value(data))


def u(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def files(folder: str) -> list[Path]:
    return sorted((FOLDER / folder).iterdir())


def records(log: str, log_id: int) -> Iterator[tuple[bytes, bytes]]:
    """(header, body) of each record."""
    for path in files(log):
        data = path.read_bytes()
        assert data[:8] == b"FWYSEG\r\n"
        assert (u(data, 8, 2), u(data, 10, 2), u(data, 16, 8), u(data, 24, 8)) == (1, 64, log_id, int(path.stem))
        assert u(data, 60, 4) == crc(data[:60])
        at = 64
        while at < len(data):
            header = data[at : at + 80]
            body = data[at + 80 : at + 80 + u(header, 68, 4)]
            assert header[:4] == b"FWR1"
            assert (u(header, 16, 8), u(header, 24, 8)) == (log_id, int(path.stem) + at)
            assert (u(header, 72, 4), u(header, 76, 4)) == (crc(body), crc(header[:76]))
            assert u(header, 32, 8) <= u(header, 24, 8)
            yield header, body
            at += 80 + len(body)


def names_in(body: bytes) -> dict[int, tuple[str, int]]:
    """(name, next sequence) by id, of a SUBJECT body."""
    found = {}
    at = 16
    for _ in range(u(body, 0, 4)):
        length = u(body, at + 4, 4)
        found[u(body, at, 4)] = body[at + 16 : at + 16 + length].decode("ascii"), u(body, at + 8, 8)
        at += 16 + length
    assert not any(body[at:])
    return found


def test_identity() -> None:
    data = (FOLDER / "identity").read_bytes()
    assert (data[:8], u(data, 8, 2), u(data, 10, 2), len(data)) == (b"FWYDIR\r\n", 1, 64, 64)
    assert (u(data, 16, 8), u(data, 24, 8), u(data, 32, 8)) == (DIRECTORY_ID, MESSAGES_ID, ACTIONS_ID)
    assert u(data, 60, 4) == crc(data[:60])


def test_message_log() -> None:
    names: dict[int, str] = {}
    batches: dict[str, list[tuple[int, int, int, str]]] = {}
    for header, body in records("messages", MESSAGES_ID):
        if header[5] == 3:
            names.update({subject: name for subject, (name, _) in names_in(body).items()})
        elif header[5] == 1:
            found = u(header, 48, 8), u(header, 24, 8), u(header, 56, 8), f"{u(body, 48, 8):016x}"
            batches.setdefault(names[u(header, 12, 4)], []).append(found)
        else:
            assert (header[5], body) == (2, b"")
    for name, of in HELD["subjects"].items():
        assert names[of["id"]] == name
        assert batches[name] == [
            (each["first_sequence"], each["position"], each["appended_ms"], each["producer_id"])
            for each in of["batches"]
        ]


def test_action_log() -> None:
    found = []
    for header, body in records("actions", ACTIONS_ID):
        at = 0
        for _ in range(u(header, 64, 4)):
            ranges, detail = u(body, at + 2, 2), u(body, at + 4, 4)
            end = at + 48 + 16 * ranges
            found.append(
                {
                    "group_id": u(body, at + 8, 4),
                    "subject_id": u(body, at + 12, 4),
                    "consumer_id": u(body, at + 16, 4),
                    "attempt": u(body, at + 20, 4),
                    "time_ms": u(body, at + 24, 8),
                    "due_ms": u(body, at + 32, 8),
                    "lot": u(body, at + 40, 8),
                    "ranges": [list(each) for each in struct.iter_unpack("<QQ", body[at + 48 : end])],
                    "detail": body[end : end + detail].hex(),
                }
            )
            at = end + (detail + 7) // 8 * 8
        assert at == len(body)
    assert found == [{key: each[key] for key in each if key != "kind"} for each in HELD["actions"]]


def test_index_files() -> None:
    positions: dict[int, list[int]] = {}
    for path in files("index"):
        data = path.read_bytes()
        assert (data[:8], u(data, 16, 8), u(data, 24, 8)) == (b"FWYIDX\r\n", MESSAGES_ID, int(path.stem))
        directory = data[64 : 64 + 48 * u(data, 40, 4)]
        assert (u(data, 48, 4), u(data, 60, 4)) == (crc(directory), crc(data[:60]))
        for at in range(0, len(directory), 48):
            begin = u(directory, at + 24, 8)
            run = data[begin : begin + 64 * u(directory, at + 4, 4)]
            assert u(directory, at + 40, 4) == crc(run)
            positions.setdefault(u(directory, at, 4), []).extend(
                u(run, each + 16, 8) for each in range(0, len(run), 64)
            )
    for of in HELD["subjects"].values():
        covered = positions[of["id"]]
        assert covered == [each["position"] for each in of["batches"]][: len(covered)]


def test_checkpoint() -> None:
    (path,) = files("checkpoints")
    data = path.read_bytes()
    body = data[40:]
    assert (data[:8], u(data, 8, 2), u(data, 10, 2), u(data, 16, 8)) == (b"FWYCKP\r\n", 1, 40, len(body))
    assert (u(data, 24, 4), u(data, 32, 4)) == (crc(body), crc(data[:32]))
    held = msgspec.msgpack.decode(body, strict=False)
    assert (held["number"], held["messages_id"], held["actions_id"]) == (int(path.stem), MESSAGES_ID, ACTIONS_ID)
    assert {name for name, _ in names_in(held["subjects"]).values()} == set(HELD["subjects"])
    streams, at = {}, 0
    while at < len(held["streams"]):
        count = u(held["streams"], at + 32, 4)
        batches = held["streams"][at + 40 : at + 40 + 48 * count]
        streams[f"{u(held['streams'], at, 8):016x}"] = [u(batches, each + 16, 8) for each in range(0, len(batches), 48)]
        at += 40 + len(batches)
    assert len(streams) == HELD["streams"]
    for producer, firsts in streams.items():
        batches_of = [
            each for of in HELD["subjects"].values() for each in of["batches"] if each["producer_id"] == producer
        ]
        assert firsts == [each["first_sequence"] for each in batches_of][: len(firsts)]
