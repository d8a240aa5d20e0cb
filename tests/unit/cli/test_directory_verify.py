"""`fairway inspect` and `fairway verify`: the JSON shape, the exit status, and a sentence for every bad directory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fairway
from fairway import __version__, batch
from fairway.__main__ import app
from fairway.batch import checksum
from fairway.errors import Code, DirectoryLocked, DiskFull, FairwayError, ReadOnlyDisk, Refused, WrongDirectory
from fairway.group_events import ActionKind, GroupEvent
from fairway.runtime.process import Child
from fairway.runtime.real_disk import RealDisk
from fairway.storage.action_log import Action
from fairway.storage.store import Store, StoreOptions
from tests.tidy.source import ROOT
from tests.unit.cli.directories import KIB, ORDERS, SMALL, append, flip, make, open_store, segments, tree
from tests.unit.cli.running import Cli, up

VERBS = ("inspect", "verify")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "data"
    make(root)
    return root


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "data"))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def as_json(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


# --- what they print -------------------------------------------------------------------------------------------------


def test_version() -> None:
    assert run("--version").stdout == f"fairway {__version__}\n"


@pytest.mark.parametrize("arguments", [["no-such-verb"], ["verify"], ["verify", "--no-such-option", "x"]])
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


TOP = [
    "shape",
    "format_version",
    "directory_id",
    "owner",
    "is_verified",
    "is_sound",
    "bytes_read",
    "messages",
    "actions",
    "subjects",
    "groups",
    "checkpoints",
    "damages",
    "flaws",
    "aside",
    "remarks",
    "records",
    "delay",
]
LOG = ["id", "first_base", "end", "synced_end", "records", "segments"]
SEGMENT = [
    "file",
    "base",
    "end",
    "records",
    "first_appended_ms",
    "last_appended_ms",
    "first_epoch",
    "last_epoch",
    "index",
]
SUBJECT = ["id", "name", "next_sequence", "first_sequence", "batches", "messages", "bytes"]
GROUP = ["id", "first_ms", "last_ms", "actions", "subjects"]
CHECKPOINT = ["file", "why_unreadable", "epoch", "messages_end", "actions_end"]
DAMAGE = ["log", "file", "start", "end", "verdict", "why", "is_known", "subject", "first_sequence", "messages"]
FLAW = ["file", "why", "remedy"]
RECORD = [
    "log",
    "position",
    "bytes",
    "kind",
    "epoch",
    "synced_end",
    "appended_ms",
    "count",
    "subject",
    "first_sequence",
]


def test_json_shape_is_the_documented_one(data: Path) -> None:
    flip(segments(data)[0], 3_000)
    flip(next((data / "index").iterdir()), 30)
    found = as_json("inspect", data, "--records", "1")
    assert list(found) == TOP
    assert found["shape"] == 1
    assert [list(found[log]) for log in ("messages", "actions")] == [LOG, LOG]
    assert list(found["messages"]["segments"][0]) == SEGMENT
    listed = [list(found[name][0]) for name in ("subjects", "groups", "checkpoints", "damages", "flaws", "records")]
    assert listed == [SUBJECT, GROUP, CHECKPOINT, DAMAGE, FLAW, RECORD]
    assert len(found["records"]) == 2


def test_documentation_names_every_field() -> None:
    operations = (ROOT / "docs" / "how-to" / "operations.md").read_text(encoding="utf-8")
    names = {*TOP, *LOG, *SEGMENT, *SUBJECT, *GROUP, *CHECKPOINT, *DAMAGE, *FLAW, *RECORD}
    assert not {name for name in names if f"`{name}`" not in operations}


def test_sound_directory(sound: Path) -> None:
    before = tree(sound)
    assert as_json("verify", sound)["is_verified"]
    assert not as_json("inspect", sound)["is_verified"]
    assert run("verify", sound).stdout.startswith(f"sound: {sound}: 26.")
    shown = run("inspect", sound).stdout
    for word in ("orders.changed", "stock.moved", "40 DATA", "40 ACK", segments(sound)[1].name, "not in use"):
        assert word in shown
    assert tree(sound) == before


def test_damage_is_the_exit_status_of_verify_alone(data: Path) -> None:
    flip(segments(data)[0], 3_000)
    before = tree(data)
    assert as_json("verify", data, status=4)["damages"][0]["verdict"] == "rotten"
    assert as_json("inspect", data)["damages"][0]["verdict"] == "rotten"
    judged = run("verify", data)
    assert judged.exit_code == 4
    assert "damaged: " in judged.stdout
    assert "rotten: the disk has lost what it once had" in judged.stdout
    assert "damaged body" in run("inspect", data).stdout
    assert tree(data) == before


def test_torn_tail_says_what_happens_next(data: Path) -> None:
    shutil.rmtree(data / "checkpoints")
    path = segments(data)[-1]
    path.write_bytes(path.read_bytes()[:-9])
    result = run("verify", data)
    assert result.exit_code == 4
    assert "The next start cuts it off" in result.stdout


def test_it_runs_as_a_program(sound: Path) -> None:
    command = [sys.executable, "-m", "fairway", "verify", str(sound)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT / "src")})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("sound: ")


# --- directories that cannot be judged, or opened --------------------------------------------------------------------


def refused(root: Path, *words: str) -> None:
    """Both verbs fail with one sentence on stderr that has these words, and change nothing."""
    before = tree(root) if root.is_dir() else None
    for verb in VERBS:
        result = run(verb, root, "--json")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"fairway {verb}: ")
        assert result.stderr.count("\n") == 1
        for word in (str(root), *words):
            assert word in result.stderr
    assert (tree(root) if root.is_dir() else None) == before


def unopened(root: Path, error: type[FairwayError], match: str) -> None:
    """The store refuses the directory and leaves its data alone (the lock is not data)."""

    async def attempt() -> None:
        await open_store(root)

    before = tree(root)
    with pytest.raises(error, match=match):
        asyncio.run(attempt())
    after = tree(root)
    for each in (before, after):
        each.pop("lock", None)
    assert after == before


def test_missing_directory(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "there is no directory", "check the path")
    assert not (tmp_path / "absent").exists()


def test_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "name the data directory itself")


def test_empty_directory(tmp_path: Path) -> None:
    refused(tmp_path, "is empty", "name one that Fairway has written to")


def test_directory_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "PG_VERSION").write_text("17\n")
    refused(tmp_path, "no Fairway data", "choose an empty directory, or one that Fairway made")
    unopened(tmp_path, WrongDirectory, "no Fairway data")
    assert not (tmp_path / "lock").exists()


def newer(path: Path, version_at: int, crc_at: int) -> None:
    """Give a file of ours format version 9, checksum and all."""
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, version_at, 9)
    struct.pack_into("<I", content, crc_at, checksum(bytes(content[:crc_at])))
    path.write_bytes(content)


def test_newer_identity(data: Path) -> None:
    newer(data / "identity", 8, 60)
    refused(data, "format version 9", "use the version that wrote it")
    unopened(data, WrongDirectory, "format version 9")


@pytest.mark.parametrize("log", ["messages", "actions"])
@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_newer_segment(data: Path, log: str, number: int, checkpointed: bool) -> None:
    if not checkpointed:
        shutil.rmtree(data / "checkpoints")
    path = segments(data, log)[number]
    newer(path, 8, 60)
    refused(data, f"{log}/{path.name}", "segment format version 9", "use the version that wrote it")
    unopened(data, WrongDirectory, "segment format version 9")


def test_newer_checkpoint(data: Path) -> None:
    [path] = (data / "checkpoints").iterdir()
    newer(path, 8, 32)
    refused(data, f"checkpoints/{path.name}", "checkpoint format version 9", "use the version that wrote it")
    unopened(data, WrongDirectory, "checkpoint format version 9")


def test_newer_record(data: Path) -> None:
    content = bytearray(segments(data)[0].read_bytes())
    content[64 + 4] = 9  # the version of the first record
    struct.pack_into("<I", content, 64 + 76, checksum(bytes(content[64 : 64 + 76])))
    segments(data)[0].write_bytes(content)
    shutil.rmtree(data / "checkpoints")
    refused(data, "newer format", "read it with the version that wrote it")
    unopened(data, WrongDirectory, "newer format")


# --- disks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB; also mounted read-only by whoever asks for that."""
    point = tmp_path / "disk"
    point.mkdir()
    mount("-t", "tmpfs", "-o", "size=512k", "tmpfs", point)
    yield point
    subprocess.run(["umount", str(point)], check=True)


def mount(*arguments: str | Path) -> None:
    try:
        done = subprocess.run(["mount", *map(str, arguments)], check=False, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"this machine has no mount: {error}")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")


def test_read_only_disk(small_disk: Path) -> None:
    root = small_disk / "data"
    make(root)
    mount("-o", "remount,ro", small_disk)
    unopened(root, ReadOnlyDisk, "Read-only file system; mount the file system writable")
    assert as_json("verify", root)["is_sound"]
    assert "not in use" in run("inspect", root).stdout


def test_full_disk_stops_produce_and_not_acks(small_disk: Path) -> None:
    root = small_disk / "data"
    options = StoreOptions(segment_bytes=64 * KIB, action_segment_bytes=16 * KIB, low_water_bytes=0)

    async def fill() -> int:
        store = await open_store(root, options=options)
        stored = 0
        while (refusal := await _produced(store, stored)) is None:
            stored += 1
        assert refusal.code is Code.READ_ONLY
        acks = store.act([Action(7, 1, GroupEvent(ActionKind.ACK, 1, ranges=((0, stored),)))])
        await store.actions.log.flusher.durable(acks.end)
        await store.close()
        return stored

    stored = asyncio.run(fill())
    assert stored > 50
    for _ in range(2):  # as it was left, and after one more start on the full disk
        found = as_json("verify", root)
        assert (found["subjects"][0]["messages"], found["groups"][0]["actions"]) == (stored, {"ACK": 1})
        asyncio.run(_open_and_close(root, options))


async def _produced(store: Store, sequence: int) -> Refused | None:
    """Store one message; the refusal, if it was refused."""
    data = batch.encode([b"x" * 4_000], producer_id=1, first_sequence=sequence, created_ms=1)
    try:
        await store.durable(store.produce(ORDERS, data))
    except Refused as refusal:
        return refusal
    return None


async def _open_and_close(root: Path, options: StoreOptions = SMALL) -> None:
    store = await open_store(root, options=options)
    await store.close()


def test_disk_without_room_for_a_first_start(small_disk: Path) -> None:
    with (small_disk / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while True:
            other.write(bytes(4 * KIB))
    root = small_disk / "data"
    with pytest.raises(DiskFull, match="No space left on device; free some room"):
        asyncio.run(_open_and_close(root))


# --- two processes ---------------------------------------------------------------------------------------------------


def test_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    root = tmp_path / "data"
    with Child("fairway", "demo", "log", "--writer", "--data", str(root)) as first:
        assert first.line(timeout_s=30) == "0"
        with pytest.raises(DirectoryLocked, match=f"process {first.pid} is using it; stop it or choose another"):
            asyncio.run(_open_and_close(root))
        found = as_json("verify", root)
        assert (found["is_sound"], found["owner"]) == (True, first.pid)
        assert f"in use by process {first.pid}" in run("inspect", root).stdout
        first.kill()
    disk = RealDisk(root)
    assert disk.owner() is None  # the lock died with its owner
    disk.close()
    asyncio.run(_reopened(root))
    assert as_json("verify", root)["is_sound"]


async def _reopened(root: Path) -> None:
    store = await open_store(root)
    assert store.messages.log.epoch == 2
    await append(store, 3, stream=50)
    await store.close()


def test_looking_never_keeps_an_owner_out(tmp_path: Path) -> None:
    """`owner` asks by trying the lock; a process that starts at that instant must not take us for another owner."""
    root = tmp_path / "data"
    make(root, batches=1)
    with (root / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        release = threading.Timer(0.015, fcntl.flock, (looking, fcntl.LOCK_UN))
        release.start()
        asyncio.run(_open_and_close(root))
        release.join()


@pytest.mark.parametrize("name", ["manifest", "manifest.copy", "bucket"])
def test_a_flipped_bit_among_delayed_messages_is_seen_from_above_and_from_within(tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    with up(data) as (child, url):
        with fairway.connect(url) as client:
            client.send_many("order.remind", [b"pay"] * 50, after=86_400).result()
        child.terminate()
        assert child.wait(timeout_s=60) == 0
    cli = Cli("")
    assert "sound" in cli.run("verify", str(data))
    files = sorted((data / "delay" / "schedule").iterdir())
    [path] = [each for each in files if each.name == name or (name == "bucket" and each.suffix == ".log")]
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    path.write_bytes(flipped)
    for directory in (data, data / "delay"):
        assert path.name in cli.run("verify", str(directory), status=4)
    with up(data) as (child, url):
        with fairway.connect(url) as client:
            assert client.delayed.count() == 50
        child.terminate()
        assert child.wait(timeout_s=60) == 0
