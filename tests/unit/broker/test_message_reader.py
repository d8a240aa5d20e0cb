"""What many groups read one after the other is read twice, and never anything but what the log holds."""

from __future__ import annotations

from fairway.broker.message_reader import BATCH_BYTES_MAX, BATCHES_MAX, BYTES_MAX, RecentReads
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import StoredBatch
from tests.unit.broker.scene import Scene, staged


def batch_at(position: int, size: int = 100) -> StoredBatch:
    entry = ConsumeLogEntry(position, 1, size, position, 0, 0, 1, position)
    return StoredBatch(entry, bytes([position % 251]) * size)


def test_what_was_read_twice_is_found_and_what_was_read_once_is_not() -> None:
    recent = RecentReads()
    first, second = batch_at(0), batch_at(100)
    recent.note([first, second])
    assert recent.find([first.entry]) is None
    recent.note([first])
    assert recent.find([first.entry]) == [first]
    assert recent.find([first.entry, second.entry]) is None
    recent.note([first, second])
    assert recent.find([first.entry, second.entry]) == [first, second]


def test_a_large_batch_is_not_kept() -> None:
    recent = RecentReads()
    large = batch_at(0, BATCH_BYTES_MAX + 1)
    for _ in range(3):
        recent.note([large])
    assert recent.find([large.entry]) is None


def test_the_oldest_go_first_where_there_are_too_many_or_they_are_too_large() -> None:
    recent = RecentReads()
    many = [batch_at(number) for number in range(BATCHES_MAX + 1)]
    for _ in range(2):
        recent.note(many[:-1])
    recent.note(many[-1:])
    assert recent.find([many[0].entry]) is None
    assert recent.find([many[1].entry]) == [many[1]]
    wide = [batch_at(10_000 + number, BATCH_BYTES_MAX) for number in range(BYTES_MAX // BATCH_BYTES_MAX + 1)]
    for _ in range(2):
        recent.note(wide)
    assert recent.find([wide[0].entry]) is None
    assert recent.find([wide[-1].entry]) == [wide[-1]]


@staged
async def test_many_groups_on_one_subject_get_the_same_messages(scene: Scene) -> None:
    workers = [await scene.worker("ann", group=f"group-{number}") for number in range(8)]
    for payload in (b"one", b"two", b"three"):
        await scene.send(payload)
        for worker in workers:
            assert await worker.drain() == [payload]


@staged
async def test_groups_that_ask_at_different_places_are_not_confused(scene: Scene) -> None:
    ahead, behind = await scene.worker("ann", group="ahead"), await scene.worker("ben", group="behind")
    sent = [b"%d" % number for number in range(6)]
    for payload in sent[:3]:
        await scene.send(payload)
    assert await ahead.drain() == sent[:3]
    for payload in sent[3:]:
        await scene.send(payload)
    assert await behind.drain() == sent
    assert await ahead.drain() == sent[3:]
