"""Stretches of a log for a copy: from memory at once, from the device off the loop, the same bytes either way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fairway.errors import StorageFault
from fairway.storage import record
from fairway.storage.log import Damaged
from fairway.storage.log_copies import SegmentChunk
from tests.unit.storage.copies import Pair, bytes_of
from tests.unit.storage.helpers import FIRST_MESSAGES, names

Read = SegmentChunk | Damaged | StorageFault


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A master of four segments; one batch is larger than a chunk."""
    with Pair() as pair:
        for number in range(45):
            pair.send([b"%d" % number * (80 if number != 20 else 1_500)])
        pair.wait()
        yield pair


def evict(pair: Pair) -> None:
    for name in names(pair.master.disk, "messages"):
        pair.master.disk.evict(name)


def fetch(pair: Pair, position: int, bytes_max: int) -> Read:
    found: list[Read] = []
    pair.master.store.fetch_chunk(0, position, bytes_max, found.append)
    assert not found, "the loop does not wait for it"
    pair.wait()
    [read] = found
    return read


@pytest.mark.parametrize("bytes_max", [1, 200, 1_000, 1 << 20])
def test_memory_and_device_give_the_same(pair: Pair, bytes_max: int) -> None:
    store, at, seen = pair.master.store, 0, b""
    while (chunk := store.read_chunk(0, at, bytes_max)) is not None:
        assert store.read_warm_chunk(0, at, bytes_max) == chunk
        assert fetch(pair, at, bytes_max) == chunk
        seen += chunk.data
        at += len(chunk.data)
    assert seen == b"".join(bytes_of(pair.master)[name] for name in sorted(names(pair.master.disk, "messages")))
    assert store.read_warm_chunk(0, at, bytes_max) is None


def test_what_is_not_in_memory_is_not_waited_for(pair: Pair) -> None:
    evict(pair)
    assert pair.master.store.read_warm_chunk(0, 0, 1_000) is None
    assert pair.master.store.read_chunk(0, 0, 1_000) == fetch(pair, 0, 1_000)


def test_a_part_that_is_in_memory_is_made_use_of(pair: Pair) -> None:
    whole = pair.master.store.read_chunk(0, 0, 4_000)
    pair.master.disk.cold = 0.9
    parts = {pair.master.store.read_warm_chunk(0, 0, 4_000) for _ in range(200)}
    assert whole is not None
    assert None in parts
    assert len(parts) > 2
    for part in parts - {None}:
        assert part is not None
        assert whole.data.startswith(part.data)
        record.parse_header(part.data, 64, 64, pair.master.store.messages.log.log_id)


@pytest.mark.parametrize("is_cold", [False, True])
def test_rot_is_noted_whoever_meets_it(pair: Pair, is_cold: bool) -> None:
    place = pair.master.store.positions(0, 0, 2_000)[4]
    pair.master.disk.flip(FIRST_MESSAGES, (place + 100) * 8)
    if is_cold:
        assert isinstance(fetch(pair, place, 1_000), Damaged)
    else:
        with pytest.raises(Damaged):
            pair.master.store.read_warm_chunk(0, place, 1_000)
    [mark] = pair.master.store.rotten
    assert (mark.start, mark.end) == (place, pair.master.store.positions(0, place + 1, 3_000)[0])


def test_a_file_that_is_cut_short_ends_the_read(pair: Pair) -> None:
    places = pair.master.store.positions(0, 0, 4_000)
    pair.master.disk.chop(FIRST_MESSAGES, places[4] + 90)
    assert isinstance(fetch(pair, places[4], 1_000), Damaged)
    pair.master.disk.fail_fetch()
    assert isinstance(fetch(pair, places[0], 1_000), StorageFault)
