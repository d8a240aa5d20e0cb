"""Which action segments may go: those whose messages are gone, behind a record that states the groups."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fairway.broker.groups import Groups
from fairway.errors import WrongDirectory
from fairway.runtime.clock import ManualClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import SeededRng
from fairway.storage import record, retention
from fairway.storage.action_log import TOO_MANY_GROUPS, ActionRetention
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.retention import AgeSource, Policy
from fairway.storage.segment import Segment
from fairway.storage.store import Store, StoreOptions

SEGMENTS = [Segment(0, 100), Segment(100, 200), Segment(200, 300), Segment(300, 350)]
WEEK_MS = 168 * 3_600_000


def test_a_segment_goes_with_the_messages_that_it_speaks_of() -> None:
    known = ActionRetention({0: 1_000, 100: 2_000, 200: 3_000}, [120, 250])
    assert known.droppable(SEGMENTS, 999, 350) == []
    assert known.droppable(SEGMENTS, 1_000, 350) == [0]
    assert known.droppable(SEGMENTS, 2_000, 350) == [0, 100]
    assert known.droppable(SEGMENTS, 2_000, 199) == [0], "a checkpoint must cover it"


def test_the_first_that_stays_states_the_groups() -> None:
    known = ActionRetention({0: 1_000, 100: 1_000, 200: 1_000}, [120])
    assert known.droppable(SEGMENTS, 5_000, 350) == [0]
    assert ActionRetention({0: 1, 100: 1, 200: 1}).droppable(SEGMENTS, 5_000, 350) == []
    assert known.droppable(SEGMENTS, 5_000, 110) == [], "the record that states them is not covered"


def test_a_segment_of_which_nothing_is_known_stays_until_all_messages_of_today_are_gone() -> None:
    known = ActionRetention({}, [320])
    assert known.droppable(SEGMENTS, 9_000, 350) == []
    known.note_complete(SEGMENTS, 9_000)
    assert known.droppable(SEGMENTS, 8_999, 350) == []
    assert known.droppable(SEGMENTS, 9_000, 350) == [0, 100, 200]


def test_a_checkpoint_says_nothing_of_what_it_does_not_cover() -> None:
    known = ActionRetention({0: 1_000, 100: 2_000, 200: 3_000}, [120, 250]).below(250, SEGMENTS)
    assert (known.bounds, known.pictures) == ({0: 1_000, 100: 2_000}, [120])


class _ManyGroups(Groups):
    """So many that their picture is larger than a record may be."""

    def picture(self) -> bytes:
        return bytes(record.BODY_BYTES_MAX)


def test_groups_that_outgrow_a_record_are_remarked_on_once(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        loop = asyncio.get_running_loop()
        disk = RealDisk(tmp_path, post=loop.call_soon_threadsafe)
        options = StoreOptions(low_water_bytes=0, action_segment_bytes=4_096, retention=Policy(age_ms_max=1))
        view = _ManyGroups()
        store = Store.open(disk, ManualClock(), SeededRng(1), defer=loop.call_soon, options=options, action_view=view)
        store._action_retention.is_picture_due = lambda *_: True  # type: ignore[method-assign]
        for _ in range(2):
            ended = asyncio.Event()
            store.checkpoint(ended.set)
            await ended.wait()
        store.abandon()
        return store.remarks

    assert asyncio.run(scenario()) == [TOO_MANY_GROUPS]


def _age_ms(root: Path, source: AgeSource, age_ms: int | None = None) -> tuple[int | None, list[str]]:
    """Open the directory once: the age in force, and the remarks."""

    async def scenario() -> tuple[int | None, list[str]]:
        loop = asyncio.get_running_loop()
        disk = RealDisk(root, post=loop.call_soon_threadsafe)
        options = StoreOptions(
            low_water_bytes=0, action_segment_bytes=4_096, retention=Policy(age_ms_max=age_ms), age_source=source
        )
        store = Store.open(disk, ManualClock(), SeededRng(1), defer=loop.call_soon, options=options)
        await store.close()
        return store.age_ms_max, store.remarks

    return asyncio.run(scenario())


def test_a_new_directory_keeps_messages_for_a_week_and_records_it(tmp_path: Path) -> None:
    assert _age_ms(tmp_path / "new", AgeSource.DIRECTORY) == (WEEK_MS, [])
    assert _age_ms(tmp_path / "new", AgeSource.DIRECTORY) == (WEEK_MS, [])
    assert (tmp_path / "new" / "retention").read_bytes() == retention.pack(WEEK_MS)


def test_a_choice_is_recorded_and_holds(tmp_path: Path) -> None:
    assert _age_ms(tmp_path, AgeSource.CHOICE, 5_000) == (5_000, [])
    assert _age_ms(tmp_path, AgeSource.DIRECTORY) == (5_000, [])
    assert _age_ms(tmp_path, AgeSource.CHOICE, None) == (None, [])
    assert _age_ms(tmp_path, AgeSource.DIRECTORY) == (None, []), "for ever, by choice: no warning"


def _member_age_ms(
    root: Path, adopt: DirectoryIdentity | None, policy: Policy | None = None, *, leads: bool = False
) -> tuple[int | None, list[str]]:
    """Open the directory of a member of a group once."""

    async def scenario() -> tuple[int | None, list[str]]:
        loop = asyncio.get_running_loop()
        disk = RealDisk(root, post=loop.call_soon_threadsafe)
        options = StoreOptions(
            low_water_bytes=0,
            action_segment_bytes=4_096,
            retention=policy or Policy(),
            age_source=AgeSource.DIRECTORY,
        )
        store = Store.open(
            disk, ManualClock(), SeededRng(1), defer=loop.call_soon, options=options, follows=True, adopt=adopt
        )
        if leads:
            store.lead(1)
        store.abandon()
        return store.age_ms_max, store.remarks

    return asyncio.run(scenario())


def test_an_empty_member_takes_no_default_into_the_logs_of_others(tmp_path: Path) -> None:
    assert _member_age_ms(tmp_path, None) == (None, []), "there is no group yet: it may found one, or become a copy"
    others = DirectoryIdentity(0, 5, 6)
    age_ms, [warning] = _member_age_ms(tmp_path, others)
    assert age_ms is None
    assert "as a copy of another" in warning
    _, [warning] = _member_age_ms(tmp_path, others, Policy(bytes_max=10**9))
    assert "for ever" not in warning, "another bound may hold"


def test_a_member_that_founds_its_group_records_the_default(tmp_path: Path) -> None:
    assert _member_age_ms(tmp_path, None, leads=True) == (WEEK_MS, [])
    assert _member_age_ms(tmp_path, None) == (WEEK_MS, [])


def test_a_directory_that_was_made_before_keeps_everything_and_says_so(tmp_path: Path) -> None:
    _age_ms(tmp_path, AgeSource.OPTIONS)
    assert not (tmp_path / "retention").exists()
    for _ in range(2):
        age_ms, [warning] = _age_ms(tmp_path, AgeSource.DIRECTORY)
        assert age_ms is None
        assert "--keep-hours 168" in warning
        assert "--keep-hours forever" in warning
    assert _age_ms(tmp_path, AgeSource.CHOICE, WEEK_MS) == (WEEK_MS, [])
    assert _age_ms(tmp_path, AgeSource.DIRECTORY) == (WEEK_MS, [])


def test_a_damaged_choice_deletes_nothing_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    _age_ms(tmp_path, AgeSource.CHOICE, 5_000)
    whole = retention.pack(5_000)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "retention").write_bytes(flipped)
        age_ms, [warning] = _age_ms(tmp_path, AgeSource.DIRECTORY)
        assert age_ms is None
        assert "damaged" in warning
    newer = bytearray(whole)
    newer[8] = 2
    covered = bytes(newer[:24])
    (tmp_path / "retention").write_bytes(covered + retention.seal(covered))
    with pytest.raises(WrongDirectory, match="version 2"):
        _age_ms(tmp_path, AgeSource.DIRECTORY)
