"""The bytes that a pull or a scan asks for bound what comes before compression, too: a small batch may hold much."""

from __future__ import annotations

from fairway import batch
from fairway.broker.response_bounds import fitting_batches, fitting_raw
from fairway.groups import Backoff, GroupConfig, Handout, Order
from fairway.limits import KIB, MIB
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Scan, Scanned
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import StoredBatch
from tests.unit.broker.scene import SUBJECT, Scene, Worker, staged

RAW_BYTES = 300 * KIB  # three of them fit into a pull of 1 MiB
MESSAGES = 3


def bomb(number: int, *, keys: list[str | None] | None = None) -> bytes:
    payloads = [b"%d" % number * (RAW_BYTES // MESSAGES)] * MESSAGES
    return batch.encode(
        payloads, producer_id=9, first_sequence=MESSAGES * number, created_ms=1, keys=keys, codec=batch.Codec.ZSTD
    )


def stored(number: int) -> StoredBatch:
    data = bomb(number)
    return StoredBatch(ConsumeLogEntry(MESSAGES * number, MESSAGES, len(data), 0, 0, 0, 0, 0), data)


async def send_bombs(scene: Scene, count: int, *, keys: list[str | None] | None = None) -> None:
    client = await scene.control()
    for number in range(count):
        data = bomb(number, keys=keys)
        assert len(data) < KIB
        await client.produce(SUBJECT, data)


def batches_of(sequences: list[int]) -> list[int]:
    return sorted({sequence // MESSAGES for sequence in sequences})


async def pulled(worker: Worker) -> list[int]:
    """The sequences of one answer, which are acked."""
    handed = await worker.pull()
    await worker.ack(handed)
    return [each.sequence for each in handed.messages]


# --- the sums --------------------------------------------------------------------------------------------------------


def test_messages_are_counted_up_to_the_batch_that_is_too_much() -> None:
    batches = [stored(number) for number in range(4)]
    lots = [Handout(0, 1, ((0, 5),)), Handout(5, 1, ((5, 7),))]
    assert fitting_raw(lots, batches, 8 * MIB) is None
    assert fitting_raw(lots, batches, MIB) == 9
    assert fitting_raw(lots, batches, 400 * KIB) == 3
    assert fitting_raw(lots, batches, 1) == 3, "one batch always comes"
    assert fitting_raw(lots[:1], batches[:1], 1) is None


def test_batches_are_counted_from_the_first_on() -> None:
    batches = [stored(number) for number in range(4)]
    assert [fitting_batches(batches, most) for most in (1, 400 * KIB, MIB, 8 * MIB)] == [1, 1, 3, 4]


# --- the broker ------------------------------------------------------------------------------------------------------


@staged
async def test_a_pull_brings_no_more_raw_bytes_than_it_asked_for(scene: Scene) -> None:
    await send_bombs(scene, 10)
    ann = await scene.worker("ann")
    found = [await pulled(ann) for _ in range(4)]
    assert [batches_of(each) for each in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [sequence for each in found for sequence in each] == list(range(30))


@staged
async def test_an_answer_that_did_not_arrive_comes_as_it_was(scene: Scene) -> None:
    await send_bombs(scene, 10)
    ann = await scene.worker("ann")
    first = await ann.pull()
    ann.arrived = 0
    again = await ann.pull()
    assert again.number == first.number
    assert [each.sequence for each in again.messages] == [each.sequence for each in first.messages]
    await ann.ack(again)
    assert batches_of(await pulled(ann)) == [3, 4, 5]


@staged
async def test_retries_that_lie_in_many_batches_are_bounded(scene: Scene) -> None:
    await scene.configure(GroupConfig(version=1, backoff=Backoff(first_ms=10, cap_ms=10, jitter=0)))
    await send_bombs(scene, 6)
    ann = await scene.worker("ann")
    for _ in range(2):
        await ann.retry(await ann.pull())
    await scene.sleep(1)
    got: list[int] = []
    for _ in range(6):
        some = await pulled(ann)
        assert len(batches_of(some)) <= 3
        got += some
    assert sorted(got) == list(range(18))


@staged
async def test_runs_of_a_key_are_bounded_and_stay_in_order(scene: Scene) -> None:
    await scene.configure(GroupConfig(version=1, order=Order.KEY))
    await send_bombs(scene, 6, keys=["a", "b", "a"])
    ann = await scene.worker("ann")
    got: list[int] = []
    for _ in range(18):
        handed = await ann.pull(run_max=64)
        some = [each.sequence for each in handed.messages]
        assert len(batches_of(some)) <= 3
        await ann.ack(handed)
        got += some
    assert sorted(got) == list(range(18))
    for key in ({0, 2}, {1}):
        of_key = [each for each in got if each % MESSAGES in key]
        assert of_key == sorted(of_key)


@staged
async def test_a_scan_brings_no_more_raw_bytes_than_it_asked_for(scene: Scene) -> None:
    await send_bombs(scene, 7)
    at, found = 0, []
    while at < 21:
        asked = Scan(SUBJECT, m.Whence.SEQUENCE, at, None, MIB)
        scanned, attached = await (await scene.control()).ask(asked, Scanned)
        assert len(attached) == len(scanned.batches) <= 3
        assert scanned.size_bytes == sum(map(len, attached))
        found += [each.first_sequence for each in scanned.batches]
        at = scanned.next_sequence
    assert found == [0, 3, 6, 9, 12, 15, 18]


@staged
async def test_a_scan_for_one_byte_brings_one_batch(scene: Scene) -> None:
    await send_bombs(scene, 2)
    scanned, attached = await (await scene.control()).ask(Scan(SUBJECT, m.Whence.SEQUENCE, 0, None, 1), Scanned)
    assert (len(attached), scanned.next_sequence) == (1, 3)
