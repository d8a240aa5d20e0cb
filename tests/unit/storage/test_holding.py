"""A held store: what is written here counts once the copies have it too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fairway.errors import Code, FairwayError, Misuse, Refused, StorageFault
from fairway.storage.flusher import Durability, Flusher
from fairway.storage.store import Store, StoreOptions
from tests.unit.storage.copies import Pair
from tests.unit.storage.helpers import BILLS, ORDERS, SMALL, World, ack, batch_of, messages

EVERYTHING = 1 << 60


def _told(flusher: Flusher, position: int, into: list[tuple[int, bool]], undos: int | None = None) -> None:
    flusher.when_durable(position, lambda outcome: into.append((position, outcome is None)), undos)


def test_nobody_is_answered_before_it_is_confirmed() -> None:
    with World() as world:
        world.store.hold()
        log, told = world.store.messages.log, list[tuple[int, bool]]()
        ends = [world.send([b"%d" % number]).end for number in range(3)]
        for end in ends:
            _told(log.flusher, end, told)
        world.run(asyncio.sleep(1))
        assert (told, log.synced_end, log.committed_end) == ([], log.end, 0)
        assert messages(world.store) == {}
        world.store.confirm(ends[0], 0)
        assert log.committed_end == ends[0]
        assert list(messages(world.store)) == [0]
        world.store.confirm(ends[2], 0)
        assert told == [(end, True) for end in ends]
        assert list(messages(world.store)) == [0, 1, 2]


def test_what_is_asked_for_later_waits_in_its_place() -> None:
    with World() as world:
        world.store.hold()
        flusher, told = world.store.messages.log.flusher, list[tuple[int, bool]]()
        ends = []
        for number in range(4):
            ends.append(world.send([b"%d" % number]).end)
            world.run(asyncio.sleep(1))
        for end in reversed(ends):
            _told(flusher, end, told)
        world.store.confirm(ends[1], 0)
        assert told == [(ends[0], True), (ends[1], True)]
        world.store.confirm(ends[0], 0)  # never back
        _told(flusher, ends[1], told)
        world.store.confirm(EVERYTHING, 0)
        assert told[2:] == [(ends[1], True), (ends[2], True), (ends[3], True)]


def test_a_confirmation_ahead_of_the_disk_waits_for_it() -> None:
    with World() as world:
        world.store.hold()
        world.store.confirm(EVERYTHING, EVERYTHING)
        log, told = world.store.messages.log, list[tuple[int, bool]]()
        world.run(asyncio.sleep(1))
        receipt = world.send([b"x"])
        _told(log.flusher, receipt.end, told)
        assert (told, log.committed_end < receipt.end) == ([], True)
        world.run(world.store.durable(receipt))
        assert (told, log.committed_end) == ([(receipt.end, True)], log.end)


def test_the_owner_hears_of_syncs_and_of_commits_apart() -> None:
    with World() as world:
        world.store.hold()
        heard: list[str] = []
        world.store.on_synced = lambda: heard.append("synced")
        world.store.on_actions = lambda: heard.append("committed")
        header = world.store.act([ack(0)])
        world.run(asyncio.sleep(1))
        assert set(heard) == {"synced"}
        assert world.store.ends() == (world.store.messages.log.end, header.end)
        world.store.confirm(0, header.end)
        assert heard[-1] == "committed"


def test_a_full_disk_undoes_nothing_that_is_synced() -> None:
    with World() as world:
        world.run(asyncio.sleep(1))
        world.store.hold()
        log, told = world.store.messages.log, list[tuple[int, bool]]()
        kept = world.send([b"kept"])
        world.run(asyncio.sleep(1))
        world.disk.fail_write()
        undone = world.send([b"undone"])
        world.run(asyncio.sleep(1))
        _told(log.flusher, kept.end, told, kept.undos)
        _told(log.flusher, undone.end, told, undone.undos)
        assert told == [(undone.end, False)]
        world.store.confirm(EVERYTHING, 0)
        assert told == [(undone.end, False), (kept.end, True)]
        assert list(messages(world.store).values()) == [b"kept"]


def test_what_was_found_at_the_start_is_not_taken_for_confirmed() -> None:
    with World() as world:
        world.produce([b"old"])
        world.checkpoint()
        checkpointed = world.store.messages.log.end
        world.produce([b"x" * 600 for _ in range(20)])  # fills segments, which recovery seals
        world.crash()
        world.open()
        world.store.hold()
        log = world.store.messages
        state = log.views.subjects.find(ORDERS)
        assert state is not None
        assert (log.log.committed_end, log.end_sequence(state.id)) == (checkpointed, 1)
        assert list(messages(world.store)) == [0]
        world.run(asyncio.sleep(1))
        world.store.checkpoint()
        world.run(asyncio.sleep(1))
        half = list(log.views.entries.entries(state.id, 0, EVERYTHING))[1].position
        world.store.confirm(half, EVERYTHING)
        assert log.end_sequence(state.id) == 1
        world.store.confirm(EVERYTHING, EVERYTHING)
        assert log.end_sequence(state.id) == 21
        assert len(messages(world.store)) == 21


def test_a_checkpoint_covers_nothing_that_is_not_committed() -> None:
    with Pair() as pair:
        store = pair.master.store
        pair.send([b"old"])
        pair.act(0)
        pair.settle()
        before = store.ends()
        ended: list[str] = []
        for number in range(30):
            pair.send([b"%d" % number * 100])
        pair.act(1)
        pair.wait()
        store.checkpoint(then=lambda: ended.append("ended"))
        pair.wait()
        assert ended == []  # the view of actions is ahead of what is committed
        store.confirm(before[0], EVERYTHING)
        pair.wait()
        assert ended == ["ended"]
        assert store.checkpointed_ends() == (before[0], store.actions.log.end)
        pair.master.end()
        store = pair.master.open()
        assert (store.findings, store.remarks) == ([], [])
        assert len(messages(store)) == 31
        assert pair.master.view.found == [0, 1]


def test_epochs_that_are_not_committed_are_no_part_of_a_checkpoint() -> None:
    with Pair() as pair:
        pair.send([b"first"])
        pair.settle()
        pair.run(_checkpointed(pair))
        pair.copy.abandon()
        pair.master.abandon()
        for epoch in (2, 3):
            pair.master.open(epoch=epoch)
            pair.master.store.hold()
            pair.send([b"epoch %d" % epoch])
            pair.wait()
            pair.master.store.checkpoint()
            pair.wait()
            pair.master.end()
        store = pair.master.open(epoch=4)
        assert store.findings == []
        assert len(messages(store)) == 3


async def _checkpointed(pair: Pair) -> None:
    ended = asyncio.Event()
    pair.master.store.checkpoint(then=ended.set)
    await ended.wait()


def test_closing_waits_for_no_copy() -> None:
    with World() as world:
        world.store.hold()
        world.send([b"x"])
        world.store.act([ack(0)])
        world.close()
        store = world.open()
        assert store.findings == []
        assert list(messages(store).values()) == [b"x"]


def test_what_is_let_go_answers_nobody_and_can_be_opened() -> None:
    with World() as world:
        world.store.hold()
        receipt = world.send([b"x"])
        outcomes: list[FairwayError | None] = []
        world.store.messages.log.flusher.when_durable(receipt.end, outcomes.append)
        world.run(asyncio.sleep(1))
        faults: list[StorageFault] = []
        world.store.on_fault = faults.append
        ended: list[str] = []
        world.store.checkpoint(then=lambda: ended.append("ended"))
        world.store.abandon()
        assert [type(each) for each in outcomes] == [StorageFault]
        assert (faults, ended) == ([], ["ended"])
        with pytest.raises(StorageFault, match="set aside"):
            world.send([b"y"])
        world.kill()
        assert list(messages(world.open()).values()) == [b"x"]


def test_an_epoch_is_chosen_or_the_next() -> None:
    with World() as world:
        assert world.store.epoch == 1
        world.close()
        with pytest.raises(Misuse, match="epoch 1 cannot begin"):
            _open(world, epoch=1)
        world.kill()
        assert _open(world, epoch=7).epoch == 7
        world.settle()
        world.kill()
        assert world.open().epoch == 8


def _open(world: World, epoch: int) -> Store:
    world.store = Store.open(
        world.disk, world.clock, world.sim.rng.child("x"), defer=world._defer, options=world.options, epoch=epoch
    )
    return world.store


def test_in_memory_it_is_the_lower_of_what_is_written_and_what_is_confirmed() -> None:
    lazy = StoreOptions(
        segment_bytes=SMALL.segment_bytes,
        action_segment_bytes=SMALL.action_segment_bytes,
        low_water_bytes=0,
        durability=Durability.MEMORY,
    )
    with World(options=lazy) as world:
        world.store.hold()
        log = world.store.messages.log
        receipts = [world.send([b"%d" % number]) for number in range(2)]
        world.run(asyncio.sleep(1))
        world.send([b"written, not synced"])
        world.run(asyncio.sleep(1))
        assert (log.committed_end, log.flusher.written_end, log.synced_end < log.end) == (0, log.end, True)
        world.store.confirm(receipts[1].end, 0)
        assert list(messages(world.store)) == [0, 1]
        world.store.checkpoint()
        world.run(asyncio.sleep(1))
        world.store.sync()
        world.store.confirm(EVERYTHING, EVERYTHING)
        world.run(asyncio.sleep(1))
        assert (log.synced_end, log.committed_end) == (log.end, log.end)
        assert world.store.checkpointed_ends()[0] <= log.end


def test_retention_leaves_what_copies_may_lack() -> None:
    with World() as world:
        world.store.hold()
        for number in range(12):
            world.send([b"%d" % number * 900])
        world.run(asyncio.sleep(1))
        assert len(world.store.messages.log.segments) > 2
        assert world.store._droppable_end() == 0
        world.store.confirm(EVERYTHING, EVERYTHING)
        assert world.store._droppable_end() == world.store.messages.log.segments[-1].base


def test_a_copy_writes_nothing_of_its_own() -> None:
    with Pair() as pair:
        pair.send([b"x"])
        pair.settle()
        store, ends = pair.copy.store, pair.copy.store.ends()
        attempts: list[Callable[[], object]] = [
            lambda: store.produce(ORDERS, batch_of([b"x"])),  # also what it has already
            lambda: store.act([ack(0)]),
            lambda: store.ensure_subject(BILLS),
        ]
        for attempt in attempts:
            with pytest.raises(Refused) as caught:
                attempt()
            assert caught.value.code is Code.NOT_MASTER
        pair.wait()
        assert store.ends() == ends
