"""The consume log: look-ups over sealed and open segments, holes, lost indexes, many subjects."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.limits import MIB
from fairway.names import Subject
from fairway.runtime.clock import RealClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng, SeededRng
from fairway.simulation.disk import SimDisk
from fairway.storage import index_file
from fairway.storage.consume_log import ConsumeLog, ConsumeLogEntry
from fairway.storage.store import Store, StoreOptions
from tests.unit.storage.helpers import EVERYTHING, SMALL, World, batch_of, descriptors, messages, names


@pytest.fixture
def world() -> Iterator[World]:
    """Twenty batches of three messages over several segments, a second apart; the newest segment is open."""
    with World("consume", options=SMALL) as made:
        for number in range(20):
            made.produce([b"%02d" % number * 100] * 3)
            made.run(asyncio.sleep(1))
        made.settle()
        assert len(made.store.messages.log.segments) >= 3
        yield made


@pytest.fixture(params=["live", "with checkpoint", "rebuilt"])
def entries(request: pytest.FixtureRequest, world: World) -> ConsumeLog:
    if request.param == "with checkpoint":
        world.reopen()
    elif request.param == "rebuilt":
        world.kill()
        world.open()
    return world.store.messages.views.entries


def firsts(entries: ConsumeLog, sequence: int, below: int = EVERYTHING) -> list[int]:
    return [each.first_sequence for each in entries.entries(1, sequence, below)]


@pytest.mark.parametrize("sequence", [0, 1, 2, 3, 29, 30, 31, 57, 59])
def test_by_sequence(entries: ConsumeLog, sequence: int) -> None:
    """From the batch that holds it."""
    assert firsts(entries, sequence) == list(range(sequence // 3 * 3, 60, 3))


@pytest.mark.parametrize("batch", [0, 1, 7, 19])
def test_where_producers_went_on_from_a_position(entries: ConsumeLog, batch: int) -> None:
    """In segments that are sealed, too: copies may lack what is."""
    found = list(entries.entries(1, 0, EVERYTHING))
    [producer_id] = {entry.producer_id for entry in found}
    assert entries.first_places_from(found[batch].position) == {(1, producer_id): 3 * batch}
    assert entries.first_places_from(found[-1].position + 1) == {}


def test_beyond_the_end_there_is_nothing(entries: ConsumeLog) -> None:
    assert firsts(entries, 60) == []
    assert list(entries.entries(99, 0, EVERYTHING)) == []


def test_nothing_above_the_committed_end_is_shown(entries: ConsumeLog) -> None:
    everything = list(entries.entries(1, 0, EVERYTHING))
    for index, each in enumerate(everything):
        assert firsts(entries, 0, below=each.position) == list(range(0, 3 * index, 3))


def test_by_time(entries: ConsumeLog) -> None:
    everything = list(entries.entries(1, 0, EVERYTHING))
    assert entries.sequence_at(1, 0, EVERYTHING) == 0
    for each in everything:
        assert entries.sequence_at(1, each.appended_ms, EVERYTHING) == each.first_sequence
        following = each.end_sequence if each.end_sequence < 60 else None
        assert entries.sequence_at(1, each.appended_ms + 1, EVERYTHING) == following
        assert entries.sequence_at(1, each.appended_ms, each.position) is None


def test_the_oldest_sequence(entries: ConsumeLog) -> None:
    assert entries.first_sequence(1) == 0
    assert entries.first_sequence(99) is None


def test_a_hole_leads_to_the_next_entry() -> None:
    disk = SimDisk(SeededRng(0), lambda *_: None)
    log = ConsumeLog(disk, 5, rebuild=lambda _: {})
    for first, position in ((0, 100), (10, 200), (30, 400)):
        log.append(1, ConsumeLogEntry(first, 5, 80, position, position, 0, 1, first))
    assert [each.first_sequence for each in log.entries(1, 7, EVERYTHING)] == [10, 30]
    assert [each.first_sequence for each in log.entries(1, 14, EVERYTHING)] == [10, 30]
    assert [each.first_sequence for each in log.entries(1, 15, EVERYTHING)] == [30]
    assert log.sequence_at(1, 150, EVERYTHING) == 10


# --- index files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["missing", "header", "directory", "run", "short", "empty", "foreign"])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_lost_index_is_made_again(world: World, harm: str, checkpointed: bool) -> None:
    before = messages(world.store)
    if checkpointed:
        world.close()
    else:
        world.kill()
    for name in names(world.disk, "index"):
        size = world.disk.open(name).size
        if harm == "missing":
            world.disk.remove(name)
        elif harm == "foreign":
            parts, _ = index_file.pack(1, 0, 0, {})
            world.disk.publish(name, parts)
        elif harm in ("short", "empty"):
            world.disk.chop(name, size - 1 if harm == "short" else 0)
        else:
            world.disk.flip(name, 8 * {"header": 20, "directory": 70, "run": size - 3}[harm])
    store = world.open()
    assert messages(store) == before
    assert store.findings == []
    if checkpointed and harm not in ("run", "short"):  # a run is looked at when somebody wants it
        assert any("made again" in remark for remark in store.remarks)


def test_an_index_of_a_rotten_segment_serves_the_rest(world: World) -> None:
    before = messages(world.store)
    world.close()
    first, *_ = names(world.disk, "messages")
    world.disk.flip(first, 8 * 1_500)
    world.disk.remove(names(world.disk, "index")[0])
    store = world.open()
    after = messages(store)
    assert after.items() < before.items()
    assert len(after) == len(before) - 3


# --- many subjects ---------------------------------------------------------------------------------------------------

MANY = 10_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_subjects_are_few_files(tmp_path: Path) -> None:
    async def opened(options: StoreOptions) -> Store:
        loop = asyncio.get_running_loop()
        disk = RealDisk(tmp_path / "data", post=loop.call_soon_threadsafe)
        return Store.open(disk, RealClock(), RealRng(), defer=loop.call_soon, options=options)

    def shows_all(store: Store) -> bool:
        found = store.messages.views.subjects.find(Subject("subject-9999"))
        return len(store.messages.views.subjects) == MANY and found is not None and found.next_sequence == 2

    async def scenario() -> None:
        options = StoreOptions(segment_bytes=4 * MIB, low_water_bytes=0, action_segment_bytes=MIB)
        before, resident = len(descriptors()), resident_bytes()
        store = await opened(options)
        receipts = [
            store.produce(Subject(f"subject-{number}"), batch_of([b"x"], producer=number + 1, first=turn))
            for turn in range(2)
            for number in range(MANY)
        ]
        await store.durable(receipts[-1])
        assert resident_bytes() - resident < 60 * MIB  # 20,000 batches, their entries and their streams
        assert len(descriptors()) - before < 20
        assert shows_all(store)
        await store.close()
        for checkpointed in (True, False):
            if not checkpointed:
                for path in (tmp_path / "data" / "checkpoints").iterdir():
                    path.unlink()
            store = await opened(options)
            assert shows_all(store)
            assert store.remarks == []
            assert list(messages(store, Subject("subject-1234")).values()) == [b"x", b"x"]
            await store.close()
        assert sum(1 for path in (tmp_path / "data").rglob("*") if path.is_file()) < 30

    asyncio.run(scenario())


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 256, 1 << 40]), st.integers(1, 3)), max_size=60),
    st.integers(0, 40),
    st.integers(1, 6),
)
def test_look_back_finds_what_a_look_at_every_entry_finds(
    batches: list[tuple[int, int]], first: int, messages: int
) -> None:
    """However the streams of a subject are interleaved."""
    entries = ConsumeLog(SimDisk(SeededRng(1), lambda *_: None), 1, rebuild=lambda _: {})
    next_: Counter[int] = Counter()
    expected: list[ConsumeLogEntry] = []
    sequence, end = 0, first + messages
    for number, (producer, count) in enumerate(batches):
        entry = ConsumeLogEntry(sequence, count, 64, number * 64, 0, 0, producer, next_[producer])
        entries.append(1, entry)
        if producer == 1 and next_[1] < end and next_[1] + count > first:
            expected.append(entry)
        next_[producer] += count
        sequence += count
    assert (entries.look_back(1, 1, first, end) or []) == expected
