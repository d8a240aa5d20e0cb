"""What has rotted on one copy comes back from another, byte for byte, and can be read again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fairway.errors import Code, DiskFull, Refused, RemoteProtocolError
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage import segment
from fairway.storage.recovery import DamageVerdict, witness_name
from fairway.storage.survey import survey
from tests.unit.storage.copies import LOGS, Pair, Side, bytes_of
from tests.unit.storage.helpers import BILLS, FIRST_ACTIONS, FIRST_MESSAGES, ORDERS, messages, names

Ruin = Callable[[Side], None]
YEAR_MS = 365 * 24 * 3_600_000


def _pair() -> Pair:
    """A master and a copy that has everything, in four segments, the copy let go of."""
    pair = Pair()
    for number in range(45):
        pair.send([b"%d" % number * 80], *((ORDERS, 1) if number % 3 else (BILLS, 2)))
        pair.act(number)
        if number % 4 == 0:
            pair.wait(0.01)
    pair.settle()
    pair.copy.store.checkpoint()
    pair.wait()
    pair.copy.abandon()
    return pair


def _mend(pair: Pair, bytes_max: int = 1_000) -> None:
    """As replication does it."""
    for _ in range(200):
        spans = pair.copy.store.rotten_spans()
        if not spans:
            return
        chunk = pair.master.store.read_chunk(spans[0].log, spans[0].start, bytes_max)
        assert chunk is not None
        assert spans[0].start < pair.copy.store.mend(spans[0].log, spans[0].start, chunk.data) <= spans[0].end
        pair.wait()
    raise AssertionError("it is never mended")


def _flip(name: str, *offsets: int) -> Ruin:
    def ruin(side: Side) -> None:
        for offset in offsets:
            side.disk.flip(name, offset * 8)

    return ruin


def _forget(ruin: Ruin) -> Ruin:
    """With the checkpoints gone, recovery reads everything."""

    def forgetting(side: Side) -> None:
        for name in names(side.disk, "checkpoints"):
            side.disk.remove(name)
        ruin(side)

    return forgetting


def _segment(side: Side, index: int) -> str:
    return [name for name in names(side.disk, "messages") if name.endswith(".log")][index]


def _lose(index: int) -> Ruin:
    return lambda side: side.disk.remove(_segment(side, index))


def _lose_indexed(index: int) -> Ruin:
    def ruin(side: Side) -> None:
        for name in names(side.disk, "index"):
            side.disk.remove(name)
        _lose(index)(side)

    return ruin


def _chop(index: int, left_bytes: int) -> Ruin:
    return lambda side: side.disk.chop(_segment(side, index), left_bytes)


RUINS: dict[str, Ruin] = {
    "a bit": _flip(FIRST_MESSAGES, 900),
    "many bits": _flip(FIRST_MESSAGES, 900, 1_500, 1_504, 3_000),
    "the header of a segment": _forget(_flip(FIRST_MESSAGES, 12)),
    "the header of a record": _forget(_flip(FIRST_MESSAGES, 150)),
    "the name of a subject": _forget(_flip(FIRST_MESSAGES, 64 + 80 + 80 + 8)),
    "the first segment": _lose(0),
    "a segment": _lose(1),
    "the newest segment": _lose(-1),
    "a segment and all indexes": _lose_indexed(1),
    "the end of a segment": _chop(1, 2_000),
    "the end of the log": _chop(-1, 700),
}


@pytest.mark.parametrize("what", RUINS)
def test_what_is_lost_is_mended_and_read_again(what: str) -> None:
    with _pair() as pair:
        RUINS[what](pair.copy)
        store = pair.copy.open(follows=True)
        assert DamageVerdict.ROTTEN in {each.verdict for each in store.findings} or not pair.copy.store.rotten_spans()
        store.confirm(*pair.master.store.committed_ends())
        for subject in (ORDERS, BILLS):
            messages(store, subject)  # a reader meets what recovery did not look at
        assert store.rotten_spans()
        _mend(pair)
        assert bytes_of(pair.copy) == bytes_of(pair.master)
        for subject in (ORDERS, BILLS):
            assert messages(store, subject) == messages(pair.master.store, subject)
        pair.wait()
        assert survey(pair.copy.disk, verify=True).is_sound
        pair.send([b"and on it goes" * 40])
        pair.settle()
        assert bytes_of(pair.copy) == bytes_of(pair.master)
        pair.copy.end(SimDisk.crash_process)
        store = pair.copy.open(follows=True)
        store.confirm(*pair.master.store.committed_ends())
        assert (store.findings, store.rotten) == ([], [])
        for subject in (ORDERS, BILLS):
            assert messages(store, subject) == messages(pair.master.store, subject)


def test_a_copy_whose_end_is_missing_is_mended_before_it_follows() -> None:
    with _pair() as pair:
        _chop(-1, 700)(pair.copy)
        pair.copy.open(follows=True)
        pair.send([b"more"])
        pair.wait()
        with pytest.raises(RemoteProtocolError, match="mend it before"):
            pair.pass_on()
        _mend(pair)
        pair.settle()
        assert bytes_of(pair.copy) == bytes_of(pair.master)


def test_what_a_reader_meets_is_mended_while_the_master_writes() -> None:
    with _pair() as pair:
        pair.copy.open(follows=True)
        pair.settle()
        name = _segment(pair.master, -1)
        base = segment.base_of(name.rpartition("/")[2])
        assert base is not None
        place = pair.master.store.positions(0, base, base + 4_096)[1]
        pair.master.disk.flip(name, (place - base + 100) * 8)
        before = messages(pair.copy.store, ORDERS) | messages(pair.copy.store, BILLS)
        assert len(messages(pair.master.store, ORDERS)) + len(messages(pair.master.store, BILLS)) == 44
        (span,) = pair.master.store.rotten_spans()
        assert (span.log, span.start) == (0, place)
        pair.send([b"meanwhile"])
        chunk = pair.copy.store.read_chunk(0, span.start, 10_000)
        assert chunk is not None
        assert pair.master.store.mend(0, span.start, chunk.data) == span.end
        pair.settle()
        assert pair.master.store.rotten == []
        assert messages(pair.master.store, ORDERS) | messages(pair.master.store, BILLS) == before | {30: b"meanwhile"}


def test_actions_are_mended_and_the_view_made_again() -> None:
    with _pair() as pair:
        pair.copy.disk.flip(FIRST_ACTIONS, 600 * 8)
        for name in names(pair.copy.disk, "checkpoints"):
            pair.copy.disk.remove(name)
        pair.copy.open(follows=True)
        pair.settle()
        assert pair.copy.view.found != pair.master.view.found
        pair.copy.store.checkpoint()
        if pair.copy.store.rotten_spans():
            span = pair.copy.store.rotten_spans()[0]
            chunk = pair.master.store.read_chunk(1, span.start, 10_000)
            assert chunk is not None
            with pytest.raises(Refused) as caught:
                pair.copy.store.mend(1, span.start, chunk.data)
            assert caught.value.code is Code.BUSY
        pair.wait()
        _mend(pair)
        assert pair.copy.store.is_view_stale
        pair.wait()
        pair.copy.store.checkpoint()
        pair.wait()
        pair.copy.abandon()
        store = pair.copy.open(follows=True)
        assert (pair.copy.view.found, store.is_view_stale) == (pair.master.view.found, False)
        pair.settle()
        assert bytes_of(pair.copy) == bytes_of(pair.master)


def test_what_does_not_belong_there_changes_nothing() -> None:
    with _pair() as pair:
        RUINS["a bit"](pair.copy)
        RUINS["a segment"](pair.copy)
        store = pair.copy.open(follows=True)
        store.confirm(*pair.master.store.committed_ends())
        messages(store, ORDERS)
        messages(store, BILLS)
        before = bytes_of(pair.copy)
        rotten, missing = store.rotten_spans()
        right = pair.master.store.read_chunk(0, rotten.start, 10_000)
        header = pair.master.store.read_chunk(0, missing.start, 10_000)
        assert right is not None
        assert header is not None
        for position, data in [
            (0, right.data),
            (rotten.start, right.data[8:]),
            (rotten.start, right.data[: rotten.end - rotten.start - 8]),
            (rotten.start, b""),
            (rotten.start, bytes(100)),
            (rotten.start + 8, right.data),
            (missing.start, right.data),
            (missing.start, header.data[64:]),
            (missing.start + 64, header.data[64:]),
        ]:
            with pytest.raises(RemoteProtocolError):
                store.mend(0, position, data)
        assert bytes_of(pair.copy) == before
        assert store.rotten_spans() == [rotten, missing]


@pytest.mark.parametrize("what", ["many bits", "a segment", "the end of a segment", "the end of the log", "actions"])
def test_mending_can_be_killed_at_every_step(what: str) -> None:
    for step in range(1, 200):
        with _pair() as pair:
            if what == "actions":
                pair.copy.disk.flip(FIRST_ACTIONS, 600 * 8)
                for name in names(pair.copy.disk, "checkpoints"):
                    pair.copy.disk.remove(name)
            else:
                RUINS[what](pair.copy)
            _open_and_look(pair)
            spans = pair.copy.store.rotten_spans()
            chunk = pair.master.store.read_chunk(spans[0].log, spans[0].start, 700)
            assert chunk is not None
            pair.copy.disk.crash_after(step)
            try:
                pair.copy.store.mend(spans[0].log, spans[0].start, chunk.data)
            except SimulatedPowerCut:
                pair.copy.end(SimDisk.crash if step % 2 else SimDisk.crash_process)
            else:
                return
            _open_and_look(pair)
            _mend(pair)
            pair.copy.abandon()
            _open_and_look(pair)
            assert bytes_of(pair.copy) == bytes_of(pair.master)
            assert pair.copy.view.found == pair.master.view.found
            for subject in (ORDERS, BILLS):
                assert messages(pair.copy.store, subject) == messages(pair.master.store, subject)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("index", [0, -1])
def test_the_next_life_reads_what_was_mended_though_nobody_wrote_that_down(index: int) -> None:
    """The bytes are back and the mark is gone by them: then the index has to know the batch, too."""
    for step in range(1, 200):
        with _pair() as pair:
            is_killed = _mend_unindexed(pair, index, step)
            _open_and_look(pair)
            _mend(pair)
            assert pair.copy.store.rotten == []
            for _ in range(2):
                assert bytes_of(pair.copy) == bytes_of(pair.master)
                for subject in (ORDERS, BILLS):
                    assert messages(pair.copy.store, subject) == messages(pair.master.store, subject)
                pair.copy.store.checkpoint()
                pair.wait()
                pair.copy.abandon()
                _open_and_look(pair)
            if not is_killed:
                return
    raise AssertionError("it never ends")


def _spoil_unindexed(pair: Pair, index: int) -> None:
    """A batch that was lost before the index was made; a checkpoint knows of the rot."""
    _forget(lambda side: side.disk.flip(_segment(side, index), 900 * 8))(pair.copy)
    _open_and_look(pair)
    pair.copy.store.checkpoint()
    pair.wait()
    assert len(messages(pair.copy.store, ORDERS)) + len(messages(pair.copy.store, BILLS)) == 44


def _mend_unindexed(pair: Pair, index: int, step: int) -> bool:
    """Killed after so many steps, or right behind the last; whether it was on the way."""
    _spoil_unindexed(pair, index)
    (span,) = pair.copy.store.rotten_spans()
    chunk = pair.master.store.read_chunk(0, span.start, 700)
    assert chunk is not None
    pair.copy.disk.crash_after(step)
    try:
        pair.copy.store.mend(0, span.start, chunk.data)
    except SimulatedPowerCut:
        pair.copy.end(SimDisk.crash if step % 2 else SimDisk.crash_process)
        return True
    pair.copy.end(SimDisk.crash_process)
    return False


def test_a_batch_that_is_mended_on_a_full_disk_is_known_to_the_next_life() -> None:
    with _pair() as pair:
        _spoil_unindexed(pair, 0)
        _fill_up(pair.copy)
        _mend(pair)
        assert any("a view was not written" in each for each in pair.copy.store.remarks)
        pair.copy.disk.remove("filler")
        pair.copy.store.checkpoint()
        pair.wait()
        pair.copy.abandon()
        _open_and_look(pair)
        for subject in (ORDERS, BILLS):
            assert messages(pair.copy.store, subject) == messages(pair.master.store, subject)


def test_a_full_disk_leaves_the_view_as_it_was() -> None:
    """No checkpoint says yet that it has to be made again: then nothing is mended, and the next one begins there."""
    with _pair() as pair:
        _forget(_flip(FIRST_ACTIONS, 600))(pair.copy)
        _open_and_look(pair)
        pair.copy.store.checkpoint()
        pair.wait()
        (span,) = pair.copy.store.rotten_spans()
        chunk = pair.master.store.read_chunk(1, span.start, 700)
        assert chunk is not None
        _fill_up(pair.copy)
        with pytest.raises(DiskFull):
            pair.copy.store.mend(1, span.start, chunk.data)
        assert not pair.copy.store.is_view_stale
        pair.copy.disk.remove("filler")
        pair.copy.store.mend(1, span.start, chunk.data)
        pair.copy.end(SimDisk.crash_process)
        _open_and_look(pair)
        assert pair.copy.view.found == pair.master.view.found


def _fill_up(side: Side) -> None:
    side.disk.reserve(side.disk.open("filler", create=True), side.disk.free_bytes())


def _open_and_look(pair: Pair) -> None:
    store = pair.copy.open(follows=True)
    store.confirm(*pair.master.store.committed_ends())
    for subject in (ORDERS, BILLS):
        messages(store, subject)


def test_logs_have_numbers() -> None:
    with _pair() as pair:
        pair.copy.open(follows=True)
        assert [log.directory for log in (pair.copy.store.messages.log, pair.copy.store.actions.log)] == list(LOGS)


def _dated_ahead() -> tuple[Pair, int]:
    """A master whose clock was ahead for some minutes, and a copy that has everything, let go of. Also the number of
    the segment with which append times went back."""
    pair = Pair("dated ahead")

    def fill(count: int) -> None:
        for number in range(count):
            pair.send([b"%d" % number * 80])
        pair.settle()

    fill(20)
    for jump_ms in (YEAR_MS, -YEAR_MS):
        pair.sim.clock.jump(jump_ms)
        pair.master.store.follow_clock()
        pair.wait(61)
        fill(20)
    pair.copy.store.checkpoint()
    pair.wait()
    pair.copy.disk.publish(witness_name("messages", pair.copy.store.messages.log.synced_end), [])  # or it is torn
    pair.copy.abandon()
    [later] = [number for number, each in enumerate(pair.master.store.messages.log.segments) if each.set_back_ms]
    return pair, later


@pytest.mark.parametrize("has_views", [True, False], ids=["", "without a checkpoint"])
@pytest.mark.parametrize("what", ["its header", "its first record", "it", "the one before", "the end before"])
def test_where_times_went_back_is_known_again_once_it_is_mended(what: str, has_views: bool) -> None:
    pair, later = _dated_ahead()
    with pair:
        name = _segment(pair.copy, later)
        ruins: dict[str, Ruin] = {
            "its header": _flip(name, 12),
            "its first record": _flip(name, segment.HEADER_BYTES + 20),
            "it": _lose(later),
            "the one before": _lose(later - 1),
            "the end before": _chop(later - 1, 400),
        }
        (ruins[what] if has_views else _forget(ruins[what]))(pair.copy)
        store = pair.copy.open(follows=True)
        store.confirm(*pair.master.store.committed_ends())
        store.messages.read(1, 0, messages_max=1_000, bytes_max=1 << 20)  # meets what the checkpoint covers
        is_known = bool(store.rotten_spans())
        assert is_known or (has_views and what in {"its header", "its first record"})  # which nobody reads then
        _mend(pair)
        assert not is_known or bytes_of(pair.copy) == bytes_of(pair.master)
        assert store.messages.log.segments == pair.master.store.messages.log.segments
        assert store.messages.log.newest_ms == pair.master.store.messages.log.newest_ms


def test_a_copy_that_was_mended_at_its_end_sees_that_times_go_back_behind_it() -> None:
    with Pair("mended at its end") as pair:
        pair.send([b"a"])
        pair.settle()
        pair.sim.clock.jump(YEAR_MS)
        pair.master.store.follow_clock()
        pair.wait(61)
        pair.send([b"b" * 500])
        pair.settle()
        pair.copy.store.checkpoint()
        pair.wait()
        pair.copy.abandon()
        for name in names(pair.copy.disk, "checkpoints"):
            pair.copy.disk.remove(name)
        file = pair.copy.disk.open(FIRST_MESSAGES)
        size = file.size
        file.close()
        pair.copy.disk.publish(witness_name("messages", size), [])
        pair.copy.disk.chop(FIRST_MESSAGES, size - 300)
        store = pair.copy.open(follows=True)
        _mend(pair)
        pair.sim.clock.jump(-YEAR_MS)
        pair.master.store.follow_clock()
        pair.wait(61)
        pair.send([b"c"])
        pair.settle()
        assert pair.master.store.messages.log.segments[-1].set_back_ms > 0
        assert store.messages.log.segments == pair.master.store.messages.log.segments
