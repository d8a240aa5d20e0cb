"""Runs of the index that are not in memory: named, fetched off the loop, taken in if they are sound."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from fairway.errors import StorageFault
from fairway.storage.consume_log import ConsumeLog
from tests.unit.storage.helpers import EVERYTHING, SMALL, World


@pytest.fixture
def world() -> Iterator[World]:
    with World("index", options=SMALL) as made:
        for number in range(20):
            made.produce([b"%02d" % number * 100] * 3)
        made.settle()
        made.reopen()
        yield made


@pytest.fixture
def entries(world: World) -> ConsumeLog:
    return world.store.messages.views.entries


def bases(entries: ConsumeLog, sequence: int, messages: int) -> list[int]:
    return [run.base for run in entries.absent(1, sequence, messages)]


def test_what_a_look_would_read(world: World, entries: ConsumeLog) -> None:
    segments = [segment.base for segment in world.store.messages.log.segments]
    everything = bases(entries, 0, 60)
    assert everything == segments[: len(everything)]
    assert len(everything) >= 3
    assert bases(entries, 0, 1) == everything[:1]
    assert bases(entries, 59, 1_000) == []
    assert entries.absent(99, 0, 1_000) == []
    list(entries.entries(1, 0, EVERYTHING))
    assert bases(entries, 0, 60) == []


def test_fetched_runs_are_taken_in_and_read_no_more(world: World, entries: ConsumeLog) -> None:
    async def fetch_all() -> list[bytes | StorageFault]:
        loop = asyncio.get_running_loop()
        found = []
        for run in entries.absent(1, 0, 60):
            told: asyncio.Future[bytes | StorageFault] = loop.create_future()
            entries.fetch(run, told.set_result)
            data = await told
            found.append(data)
            assert isinstance(data, bytes)
            entries.take_in(1, run, data)
            entries.take_in(1, run, data)
        return found

    assert len(world.run(fetch_all())) >= 3
    assert entries.absent(1, 0, 60) == []
    assert [each.first_sequence for each in entries.entries(1, 0, EVERYTHING)] == list(range(0, 60, 3))


def test_what_is_not_sound_is_not_taken_in(entries: ConsumeLog) -> None:
    run = entries.absent(1, 0, 1)[0]
    entries.take_in(1, run, bytes(run.entries * 64))
    entries.take_in(1, run, b"")
    assert entries.absent(1, 0, 1) == [run]
    assert next(entries.entries(1, 0, EVERYTHING)).first_sequence == 0
