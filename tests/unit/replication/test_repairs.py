"""What has rotted on a master comes back from a copy that is in sync; until then readers wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from fairway.batch import checksum
from fairway.errors import Code, Refused, StorageFault
from fairway.protocol.frames import stretched
from fairway.protocol.replication_messages import Give, Want
from fairway.replication import follower
from fairway.replication.peers import NS_PER_MS, Peer, Repairs, ReplicationCounters
from fairway.runtime.clock import RealClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage import record
from fairway.storage.log import Damaged
from fairway.storage.store import Store
from tests.unit.storage.copies import Pair, Side, bytes_of
from tests.unit.storage.helpers import FIRST_ACTIONS, FIRST_MESSAGES, ORDERS, SMALL, batch_of, messages

ANSWER_MS, AGAIN_MS = 2_000, 60_000
COPY = "copy"


class Connection:
    is_gone = False


class Scene:
    """A master's store, and a copy of it that is in sync; the repairs as a leader drives them."""

    def __init__(self, master: Store, copy: Store) -> None:
        self.master, self.copy = master, copy
        self.tally = ReplicationCounters()
        self.repairs = Repairs(master, self.tally, ANSWER_MS, AGAIN_MS)
        self.peer = Peer(COPY, Connection(), 0)
        self.peer.confirmed = copy.ends()
        self.now_ns = 0
        master.messages.is_awaited = lambda position: self.repairs.hopes_for(position, [COPY], self.now_ns)

    def ask(self) -> Want | None:
        chosen = self.repairs.choose([self.peer], self.now_ns)
        if chosen is None:
            return None
        _, span = chosen
        return Want(span.log, span.start, span.end - span.start)

    def bring(self, want: Want) -> int:
        give, attached = follower.give(self.copy, 1, want)
        return self.repairs.take(COPY, give, stretched(attached[0]) if attached else b"", self.now_ns)

    def repair_with(self, want: Want | None) -> None:
        """That one, and what is left."""
        assert want is not None
        self.bring(want)
        self.repair()

    def repair(self, rounds_max: int = 100) -> None:
        for _ in range(rounds_max):
            want = self.ask()
            if want is None:
                return
            self.bring(want)
        raise AssertionError("it never ends")


def filled(count: int = 45) -> Pair:
    """A master and a copy, both open, that have the same."""
    pair = Pair()
    for number in range(count):
        pair.send([b"%d" % number * 80])
        pair.act(number)
        if number % 4 == 0:
            pair.wait(0.01)
    pair.settle()
    return pair


def spoil(side: Side, log: int = 0) -> None:
    """A bit flips in the body of the eighth record."""
    place = side.store.positions(log, 0, 4_000)[7]
    side.disk.flip((FIRST_MESSAGES, FIRST_ACTIONS)[log], (place + record.HEADER_BYTES + 20) * 8)


def refused(store: Store) -> Refused:
    with pytest.raises(Refused) as caught:
        messages(store, ORDERS)
    return caught.value


def met(pair: Pair) -> Scene:
    """A reader has met rot on the master."""
    scene = Scene(pair.master.store, pair.copy.store)
    spoil(pair.master)
    refused(pair.master.store)
    return scene


def test_a_reader_waits_for_what_a_copy_has_and_then_reads_it() -> None:
    with filled() as pair:
        before = messages(pair.master.store, ORDERS)
        scene = Scene(pair.master.store, pair.copy.store)
        spoil(pair.master)
        error = refused(pair.master.store)
        assert error.code is Code.BUSY
        assert "another copy" in error.sentence
        assert error.retry_after_ms
        scene.repair()
        assert messages(pair.master.store, ORDERS) == before
        assert pair.master.store.rotten == []
        assert bytes_of(pair.master) == bytes_of(pair.copy)
        assert (scene.tally.mended_spans, scene.repairs.is_hopeful([COPY], 0)) == (1, False)
        assert scene.tally.mended_bytes > 0


def test_without_a_copy_readers_step_over_it_as_they_always_did() -> None:
    with filled() as pair:
        before = messages(pair.master.store, ORDERS)
        scene = Scene(pair.master.store, pair.copy.store)
        pair.master.store.messages.is_awaited = lambda position: scene.repairs.hopes_for(position, [], 0)
        spoil(pair.master)
        assert len(messages(pair.master.store, ORDERS)) == len(before) - 1
        assert not scene.repairs.is_hopeful([], 0)
        assert len(pair.master.store.rotten) == 1
        scene.repair()  # one comes later: what was passed over is readable again
        assert messages(pair.master.store, ORDERS) == before


def test_a_copy_that_has_lost_it_too_is_not_waited_for() -> None:
    with filled() as pair:
        scene = Scene(pair.master.store, pair.copy.store)
        spoil(pair.master)
        spoil(pair.copy)
        refused(pair.master.store)
        scene.repair()
        assert not scene.repairs.is_hopeful([COPY], 0)
        assert len(messages(pair.master.store, ORDERS)) == 44
        assert scene.ask() is None
        scene.repairs.forget(COPY)  # it follows anew, and may have been repaired
        assert scene.ask() is not None


def test_a_copy_that_does_not_answer_is_left_alone_for_a_while() -> None:
    with filled() as pair:
        scene = met(pair)
        want = scene.ask()
        assert want is not None
        assert scene.ask() is None, "one at a time"
        for _ in range(AGAIN_MS // ANSWER_MS - 1):
            scene.now_ns += ANSWER_MS * NS_PER_MS
            assert scene.ask() == want, "it is in sync, and may only stand still for a moment"
            assert refused(pair.master.store).code is Code.BUSY
        scene.now_ns += ANSWER_MS * NS_PER_MS
        assert scene.ask() is None, "for a minute it has confirmed everything, and said nothing of this"
        assert len(messages(pair.master.store, ORDERS)) == 44
        scene.now_ns += AGAIN_MS * NS_PER_MS
        scene.repair()
        assert len(messages(pair.master.store, ORDERS)) == 45


def test_what_comes_late_is_taken_all_the_same() -> None:
    """Two copies that take three seconds each: while one is asked the other's answer comes."""
    with filled() as pair:
        scene = met(pair)
        want = scene.ask()
        assert want is not None
        other = Peer("another", Connection(), 0)
        other.confirmed = scene.peer.confirmed
        scene.now_ns += ANSWER_MS * NS_PER_MS
        chosen = scene.repairs.choose([scene.peer, other], scene.now_ns)
        assert chosen is not None
        assert chosen[0] is other
        assert scene.bring(want) > want.position
        assert len(messages(pair.master.store, ORDERS)) == 45


def test_a_copy_that_was_silent_once_is_hoped_for_the_next_time() -> None:
    with filled() as pair:
        scene = met(pair)
        want = scene.ask()
        scene.now_ns += ANSWER_MS * NS_PER_MS
        assert scene.ask() == want
        scene.repair_with(want)
        assert len(messages(pair.master.store, ORDERS)) == 45
        scene.now_ns += 3_600_000 * NS_PER_MS
        spoil(pair.master)
        refused(pair.master.store)
        again = scene.ask()
        scene.now_ns += ANSWER_MS * NS_PER_MS
        assert scene.ask() == again, "it has not answered for two seconds, not for an hour"
        assert refused(pair.master.store).code is Code.BUSY


def test_a_copy_that_has_not_answered_is_asked_behind_the_others() -> None:
    with filled() as pair:
        scene = met(pair)
        other = Peer("another", Connection(), 0)
        other.confirmed = scene.peer.confirmed
        asked = []
        for _ in range(4):
            chosen = scene.repairs.choose([scene.peer, other], scene.now_ns)
            asked.append(None if chosen is None else chosen[0].directory)
            scene.now_ns += ANSWER_MS * NS_PER_MS
        assert asked == [COPY, "another", COPY, "another"]


def test_only_a_copy_that_has_confirmed_it_is_asked() -> None:
    with filled() as pair:
        scene = met(pair)
        scene.peer.confirmed = (0, 0)
        assert scene.ask() is None


@pytest.mark.parametrize("wrong", ["another place", "another log", "nonsense", "a forgery"])
def test_what_is_not_the_lost_record_changes_nothing(wrong: str) -> None:
    with filled() as pair:
        scene = met(pair)
        before = bytes_of(pair.master)
        want = scene.ask()
        assert want is not None
        right = pair.copy.store.read_chunk(0, want.position, want.size)
        assert right is not None
        header = record.parse_header(right.data, 0, want.position, pair.master.store.messages.log.log_id)
        log_id = pair.master.store.messages.log.log_id
        after = pair.copy.store.read_chunk(0, want.position + want.size, want.size)
        assert after is not None
        data = {
            "another place": after.data,
            "another log": record.pack_header(header, log_id + 1) + right.data[record.HEADER_BYTES :],
            "nonsense": bytes(200),
            "a forgery": _forged(right.data, want.position, log_id),
        }
        assert scene.repairs.take(COPY, Give(1, 2, 0, want.position), data[wrong], 0) == want.position
        assert bytes_of(pair.master) == before
        assert pair.master.store.rotten
        assert len(messages(pair.master.store, ORDERS)) == 44, "there is no hope any more"


def _forged(right: bytes, position: int, log_id: int) -> bytes:
    """A record with every checksum right, for that place of that log, that was never there."""
    header = record.parse_header(right, 0, position, log_id)
    body = right[record.HEADER_BYTES : -8] + b"forged!!"
    return record.pack_header(msgspec.structs.replace(header, body_crc=checksum(body)), log_id) + body


@pytest.mark.parametrize("log", [0, 1])
def test_a_repair_can_be_killed_at_every_step(log: int) -> None:
    for step in range(1, 200):
        with filled(25) as pair:
            pair.master.store.checkpoint()
            pair.wait()
            spoil(pair.master, log)
            scene = Scene(pair.master.store, pair.copy.store)
            _meet(pair, log)
            want = scene.ask()
            assert want is not None
            assert want.log == log
            pair.master.disk.crash_after(step)
            try:
                scene.bring(want)
            except SimulatedPowerCut:
                pair.master.end(SimDisk.crash if step % 2 else SimDisk.crash_process)
            else:
                assert pair.master.store.is_view_stale == (log == 1)
                return
            pair.master.open(epoch=2)
            pair.master.store.hold()
            pair.master.store.confirm(*pair.copy.store.ends())
            scene = Scene(pair.master.store, pair.copy.store)
            _meet(pair, log)
            scene.repair()
            assert messages(pair.master.store, ORDERS) == messages(pair.copy.store, ORDERS)
            pair.wait()
            pair.master.abandon()
            pair.master.open(epoch=3)
            assert pair.master.view.found == pair.copy.view.found
            mended = bytes_of(pair.master)
            for segment, content in bytes_of(pair.copy).items():
                assert mended[segment][: len(content)] == content
    raise AssertionError("it never ends")


def _meet(pair: Pair, log: int) -> None:
    """Somebody reads everything: a group, or a copy that catches up."""
    store, at = pair.master.store, 0
    for _ in range(1_000):
        if at >= pair.copy.store.ends()[log]:
            return
        try:
            chunk = store.read_chunk(log, at, 10_000)
        except Damaged:
            return
        assert chunk is not None
        at += len(chunk.data)


def test_actions_are_mended_and_the_groups_have_to_be_made_again() -> None:
    with filled() as pair:
        pair.master.abandon()
        pair.master.disk.flip(FIRST_ACTIONS, 600 * 8)
        for name in pair.master.disk.listing("checkpoints"):
            pair.master.disk.remove(f"checkpoints/{name}")
        store = pair.master.open(epoch=2)
        store.hold()
        store.confirm(*pair.copy.store.ends())
        assert pair.master.view.found != pair.copy.view.found
        Scene(store, pair.copy.store).repair()
        assert store.is_view_stale
        assert store.rotten == []
        pair.wait()
        pair.master.abandon()
        pair.master.open(epoch=3)
        assert pair.master.view.found == pair.copy.view.found


def test_a_disk_that_fails_on_the_way_ends_the_store() -> None:
    with filled() as pair:
        scene = met(pair)
        want = scene.ask()
        assert want is not None
        pair.master.disk.fail_sync()
        scene.bring(want)
        assert isinstance(pair.master.store.fault, StorageFault)


def test_real_files_are_mended(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop, clock = asyncio.get_running_loop(), RealClock()
        disks = [RealDisk(tmp_path / name, post=loop.call_soon_threadsafe) for name in ("a", "b")]
        master = Store.open(disks[0], clock, SeededRng(1), defer=loop.call_soon, options=SMALL, epoch=1)
        master.hold()
        adopt = master.identity
        copy = Store.open(disks[1], clock, SeededRng(2), defer=loop.call_soon, options=SMALL, follows=True, adopt=adopt)
        for number in range(40):
            master.produce(ORDERS, batch_of([b"%d" % number * 80], first=number))
        await master.messages.log.flusher.synced(master.messages.log.end)
        while (chunk := master.read_chunk(0, copy.messages.log.end, 4_000)) is not None:
            copy.follow(0, *chunk)
        await copy.messages.log.flusher.synced(copy.messages.log.end)
        master.confirm(*copy.ends())
        before = messages(master, ORDERS)
        file = tmp_path / "a" / FIRST_MESSAGES
        whole = file.read_bytes()
        file.write_bytes(whole[:900] + bytes([whole[900] ^ 1]) + whole[901:])
        scene = Scene(master, copy)
        assert refused(master).code is Code.BUSY
        scene.repair()
        assert messages(master, ORDERS) == before
        assert file.read_bytes() == whole
        await master.close()
        await copy.close()

    asyncio.run(scenario())
