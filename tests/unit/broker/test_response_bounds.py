"""What goes into one answer: no more bytes than were asked for, nothing that the frame cannot hold or nobody read."""

from __future__ import annotations

from fairway import limits
from fairway.broker.response_bounds import beyond, fitting, missing, too_large
from fairway.errors import Code
from fairway.groups import Backoff, GroupConfig, Handout, Mode
from fairway.limits import KIB
from fairway.names import GroupName
from fairway.protocol import ConnectionOptions
from fairway.protocol import messages as m
from fairway.storage import segment
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import StoredBatch
from tests.unit.broker.scene import GROUP, SUBJECT, Scene, Worker, refused, staged

DEAD = "dead:billing:orders"
HURRIED = Backoff(first_ms=1_000, cap_ms=1_000, jitter=0)


def stored(first: int, count: int, size: int) -> StoredBatch:
    return StoredBatch(ConsumeLogEntry(first, count, size, 0, 0, 0, 0, 0), bytes(size))


async def narrow(scene: Scene, name: str, frame_bytes_max: int = 4 * KIB) -> Worker:
    """A consumer that takes small frames only."""
    worker = Worker(await scene.connect(ConnectionOptions(frame_bytes_max=frame_bytes_max)), name, GROUP, SUBJECT)
    await worker.join()
    return worker


# --- the sums --------------------------------------------------------------------------------------------------------


def test_the_first_batch_always_comes_and_others_while_there_is_room() -> None:
    lots = [Handout(0, 2, ((0, 1),)), Handout(4, 2, ((4, 1),)), Handout(7, 1, ((7, 3),))]
    entries = [stored(0, 2, 500).entry, stored(4, 4, 500).entry, stored(8, 4, 500).entry]
    assert fitting(lots, entries, 1, limits.FRAME_BYTES_MAX) == 1
    assert fitting(lots, entries, 1_000, limits.FRAME_BYTES_MAX) == 3  # 7 is in the same batch as 4
    assert fitting(lots, entries, 1_500, limits.FRAME_BYTES_MAX) is None
    assert fitting(lots, entries, 1_500, 1_000) == 1


def test_many_spans_of_one_batch_are_no_free_ride() -> None:
    lots = [Handout(0, 2, tuple((each, 1) for each in range(0, 1_000, 2)))]
    fits = fitting(lots, [stored(0, 1_000, 1_000).entry], 1_000, 4 * KIB)
    assert fits is not None
    assert 100 < fits < 250


def test_what_lies_beyond_a_number_of_messages() -> None:
    lots = [Handout(0, 1, ((0, 2), (4, 2))), Handout(9, 1, ((9, 1),))]
    assert beyond(lots, 3) == [Handout(0, 1, ((5, 1),)), Handout(9, 1, ((9, 1),))]
    assert beyond(lots, 5) == []


def test_what_is_in_no_batch_or_in_one_that_is_too_large() -> None:
    lots = [Handout(0, 1, ((0, 10),)), Handout(20, 1, ((20, 2),))]
    batches = [stored(0, 3, 8), stored(5, 2, 8_000)]
    assert missing(lots, batches) == [Handout(0, 1, ((3, 2), (7, 3))), Handout(20, 1, ((20, 2),))]
    assert too_large(lots[:1], [stored(0, 5, 8), stored(5, 5, 8_000)], 4_096) == [Handout(0, 1, ((5, 5),))]
    assert too_large(lots[:1], [stored(0, 10, 8)], 4_096) == []


# --- bytes_max -------------------------------------------------------------------------------------------------------


@staged
async def test_what_comes_again_keeps_to_the_bytes_asked_for(scene: Scene) -> None:
    """One message to a batch, a thousand of them: to halve their number a few times would not be enough."""
    ann = await scene.worker("ann")
    for _ in range(600):
        await scene.send(bytes(200))
    while (handed := await ann.pull()).lots:
        await ann.settle(m.Settlement.RELEASE, handed)
        if handed.messages[-1].sequence == 599:
            break
    pull = m.Pull(SUBJECT, GROUP, "ann", 1_000, 1_000, 0, ann.arrived)
    pulled, batches = await ann.client.ask(pull, m.Pulled)
    assert [span.count for lot in pulled.lots for span in lot.spans] == [len(batches)]
    assert 2 <= len(batches) <= 3


@staged
async def test_one_batch_comes_again_however_large(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(bytes(5_000))
    await ann.settle(m.Settlement.RELEASE, await ann.pull())
    pulled, batches = await ann.client.ask(m.Pull(SUBJECT, GROUP, "ann", 10, 1, 0, ann.arrived), m.Pulled)
    assert len(pulled.lots) == len(batches) == 1


# --- frames ----------------------------------------------------------------------------------------------------------


@staged
async def test_a_batch_that_does_not_fit_the_frame_is_a_failed_attempt_and_dies_in_the_end(scene: Scene) -> None:
    await scene.configure(GroupConfig(attempts_max=3, backoff=HURRIED))
    ann = await narrow(scene, "ann")
    await scene.send(b"small")
    await scene.send(bytes(8_000), b"its neighbour")
    await scene.send(b"another")
    assert await ann.drain() == [b"small", b"another"]
    for _ in range(4):
        await scene.sleep(2)
        assert await ann.drain() == []
    dead = await scene.scan(DEAD)
    assert [each.payload for each in dead] == [bytes(8_000), b"its neighbour"]
    assert "too large for a frame of 4096 bytes" in dead[0].headers["fairway.dead.reason"]


@staged
async def test_another_consumer_with_larger_frames_gets_it(scene: Scene) -> None:
    await scene.configure(GroupConfig(backoff=HURRIED))
    ann = await narrow(scene, "ann")
    await scene.send(bytes(8_000))
    assert not (await ann.pull()).lots
    ben = await scene.worker("ben")
    await scene.sleep(2)
    handed = await ben.pull()
    assert (handed.payloads, handed.attempts) == ([bytes(8_000)], [2])


@staged
async def test_a_response_that_is_sent_again_to_a_smaller_frame_gives_the_rest_back(scene: Scene) -> None:
    ann = await scene.worker("ann")
    for _ in range(4):
        await scene.send(bytes(3_000))
    await ann.pull()  # lost, by what it says next
    small = await narrow(scene, "ann")
    small.arrived = 0
    handed = await small.pull()
    assert handed.payloads == [bytes(3_000)]
    assert len(await small.drain()) == 3
    assert (await scene.describe()).in_flight == 1


@staged
async def test_where_there_is_no_second_attempt_it_is_counted_as_lost(scene: Scene) -> None:
    await scene.configure(GroupConfig(mode=Mode.AT_MOST_ONCE))
    ann = await narrow(scene, "ann", 128 * KIB)
    await scene.send(b"small")
    await scene.send(bytes(200 * KIB))
    await scene.send(b"another")
    assert [await ann.drain(), await ann.drain()] == [[b"small", b"another"], []]
    state = await scene.describe()
    assert (state.lost, state.lag, state.in_flight) == (1, 0, 0)


# --- what cannot be read ---------------------------------------------------------------------------------------------


async def damage(scene: Scene, sequence: int) -> None:
    entry = next(scene.broker.store.messages.readable(1, sequence))
    scene.disk.flip(segment.file_name("messages", 0), (entry.position + entry.size - 30) * 8)


@staged
async def test_a_fresh_lot_ends_before_a_batch_that_has_rotted(scene: Scene) -> None:
    ann = await scene.worker("ann")
    for payload in (b"a", b"b", b"c"):
        await scene.send(payload * 100)
    await damage(scene, 1)
    assert await ann.drain() == [b"a" * 100, b"c" * 100]
    assert (await scene.describe()).in_flight == 0


@staged
async def test_a_lot_comes_again_without_what_has_rotted_meanwhile(scene: Scene) -> None:
    ann = await scene.worker("ann")
    for payload in (b"a", b"b", b"c"):
        await scene.send(payload * 100)
    await ann.settle(m.Settlement.RELEASE, await ann.pull())
    await damage(scene, 1)
    assert await ann.drain() == [b"a" * 100, b"c" * 100]
    assert (await scene.describe()).in_flight == 0


@staged
async def test_so_does_a_response_that_did_not_arrive(scene: Scene) -> None:
    ann = await scene.worker("ann")
    for payload in (b"a", b"b", b"c"):
        await scene.send(payload * 100)
    await ann.pull()
    ann.arrived = 0
    await damage(scene, 1)
    assert await ann.drain() == [b"a" * 100, b"c" * 100]
    assert (await scene.describe()).in_flight == 0


# --- bounds ----------------------------------------------------------------------------------------------------------


@staged
async def test_there_is_a_bound_to_the_number_of_groups(scene: Scene) -> None:
    await scene.worker("ann")
    groups = scene.broker.coordinator.groups
    while len(groups) < limits.GROUPS_MAX:
        groups.introduce(1, GroupName(f"g{len(groups)}"))
    assert await refused(scene.worker("ben", group="shipping")) is Code.BUSY
    assert await refused(scene.configure(GroupConfig(), group="shipping")) is Code.BUSY
    await scene.worker("cy")
    for host in [each for each in groups if each.name.startswith("g")]:
        groups.remove(host)
    await scene.worker("ben", group="shipping")
