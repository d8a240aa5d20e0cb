"""A delay server's directory of format version 1 is opened for ever, and is what docs/internals/formats.md says it is.

With a key for the secrets of its streams, as this version writes it, and without one."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pytest

from fairway.delay.dispatch.dispatcher import Intent
from fairway.runtime.clock import ManualClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from tests.golden.delay import (
    EXPECTED,
    FOLDER,
    KEYED_EXPECTED,
    KEYED_FOLDER,
    START_MS,
    content,
    engine_on,
    write,
)

HELD: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))


def crc(data: bytes) -> int:
    return int(google_crc32c.value(data))


def u(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


async def _content(root: Path, *, is_keyed: bool = False) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    disk = RealDisk(root, post=loop.call_soon_threadsafe)
    engine = engine_on(disk, ManualClock(START_MS), RealRng(), loop.call_soon)
    intents: list[Intent] = []
    for _ in range(1_000):
        intents += engine.on_time()
        if engine.is_idle:
            break
        await asyncio.sleep(0.001)
    try:
        assert (engine.store.findings, engine.log.findings, engine.damaged, engine.stuck) == ([], [], [], [])
        secrets = [len(each.secret) for each in intents]
        assert secrets == [16 if is_keyed else 0] * len(intents)
        assert intents, "one was made, and nobody knows whether it was sent"
        return await content(engine, intents)
    finally:
        await engine.close()


@pytest.mark.parametrize("without", [(), ("checkpoints",), ("index",)], ids="+".join)
@pytest.mark.parametrize("is_keyed", [False, True], ids=["without a key", "with a key"])
def test_the_golden_directory_is_opened_twice_alike(tmp_path: Path, without: tuple[str, ...], is_keyed: bool) -> None:
    root = tmp_path / "data"
    shutil.copytree(KEYED_FOLDER if is_keyed else FOLDER, root)
    held = json.loads((KEYED_EXPECTED if is_keyed else EXPECTED).read_text(encoding="utf-8"))
    for view in without:
        shutil.rmtree(root / view)
    assert asyncio.run(_content(root, is_keyed=is_keyed)) == held
    assert asyncio.run(_content(root, is_keyed=is_keyed)) == held


def test_the_same_story_is_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "again", tmp_path / "again.json")
    files = sorted(path.relative_to(KEYED_FOLDER) for path in KEYED_FOLDER.rglob("*") if path.is_file())
    again = tmp_path / "again"
    copy = again / "schedule" / "manifest.copy"  # which the version that wrote the golden directory did not make
    assert copy.read_bytes() == (again / "schedule" / "manifest").read_bytes()
    copy.unlink()
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    for name in files:
        assert (KEYED_FOLDER / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


# --- a reader made from the tables of docs/internals/formats.md alone ----------------------------------------------------------


def manifest() -> dict[str, Any]:
    data = (FOLDER / "schedule" / "manifest").read_bytes()
    body = data[40:]
    assert (data[:8], u(data, 8, 2), u(data, 10, 2), u(data, 12, 2)) == (b"FWYSCH\r\n", 1, 40, 0)
    assert (u(data, 16, 8), u(data, 24, 4), u(data, 32, 4)) == (len(body), crc(body), crc(data[:32]))
    found: dict[str, Any] = msgspec.msgpack.decode(body)
    return found


def test_the_manifest_names_the_buckets() -> None:
    found = manifest()
    assert [each[:1] + each[2:5] for each in found["buckets"]] == HELD["buckets"]
    assert found["messages_id"] == u((FOLDER / "identity").read_bytes(), 24, 8)


def test_the_buckets_hold_what_is_pending() -> None:
    sequences = []
    catalogued = 0
    for number, log_id, _, start_ms, end_ms, synced_end, catalogue_at in manifest()["buckets"]:
        data = (FOLDER / "schedule" / f"{number:020d}.log").read_bytes()
        assert (data[:8], u(data, 16, 8), u(data, 24, 8), u(data, 60, 4)) == (
            b"FWYSEG\r\n",
            log_id,
            0,
            crc(data[:60]),
        )
        assert synced_end <= len(data)
        at, found, newest = 64, list[tuple[int, int, list[int]]](), 0
        while at < len(data):
            header = data[at : at + 80]
            body = data[at + 80 : at + 80 + u(header, 68, 4)]
            assert (header[:4], u(header, 16, 8), u(header, 24, 8)) == (b"FWR1", log_id, at)
            assert (u(header, 72, 4), u(header, 76, 4)) == (crc(body), crc(header[:76]))
            if header[5] == 7:
                assert catalogue(body) == found
                newest, catalogued = at, catalogued + 1
            else:
                assert header[5] == 5
                found.append((at, u(header, 12, 4), piece(header, body, start_ms, end_ms)))
            at += 80 + len(body)
        assert catalogue_at in (0, newest)
        sequences += [(subject, each) for _, subject, those in found for each in those]
    assert sorted(sequences) == [(1, each) for each in range(6)] + [(2, each) for each in range(4)]
    assert catalogued


def catalogue(body: bytes) -> list[tuple[int, int, list[int]]]:
    """Position, subject id and sequences of the pieces in a CATALOGUE body: the first one of its bucket."""
    pieces, subjects, messages = u(body, 0, 4), u(body, 4, 4), u(body, 8, 4)
    assert (u(body, 16, 8), u(body, 24, 8)) == (0, 64)
    at = 32
    for _ in range(subjects):
        length = u(body, at + 4, 2)
        assert body[at + 8 : at + 8 + length].decode() == {1: "orders", 2: "bills.EU-1_x"}[u(body, at, 4)]
        at += (8 + length + 7) // 8 * 8
    columns = at + 16 * pieces
    assert len(body) == columns + 40 * messages
    found, first = [], 0
    for number in range(pieces):
        position, subject, count = (
            u(body, at + 16 * number + offset, size) for offset, size in ((0, 8), (8, 4), (12, 4))
        )
        found.append((position, subject, [u(body, columns + 8 * each, 8) for each in range(first, first + count)]))
        first += count
    return found


def piece(header: bytes, body: bytes, start_ms: int, end_ms: int) -> list[int]:
    length, flags, count, first = u(body, 0, 2), u(body, 2, 2), u(header, 64, 4), u(header, 48, 8)
    assert body[8 : 8 + length].decode() == {1: "orders", 2: "bills.EU-1_x"}[u(header, 12, 4)]
    at = (8 + length + 7) // 8 * 8
    listed = [u(body, at + 8 * index, 8) for index in range(count)] if flags & 1 else []
    data = body[at + 8 * len(listed) :]
    assert (data[:4], u(data, 14, 2)) == (b"FWYB", count)
    due_at = 80 + (8 * count if u(data, 16, 4) & 1 else 0)
    assert all(start_ms <= u(data, due_at + 8 * index, 8) < end_ms for index in range(count))
    return listed or list(range(first, first + count))


@pytest.mark.parametrize(("folder", "expected"), [(FOLDER, [3, 4, 1, 2, 3, 1]), (KEYED_FOLDER, [3, 4, 9, 1, 2, 3, 1])])
def test_the_dispatch_log_holds_every_decision(folder: Path, expected: list[int]) -> None:
    kinds = []
    for path in sorted((folder / "actions").iterdir()):
        data, at = path.read_bytes(), 64
        while at < len(data):
            header = data[at : at + 80]
            body = data[at + 80 : at + 80 + u(header, 68, 4)]
            if header[5] == 6:
                kinds += decisions(body, u(header, 64, 4))
            at += 80 + len(body)
    assert kinds == expected


def decisions(body: bytes, count: int) -> list[int]:
    kinds, at = [], 0
    for _ in range(count):
        target, ranges = u(body, at + 2, 2), u(body, at + 4, 4)
        end = at + 48 + 16 * ranges
        if body[at] == 1:
            assert body[end : end + target] == b"east"
        kinds.append(body[at])
        at = end + (target + 7) // 8 * 8
    assert at == len(body)
    return kinds
