"""The survey sees what is there, agrees with recovery on what is wrong, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fairway.batch import checksum
from fairway.errors import FairwayError, NoSuchFile, WrongDirectory
from fairway.runtime.file_system import RealFile
from fairway.runtime.real_disk import RealDisk
from fairway.storage import checkpoint as checkpoints
from fairway.storage import directory, index_file, record, segment, subjects
from fairway.storage.record import Record, RecordKind
from fairway.storage.recovery import DamageVerdict
from fairway.storage.retention import Policy
from fairway.storage.segment import SegmentScan
from fairway.storage.store import Store
from fairway.storage.survey import Progress, survey
from fairway.storage.survey_report import DirectorySurvey
from tests.unit.cli.directories import KIB, SMALL, append, flip, make, open_store, segments, tree


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "data"
    make(root)
    return root


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(sound, tmp_path / "data"))


@pytest.fixture
def crashed(data: Path) -> Path:
    """The same without checkpoints: the last record of each log is not known to be synced."""
    shutil.rmtree(data / "checkpoints")
    return data


def look(
    root: Path, *, verify: bool = True, records_max: int = 0, progress: Progress = lambda _d, _t: None
) -> DirectorySurvey:
    disk = RealDisk(root)
    try:
        return survey(disk, verify=verify, records_max=records_max, owner=disk.owner, progress=progress)
    finally:
        disk.close()


def spans(found: DirectorySurvey) -> list[tuple[str, str, int, int]]:
    return [(each.log, each.verdict, each.start, each.end) for each in found.damages]


# --- what is there ----------------------------------------------------------------------------------------------------


def test_sound_directory_is_described_and_left_alone(sound: Path) -> None:
    before = tree(sound)
    found = look(sound, records_max=2)
    assert tree(sound) == before
    assert found.is_sound
    assert (found.damages, found.flaws, found.remarks, found.aside, found.owner) == ([], [], [], [], None)
    assert (found.messages.records["DATA"], found.actions.records["ACTIONS"]) == (40, 40)
    assert [each.file for each in found.messages.segments] == [f"messages/{path.name}" for path in segments(sound)]
    assert {each.index for each in found.messages.segments} == {"sound"}
    assert found.messages.end == found.messages.synced_end == sum(path.stat().st_size for path in segments(sound))
    names = [(each.name, each.first_sequence, each.next_sequence, each.batches) for each in found.subjects]
    assert names == [("orders.changed", 0, 135, 27), ("stock.moved", 0, 65, 13)]
    assert [(each.id, each.actions, each.first_ms, each.last_ms) for each in found.groups] == [
        (7, {"ACK": 40}, 2_000, 2_039)
    ]
    assert [each.messages_end for each in found.checkpoints] == [found.messages.end]
    assert [(each.log, each.kind) for each in found.records[1:3]] == [("messages", "DATA"), ("actions", "ACTIONS")]
    assert found.records[1].subject == "orders.changed"


def test_progress_ends_where_it_should(data: Path) -> None:
    told: list[tuple[int, int]] = []
    flip(segments(data)[0], 3_000)
    look(data, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > sum(path.stat().st_size for path in segments(data))


def test_fresh_directory_without_a_record_is_sound(tmp_path: Path) -> None:
    make(tmp_path / "data", batches=0)
    found = look(tmp_path / "data")
    assert found.is_sound
    assert not found.subjects
    assert not found.groups


def test_what_retention_deleted_is_not_missed(tmp_path: Path) -> None:
    root = tmp_path / "data"
    options = replace(SMALL, retention=Policy(bytes_max=9 * KIB))
    make(root, then=Store.retain, options=options)
    first = segments(root)[0]
    assert int(first.stem) > 0
    (root / "index" / f"{0:020d}.idx").write_bytes(b"a process was killed before it deleted this")
    (root / "messages" / f"{0:020d}.log").write_bytes(b"and this")
    found = look(root)
    assert found.is_sound
    assert found.messages.first_base == int(first.stem)
    assert [(each.first_sequence or 0) > 0 for each in found.subjects] == [True, True]
    assert [remark.split()[0] for remark in found.remarks] == [f"messages/{0:020d}.log", f"index/{0:020d}.idx"]


def test_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WrongDirectory, match="empty: name one that Fairway has written to"):
        look(tmp_path)
    assert tree(tmp_path) == {}


# --- damage -----------------------------------------------------------------------------------------------------------


def _recover(root: Path) -> list[tuple[str, str, int, int]]:
    async def opened() -> list[tuple[str, str, int, int]]:
        store = await open_store(root)
        found = [(each.log, each.verdict.value, each.damage.start, each.damage.end) for each in store.findings]
        await store.close()
        return found

    return asyncio.run(opened())


def _spoilt(root: Path, name: str, offset: int, cut: bool) -> None:
    path = root / name
    if cut:
        path.write_bytes(path.read_bytes()[:offset])
    else:
        flip(path, offset)


def _places() -> Iterator[tuple[str, int, bool]]:
    for log, base, sizes in (("messages", 0, range(0, 8_000, 611)), ("actions", 0, range(0, 4_000, 503))):
        for offset in sizes:
            yield segment.file_name(log, base), offset, False
            yield segment.file_name(log, base), offset, True


@pytest.mark.parametrize(("name", "offset", "cut"), list(_places()))
def test_survey_and_recovery_agree(crashed: Path, name: str, offset: int, cut: bool) -> None:
    _spoilt(crashed, name, offset, cut)
    before = tree(crashed)
    found = look(crashed)
    assert tree(crashed) == before
    assert not found.is_sound
    assert spans(found) == _recover(crashed)


@pytest.mark.parametrize("log", ["messages", "actions"])
@pytest.mark.parametrize("from_end", [1, 40, 90, 130])
@pytest.mark.parametrize("cut", [False, True])
def test_tail_is_torn_for_both(crashed: Path, log: str, from_end: int, cut: bool) -> None:
    newest = segments(crashed, log)[-1]
    _spoilt(crashed, f"{log}/{newest.name}", newest.stat().st_size - from_end, cut)
    found = look(crashed)
    assert [each.verdict for each in found.damages] == ["torn"]
    assert spans(found) == _recover(crashed)
    healed = look(crashed)
    assert healed.is_sound
    assert [each.bytes for each in healed.aside] == [each.end - each.start for each in found.damages]


def test_rot_below_a_checkpoint_is_found(data: Path) -> None:
    flip(segments(data)[1], 700)
    found = look(data)
    assert [(each.log, each.verdict, each.is_known) for each in found.damages] == [("messages", "rotten", False)]
    [damage] = found.damages
    assert damage.file == f"messages/{segments(data)[1].name}"
    assert damage.start <= int(segments(data)[1].stem) + 700 < damage.end
    assert damage.subject in ("orders.changed", "stock.moved")
    assert sum(each.batches for each in found.subjects) == 39
    assert not found.flaws  # the index may list what was lost since it was made


def test_rot_that_a_checkpoint_lists_is_known(crashed: Path) -> None:
    flip(segments(crashed)[1], 700)
    assert [verdict for _, verdict, _, _ in _recover(crashed)] == [DamageVerdict.ROTTEN.value]
    assert [each.is_known for each in look(crashed).damages] == [True]


def test_missing_segment_is_rotten(data: Path) -> None:
    gone = segments(data)[1]
    size = gone.stat().st_size
    gone.unlink()
    base = int(gone.stem)
    assert spans(look(data)) == [("messages", "rotten", base, base + size)]


def test_intact_record_with_a_broken_batch_is_invalid(data: Path) -> None:
    path = segments(data)[0]
    victim = next(each for each in _records(data, path) if each.header.kind == RecordKind.DATA)
    body = bytearray(victim.body)
    body[-1] ^= 1
    forged = msgspec.structs.replace(victim.header, body_crc=checksum(bytes(body)))
    content = bytearray(path.read_bytes())
    content[victim.header.position : victim.header.end] = record.pack_header(forged, _log_id(data)) + body
    path.write_bytes(content)
    assert look(data, verify=False).is_sound  # the checksums hold
    [damage] = look(data).damages
    assert (damage.verdict, damage.start, damage.end) == ("invalid", victim.header.position, victim.header.end)


def _records(root: Path, path: Path) -> list[Record]:
    disk = RealDisk(root)
    file = disk.open(f"messages/{path.name}")
    found = list(SegmentScan(file, int(path.stem), int(path.stem) + segment.HEADER_BYTES, _log_id(root)))
    disk.close()
    return [each for each in found if isinstance(each, Record)]


def _log_id(root: Path) -> int:
    return segment.parse_header(segments(root)[0].read_bytes())[0]


# --- views ------------------------------------------------------------------------------------------------------------


def _index(root: Path, number: int) -> Path:
    return root / index_file.file_name(int(segments(root)[number].stem))


def test_missing_index_is_only_remarked_upon(data: Path) -> None:
    _index(data, 0).unlink()
    found = look(data)
    assert found.is_sound
    assert [each.index for each in found.messages.segments] == ["missing", "sound", "sound"]
    assert "the next start makes it again" in found.remarks[0]


@pytest.mark.parametrize("offset", [3, 40, 70, 200, -1])
def test_rotten_index_is_a_flaw(data: Path, offset: int) -> None:
    path = _index(data, 0)
    flip(path, offset)
    found = look(data)
    assert [(each.file, found.messages.segments[0].index) for each in found.flaws] == [
        (f"index/{path.name}", "unreadable")
    ]
    assert "remove it while nobody uses the directory" in found.flaws[0].remedy


def _rewrite_index(root: Path, number: int, *, less: int = 0, shift: int = 0, short: int = 0) -> None:
    """An index whose checksums hold, with entries left out or moved, or made before the segment was complete."""
    disk = RealDisk(root)
    base = int(segments(root)[number].stem)
    file = disk.open(index_file.file_name(base))
    end, runs = index_file.read_directory(file, _log_id(root), base)
    entries = {each: index_file.read_run(file, run) for each, run in runs.items()}
    first = min(entries)
    kept = entries[first][: len(entries[first]) - less * index_file.ENTRY_BYTES]
    fields = list(index_file.ENTRY.unpack_from(kept))
    fields[3] += shift
    entries[first] = index_file.ENTRY.pack(*fields) + kept[index_file.ENTRY_BYTES :]
    if short:
        last = index_file.ENTRY.unpack_from(entries[first], len(entries[first]) - index_file.ENTRY_BYTES)[3]
        end = last - 8
        at = index_file.ENTRY_BYTES
        for each, run in entries.items():
            split = [run[start : start + at] for start in range(0, len(run), at)]
            entries[each] = b"".join(part for part in split if index_file.ENTRY.unpack(part)[3] < end)
    parts, _ = index_file.pack(_log_id(root), base, end, entries)
    file.close()
    disk.publish(index_file.file_name(base), parts)
    disk.close()


@pytest.mark.parametrize("spoil", [{"less": 1}, {"shift": 8}])
def test_index_that_contradicts_its_segment_is_lying(data: Path, spoil: dict[str, int]) -> None:
    _rewrite_index(data, 0, **spoil)
    assert look(data, verify=False).messages.segments[0].index == "sound"  # only verify reads the entries
    found = look(data)
    assert (found.is_sound, found.messages.segments[0].index) == (False, "lying")
    assert "it contradicts its segment: subject 1 differs from position" in found.flaws[0].why


def test_index_made_before_its_segment_was_complete_is_stale(data: Path) -> None:
    _rewrite_index(data, 0, short=1)
    found = look(data)
    assert (found.is_sound, found.messages.segments[0].index) == (True, "stale")


def test_rotten_checkpoint_is_a_flaw(data: Path) -> None:
    [path] = (data / "checkpoints").iterdir()
    flip(path, 50)
    found = look(data)
    assert not found.is_sound
    assert [each.file for each in found.flaws] == [f"checkpoints/{path.name}"]
    assert found.checkpoints[0].why_unreadable == "the body fails its checksum"


def test_checkpoint_with_broken_verifiers_is_a_flaw(data: Path) -> None:
    [path] = (data / "checkpoints").iterdir()
    known = checkpoints.unpack(path.read_bytes())
    parts = checkpoints.pack(msgspec.structs.replace(known, verifiers=bytes(47)))
    path.write_bytes(b"".join(bytes(part) for part in parts))
    found = look(data)
    assert [each.file for each in found.flaws] == [f"checkpoints/{path.name}"]
    assert found.checkpoints[0].why_unreadable == "the verifiers of the dedupe window are cut short"


def test_checkpoint_that_would_use_a_sequence_again_is_a_flaw(data: Path) -> None:
    [path] = (data / "checkpoints").iterdir()
    known = checkpoints.unpack(path.read_bytes())
    table = subjects.SubjectTable()
    table.restate(known.subjects, 0)
    table.rewind(1, 100)
    parts = checkpoints.pack(msgspec.structs.replace(known, subjects=table.pack()))
    path.write_bytes(b"".join(bytes(part) for part in parts))
    [flaw] = look(data).flaws
    assert "subject 1 has sequence 100 already" in flaw.why


def test_lost_identity_is_a_flaw(data: Path) -> None:
    (data / directory.IDENTITY).unlink()
    found = look(data)
    assert (found.directory_id, [each.file for each in found.flaws]) == (None, ["identity"])
    assert sum(each.batches for each in found.subjects) == 40


# --- beside a living owner --------------------------------------------------------------------------------------------


def test_unfinished_tail_of_a_directory_in_use_is_no_damage(data: Path) -> None:
    async def beside() -> tuple[DirectorySurvey, DirectorySurvey]:
        store = await open_store(data)
        await append(store, 3, stream=5)
        await store.actions.log.flusher.durable(store.actions.log.end)
        with segments(data)[-1].open("ab") as newest:
            newest.write(b"FWR1 half a record")
        used = look(data)
        disk = RealDisk(data)
        unused = survey(disk)
        disk.close()
        store.messages.log.close()
        store.actions.log.close()
        store._disk.close()
        return used, unused

    used, unused = asyncio.run(beside())
    assert used.is_sound
    assert used.owner
    assert used.remarks == ["the messages log ends in a record that is being written: it is in use"]
    assert [each.verdict for each in unused.damages] == ["torn"]


class _Growing(RealDisk):
    """A disk on which a living owner appends to the newest segment as soon as somebody has seen how long it is."""

    def __init__(self, root: Path, tail: bytes) -> None:
        super().__init__(root)
        self._newest = segments(root)[-1]
        self._tail = tail

    def open(self, name: str, *, create: bool = False) -> RealFile:
        file = super().open(name, create=create)
        if self._newest.as_posix().endswith(name) and self._tail:
            assert file.size  # as it was
            with self._newest.open("ab") as newest:
                newest.write(self._tail)
            self._tail = b""
        return file


@pytest.mark.parametrize("from_end", [1, 100])
def test_what_is_appended_while_we_look_is_counted_once_or_not_at_all(data: Path, from_end: int) -> None:
    newest = segments(data)[-1]
    before = newest.stat().st_size
    asyncio.run(_append_and_die(data))
    whole = newest.read_bytes()
    newest.write_bytes(whole[:before])
    disk = _Growing(data, whole[before:-from_end])
    found = survey(disk, verify=True, owner=lambda: 4242)
    disk.close()
    assert found.is_sound, (found.damages, found.flaws)


async def _append_and_die(root: Path) -> None:
    store = await open_store(root)
    await append(store, 5, stream=6)
    store.messages.log.close()
    store.actions.log.close()
    store._disk.close()


class _Vanishing(RealDisk):
    """A disk on which retention deletes a segment under the eyes of whoever reads it."""

    def __init__(self, root: Path, times: int) -> None:
        super().__init__(root)
        self.times = times

    def open(self, name: str, *, create: bool = False) -> RealFile:
        if name.startswith("index/") or not name.endswith(".log") or self.times <= 0:
            return super().open(name, create=create)
        self.times -= 1
        raise NoSuchFile(f"cannot open {name}: it is gone")


def test_file_that_vanishes_makes_us_look_again(data: Path) -> None:
    disk = _Vanishing(data, 2)
    assert survey(disk).is_sound
    disk.close()


def test_file_that_vanishes_for_ever_is_an_error(data: Path) -> None:
    disk = _Vanishing(data, 1_000)
    with pytest.raises(NoSuchFile, match="it is gone"):
        survey(disk)
    disk.close()


# --- a log whose first segments are gone ------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("batches", [5, 40])
def test_log_goes_on_behind_a_segment_that_was_emptied(tmp_path: Path, batches: int, checkpointed: bool) -> None:
    """The store used to stumble over a replay that begins in a segment that is not there."""
    root = tmp_path / "data"
    make(root, batches=batches)
    if not checkpointed:
        shutil.rmtree(root / "checkpoints")
    segments(root)[0].write_bytes(b"")

    async def live(stream: int) -> list[str]:
        store = await open_store(root)
        verdicts = [each.verdict.value for each in store.findings]
        await append(store, 5, stream=stream)
        await store.actions.log.flusher.durable(store.actions.log.end)
        store._disk.close()  # no checkpoint: the next life has to read what this one wrote
        return verdicts

    expected = ["rotten"] if checkpointed or batches > 5 else []
    assert asyncio.run(live(5)) == expected
    assert asyncio.run(live(6)) == expected
    assert [each.verdict for each in look(root).damages] == expected


def test_every_error_is_one_of_ours(sound: Path, tmp_path: Path) -> None:
    """Whatever single byte of the small files is wrong, a survey ends in a report or in a `FairwayError`."""
    for name in ["identity", *(f"checkpoints/{each.name}" for each in (sound / "checkpoints").iterdir())]:
        content = (sound / name).read_bytes()
        root = Path(shutil.copytree(sound, tmp_path / name.replace("/", "-")))
        for offset in range(0, len(content), 7):
            spoilt = bytearray(content)
            spoilt[offset] ^= 0xFF
            (root / name).write_bytes(spoilt)
            with contextlib.suppress(FairwayError):
                assert not look(root, verify=False).is_sound
