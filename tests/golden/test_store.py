"""A data directory of format version 1 is opened for ever, with its views and without them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairway.group_events import GroupEvent, ActionKind
from fairway import batch
from fairway.errors import Code, Refused
from fairway.storage import action_log, checkpoint, directory, index_file, message_log, record, segment
from fairway.storage.action_log import Action
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.store import Store, StoreOptions
from fairway.storage.message_log import entries_of_segment
from fairway.runtime.clock import ManualClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from tests.golden.store import (
    BILLS,
    EXPECTED,
    FOLDER,
    GUARDED_EXPECTED,
    GUARDED_FOLDER,
    REMOVED_EXPECTED,
    REMOVED_FOLDER,
    ORDERS,
    SECRETS,
    SET_BACK_EXPECTED,
    SET_BACK_FOLDER,
    YEAR_MS,
    content,
    records,
    write,
)

LOGS = (message_log.DIRECTORY, action_log.DIRECTORY)

# Where append times went back, a time finds what was dated ahead before it.
FOUND = {6: 3, 15: 9}

# Kinds that came after the golden directory was written, with their bytes.
ADDED: dict[str, tuple[Action, str]] = {
    "PARK": (
        Action(3, 7, GroupEvent(ActionKind.PARK, 1_700_000_000_000, lot=4_205, ranges=((4_201, 2),), detail=bytes(range(16)))),
        (
            "1000010010000000 0300000007000000 0000000000000000 0068e5cf8b010000 0000000000000000 6d10000000000000 "
            "6910000000000000 0200000000000000 0001020304050607 08090a0b0c0d0e0f"
        ),
    ),
    "GO_ON": (
        Action(3, 7, GroupEvent(ActionKind.GO_ON, 1_700_000_000_000, lot=2**64 - 1)),
        "1100000000000000 0300000007000000 0000000000000000 0068e5cf8b010000 0000000000000000 ffffffffffffffff",
    ),
    "VERIFIER": (
        Action(3, 7, GroupEvent(ActionKind.VERIFIER, 1_700_000_000_000, 5, detail=bytes(range(32)))),
        (
            "1200000020000000 0300000007000000 0500000000000000 0068e5cf8b010000 0000000000000000 0000000000000000 "
            "0001020304050607 08090a0b0c0d0e0f 1011121314151617 18191a1b1c1d1e1f"
        ),
    ),
}


# Details that came later, of kinds that had none: `lost`.
LOST: dict[str, tuple[Action, str]] = {
    "ACK": (
        Action(3, 7, GroupEvent(ActionKind.ACK, 1_700_000_000_000, 5, 2, 0, 4_201, ((4_201, 2),), b"lost")),
        (
            "0600010004000000 0300000007000000 0500000002000000 0068e5cf8b010000 0000000000000000 6910000000000000 "
            "6910000000000000 0200000000000000 6c6f737400000000"
        ),
    ),
    "DEAD": (
        Action(3, 7, GroupEvent(ActionKind.DEAD, 1_700_000_000_000, 0, 2, 0, 4_201, ((4_201, 2),), b"lost")),
        (
            "0800010004000000 0300000007000000 0000000002000000 0068e5cf8b010000 0000000000000000 6910000000000000 "
            "6910000000000000 0200000000000000 6c6f737400000000"
        ),
    ),
}


def expected() -> dict[str, Any]:
    held: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return held


def identity() -> directory.DirectoryIdentity:
    found = directory.identify(RealDisk(FOLDER))
    assert found is not None
    return found


def opened(root: Path, then: Callable[[Store, RealDisk], None]) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        disk = RealDisk(root, post=loop.call_soon_threadsafe)
        options = StoreOptions(low_water_bytes=0, action_segment_bytes=4_096)
        store = Store.open(disk, ManualClock(), RealRng(), defer=loop.call_soon, options=options)
        try:
            then(store, disk)
        finally:
            await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("without", [(), ("checkpoints",), ("index",), ("checkpoints", "index")], ids="+".join)
def test_the_golden_directory_is_opened(tmp_path: Path, without: tuple[str, ...]) -> None:
    root = tmp_path / "data"
    shutil.copytree(FOLDER, root)
    for view in without:
        shutil.rmtree(root / view)

    def check(store: Store, disk: RealDisk) -> None:
        assert store.findings == []
        assert content(store, disk) == expected()

    opened(root, check)
    opened(root, check)  # and again, as this version has left it


@pytest.mark.parametrize("without", [(), ("checkpoints",), ("index",), ("checkpoints", "index")], ids="+".join)
def test_the_one_whose_streams_have_secrets_is_opened_and_they_count(tmp_path: Path, without: tuple[str, ...]) -> None:
    root = tmp_path / "data"
    shutil.copytree(GUARDED_FOLDER, root)
    for view in without:
        shutil.rmtree(root / view)
    held = json.loads(GUARDED_EXPECTED.read_text(encoding="utf-8"))

    def check(store: Store, disk: RealDisk) -> None:
        assert store.findings == []
        assert content(store, disk) == held
        for subject, (producer, secret) in zip((ORDERS, BILLS), SECRETS.items(), strict=True):
            data = batch.encode([b"a stranger's"], producer_id=producer, first_sequence=0, created_ms=0)
            with pytest.raises(Refused) as caught:
                store.produce(subject, data)
            assert caught.value.code is Code.FOREIGN_STREAM
            with pytest.raises(PlaceTaken):
                store.produce(subject, data, secret=secret)

    opened(root, check)
    opened(root, check)


def test_the_guarded_one_is_what_this_version_writes(tmp_path: Path) -> None:
    assert write(tmp_path / "new", tmp_path / "new.json", is_guarded=True)
    for path in sorted(each for each in GUARDED_FOLDER.rglob("*") if each.is_file()):
        assert (tmp_path / "new" / path.relative_to(GUARDED_FOLDER)).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("without", [(), ("checkpoints",), ("index",), ("checkpoints", "index")], ids="+".join)
def test_the_one_whose_append_times_go_back_is_opened_and_they_count(tmp_path: Path, without: tuple[str, ...]) -> None:
    root = tmp_path / "data"
    shutil.copytree(SET_BACK_FOLDER, root)
    for view in without:
        shutil.rmtree(root / view)
    held = json.loads(SET_BACK_EXPECTED.read_text(encoding="utf-8"))
    times = [each["appended_ms"] for each in held["subjects"]["orders"]["batches"]]
    right = [*range(3), *range(6, 9), *range(15, 18)]
    assert [number for number, time_ms in enumerate(times) if time_ms < times[0] + YEAR_MS // 2] == right

    def check(store: Store, disk: RealDisk) -> None:
        assert store.findings == []
        assert content(store, disk) == held
        for log in (store.messages.log, store.actions.log):
            assert sum(each.set_back_ms > 0 for each in log.segments) == 2
        for number in right:
            assert store.messages.sequence_at(1, times[number]) == FOUND.get(number, number)
        assert [store.messages.sequence_at(1, times[number]) for number in (3, 9, 14)] == [None] * 3

    opened(root, check)
    opened(root, check)


def test_the_one_whose_append_times_go_back_is_what_this_version_writes(tmp_path: Path) -> None:
    assert write(tmp_path / "new", tmp_path / "new.json", is_set_back=True)
    for path in sorted(each for each in SET_BACK_FOLDER.rglob("*") if each.is_file()):
        assert (tmp_path / "new" / path.relative_to(SET_BACK_FOLDER)).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("without", [(), ("checkpoints",), ("index",), ("checkpoints", "index")], ids="+".join)
def test_the_one_with_removed_subjects_is_opened_and_they_stay_removed(
    tmp_path: Path, without: tuple[str, ...]
) -> None:
    root = tmp_path / "data"
    shutil.copytree(REMOVED_FOLDER, root)
    for view in without:
        shutil.rmtree(root / view)
    held = json.loads(REMOVED_EXPECTED.read_text(encoding="utf-8"))
    assert {name: each["id"] for name, each in held["subjects"].items()} == {
        "orders": 1, "bills.EU-1_x": 3, "unwritten": 4,
    }  # fmt: skip
    assert [each["first_sequence"] for each in held["subjects"]["bills.EU-1_x"]["batches"]] == [*range(9, 15)]

    def check(store: Store, disk: RealDisk) -> None:
        assert store.findings == []
        store.messages.settle_removals()
        found = content(store, disk)
        assert {**found, "streams": 0} == {**held, "streams": 0}  # streams into removed subjects may be forgotten
        assert [store.messages.views.subjects.is_removed(each) for each in (1, 2, 5)] == [False, True, True]
        assert store.messages.views.subjects.by_id(4).is_unwritten

    opened(root, check)
    opened(root, check)


def test_the_one_with_removed_subjects_is_what_this_version_writes(tmp_path: Path) -> None:
    assert write(tmp_path / "new", tmp_path / "new.json", is_removed=True)
    for path in sorted(each for each in REMOVED_FOLDER.rglob("*") if each.is_file()):
        assert (tmp_path / "new" / path.relative_to(REMOVED_FOLDER)).read_bytes() == path.read_bytes(), path.name


def test_its_checkpoint_says_where_times_went_back_and_what_time_it_was() -> None:
    (path,) = (SET_BACK_FOLDER / "checkpoints").iterdir()
    data = path.read_bytes()
    found = checkpoint.unpack(data)
    assert b"".join(bytes(part) for part in checkpoint.pack(found)) == data
    for mark in (found.messages, found.actions):
        [(base, set_back_ms)] = mark.set_back_ms.items()
        assert set_back_ms < mark.newest_ms[max(each for each in mark.newest_ms if each < base)] - YEAR_MS // 2
    assert 0 < found.aging_ms < max(found.messages.newest_ms.values()) - YEAR_MS


def test_a_checkpoint_of_a_copy_whose_clock_is_apart_is_read_and_written_alike() -> None:
    data = (FOLDER.parent / "checkpoint-v1-latest.ckpt").read_bytes()
    found = checkpoint.unpack(data)
    assert (found.aging_ms, found.latest_ms) == (1_700_000_000_000, 1_700_000_600_000)
    assert found.messages.set_back_ms == {4_096: 1_699_999_000_000}
    assert b"".join(bytes(part) for part in checkpoint.pack(found)) == data


def test_a_checkpoint_of_a_store_that_holds_a_jump_of_the_clock_back_is_read_and_written_alike() -> None:
    data = (FOLDER.parent / "checkpoint-v1-held.ckpt").read_bytes()
    found = checkpoint.unpack(data)
    assert (found.aging_ms, found.held_to_ms, found.held_for_ms) == (1_700_000_000_000, 1_700_003_000_000, 2_400_000)
    assert b"".join(bytes(part) for part in checkpoint.pack(found)) == data


def test_it_is_what_it_should_be() -> None:
    """Several segments, both logs, a checkpoint, indexes: or it would prove little."""
    for folder, least in (("messages", 2), ("actions", 2), ("index", 2), ("checkpoints", 1)):
        assert len(list((FOLDER / folder).iterdir())) >= least
    held = expected()
    assert len(held["subjects"]) == 2
    kinds = {kind.name for kind in ActionKind}
    assert {each["kind"] for each in held["actions"]} == kinds - ADDED.keys()
    assert ADDED.keys() <= kinds


@pytest.mark.parametrize("kind", ADDED)
def test_actions_that_were_added_later_are_read_and_written_as_they_always_were(kind: str) -> None:
    action, packed = ADDED[kind]
    assert action_log.pack([action]).hex(" ", 8) == packed
    assert list(action_log.unpack(bytes.fromhex(packed))) == [action]


@pytest.mark.parametrize("kind", LOST)
def test_so_are_details_that_were_added_later(kind: str) -> None:
    action, packed = LOST[kind]
    assert action_log.pack([action]).hex(" ", 8) == packed
    assert list(action_log.unpack(bytes.fromhex(packed))) == [action]


# --- while version 1 is the current one, what was read is written as it was ------------------------------------------


@pytest.mark.parametrize("log", LOGS)
def test_records_and_segments_are_written_as_they_always_were(log: str) -> None:
    disk = RealDisk(FOLDER)
    log_id = identity()[1 + LOGS.index(log)]
    written: dict[int, bytes] = {}
    for name in disk.listing(log):
        base = segment.base_of(name)
        assert base is not None
        data = (FOLDER / log / name).read_bytes()
        epoch = int.from_bytes(data[32:40], "little")
        assert segment.parse_header(data) == (log_id, base)
        written[base] = segment.pack_header(log_id, base, epoch)
    for found in records(disk, log, log_id):
        base = max(each for each in written if each <= found.header.position)
        written[base] += record.pack_header(found.header, log_id) + found.body
    for base, data in written.items():
        assert data == (FOLDER / segment.file_name(log, base)).read_bytes()
    disk.close()


def test_indexes_are_written_as_they_always_were() -> None:
    disk = RealDisk(FOLDER)
    log_id = identity().messages_id
    for path in sorted((FOLDER / "index").iterdir()):
        base = int(path.stem)
        file = disk.open(f"index/{path.name}")
        covered_end, runs = index_file.read_directory(file, log_id, base)
        entries = {subject: index_file.read_run(file, run) for subject, run in runs.items()}
        parts, _ = index_file.pack(log_id, base, covered_end, entries)
        assert b"".join(bytes(part) for part in parts) == path.read_bytes()
        rebuilt = entries_of_segment(disk, message_log.DIRECTORY, log_id, base)
        for subject, data in entries.items():
            assert rebuilt[subject].startswith(data)
    disk.close()


def test_checkpoint_and_identity_are_written_as_they_always_were() -> None:
    (path,) = (FOLDER / "checkpoints").iterdir()
    data = path.read_bytes()
    assert b"".join(bytes(part) for part in checkpoint.pack(checkpoint.unpack(data))) == data
    assert [f"{each:016x}" for each in identity()] == expected()["identity"]


def test_the_golden_directory_is_never_written_again(tmp_path: Path) -> None:
    assert write(tmp_path / "new", tmp_path / "new.json")
    assert (tmp_path / "new" / "identity").read_bytes() == (FOLDER / "identity").read_bytes()
    (tmp_path / "new" / "identity").write_bytes(b"what lies on somebody's disk")
    assert not write(tmp_path / "new", tmp_path / "new.json")
    assert (tmp_path / "new" / "identity").read_bytes() == b"what lies on somebody's disk"
