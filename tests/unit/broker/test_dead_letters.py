"""After the last attempt, or a reject, a message moves to the group's dead-letter subject."""

from __future__ import annotations

import pytest

from fairway import batch, limits
from fairway.broker.dead_letters import (
    HISTORY,
    HISTORY_ATTEMPTS,
    HISTORY_GROUP,
    HISTORY_REASON,
    HISTORY_SEQUENCE,
    HISTORY_SUBJECT,
    HISTORY_TIME,
    DeadLetterWriter,
)
from fairway.broker.groups import GroupHost
from fairway.broker.message_copies import CopiedRanges, stream_of
from fairway.errors import Code
from fairway.groups import Attempt, Backoff, Dying, GroupConfig
from fairway.groups.attempts import decode, encode
from fairway.names import GroupName, Subject
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Lever
from fairway.storage import segment
from tests.unit.broker.scene import Received, Scene, refused, staged

DEAD = "dead:billing:orders"
IMPATIENT = GroupConfig(attempts_max=2, backoff=Backoff(first_ms=1_000, cap_ms=1_000))


class Nobody(DeadLetterWriter):
    """Writes no dead letters."""

    def mark_dead(self, host: GroupHost, dying: tuple[Dying, ...], *, is_again: bool = False) -> None:
        pass


def attempts_of(dead: Received) -> list[tuple[int, str, str]]:
    """Number, consumer and reason of each; their times ascend, up to that of the death."""
    history = decode(dead.headers[HISTORY])
    assert history is not None
    assert history.left_out == int(dead.headers[HISTORY_ATTEMPTS]) - len(history.attempts)
    times = [each.time_ms for each in history.attempts]
    assert times == sorted(times)
    assert all(0 < each <= int(dead.headers[HISTORY_TIME]) for each in times)
    return [(each.attempt, each.consumer, each.reason) for each in history.attempts]


@staged
async def test_a_rejected_message_is_in_dead_letter_with_its_history(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b", b"c")
    handed = await ann.pull()
    [lot] = handed.lots
    await ann.settle_all([m.Settle(m.Settlement.REJECT, lot.first, 1, [m.SequenceRange(1, 1)], None, "no such hotel")])
    await scene.sleep(1)
    [dead] = await scene.scan(DEAD)
    assert dead.payload == b"b"
    assert dead.id == batch.MessageId(7, 1)
    assert dead.headers == {
        HISTORY_SUBJECT: "orders",
        HISTORY_GROUP: "billing",
        HISTORY_SEQUENCE: "1",
        HISTORY_ATTEMPTS: "1",
        HISTORY_REASON: "no such hotel",
        HISTORY_TIME: dead.headers[HISTORY_TIME],
        HISTORY: dead.headers[HISTORY],
    }
    assert attempts_of(dead) == [(1, "ann", "no such hotel")]
    state = await scene.describe()
    assert (state.in_flight, state.dying, state.dead) == (2, 0, 1)


@staged
async def test_it_keeps_key_tags_and_headers(scene: Scene) -> None:
    ann = await scene.worker("ann")
    data = batch.encode(
        [b"a"],
        producer_id=9,
        first_sequence=0,
        created_ms=1,
        keys=["k"],
        tags=[["red"]],
        headers=[{"trace": "1"}],
    )
    await (await scene.control()).produce("orders", data)
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    [dead] = await scene.scan(DEAD)
    assert (dead.key, dead.tags, dead.headers["trace"]) == ("k", ["red"], "1")


@staged
async def test_a_message_with_all_the_headers_it_may_have_keeps_them(scene: Scene) -> None:
    ann = await scene.worker("ann")
    headers = {f"h{number}": "x" for number in range(62)}
    data = batch.encode([b"a"], producer_id=9, first_sequence=0, created_ms=1, headers=[headers])
    await (await scene.control()).produce("orders", data)
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    [dead] = await scene.scan(DEAD)
    assert dead.headers == headers | {HISTORY_SUBJECT: "orders", HISTORY_GROUP: "billing"}


@staged
async def test_after_the_last_attempt_it_moves(scene: Scene) -> None:
    await scene.configure(IMPATIENT)
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.retry(await ann.pull(), reason="first")
    await scene.sleep(2)
    again = await ann.pull()
    assert again.attempts == [2]
    await ann.retry(again, reason="second")
    await scene.sleep(2)
    [dead] = await scene.scan(DEAD)
    assert (dead.headers[HISTORY_ATTEMPTS], dead.headers[HISTORY_REASON]) == ("2", "second")
    assert not (await ann.pull()).lots


@staged
async def test_a_lease_that_ends_is_an_attempt_too(scene: Scene) -> None:
    await scene.configure(GroupConfig(attempts_max=1))
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.pull()
    await scene.sleep(20)
    [dead] = await scene.scan(DEAD)
    assert dead.headers[HISTORY_REASON] == "the consumer's lease ended"


@staged
async def test_other_groups_never_see_it(scene: Scene) -> None:
    ann = await scene.worker("ann")
    ben = await scene.worker("ben", group="shipping")
    await scene.send(b"a")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    assert await ben.drain() == [b"a"]
    assert (await scene.describe(group="shipping")).dead == 0


@staged
async def test_it_survives_a_restart_and_is_there_once(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    await scene.restart()
    await scene.power_cut()
    await scene.sleep(30)
    assert [each.payload for each in await scene.scan(DEAD)] == [b"a", b"b"]
    assert (await scene.describe()).dying == 0


@staged
async def test_a_crash_between_the_copy_and_its_dead_record_copies_nothing_twice(scene: Scene) -> None:
    """The copy is committed, DEAD is not: the next life finds the copy by where it came from."""
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b", b"c")
    store = scene.broker.store
    settling = scene.sim.loop.create_task(ann.reject(await ann.pull()))
    subjects = store.messages.views.subjects
    while (known := next((each for each in subjects if each.name == DEAD), None)) is None or (
        store.messages.end_sequence(known.id) < 3
    ):
        await scene.sleep(0.000_05)
    await scene.power_cut()
    settling.cancel()
    await scene.sleep(1)
    assert (await scene.describe()).dying == 0
    payloads = [each.payload for each in await scene.scan(DEAD)]
    assert payloads == [b"a", b"b", b"c"]


@staged
async def test_what_was_dying_at_a_crash_is_buried_in_the_next_life(scene: Scene) -> None:
    """REJECT is durable, the copy never began."""
    ann = await scene.worker("ann")
    await scene.send(b"a")
    handed = await ann.pull()
    scene.broker.coordinator.dead_letter_writer = Nobody(scene.broker.coordinator)
    await ann.reject(handed)
    assert (await scene.describe()).dying == 1
    await scene.kill()
    await scene.sleep(1)
    assert [each.payload for each in await scene.scan(DEAD)] == [b"a"]
    assert (await scene.describe()).dying == 0


@staged
async def test_what_cannot_be_read_is_buried_and_counted(scene: Scene) -> None:
    ann = await scene.worker("ann")
    sent = await scene.send(b"a" * 100)
    await scene.send(b"b")
    handed = await ann.pull()
    entry = next(scene.broker.store.messages.readable(1, sent.first_sequence))
    scene.disk.flip(segment.file_name("messages", 0), (entry.position + entry.size - 30) * 8)
    await ann.reject(handed)
    await scene.sleep(1)
    assert [each.payload for each in await scene.scan(DEAD)] == [b"b"]
    assert scene.broker.coordinator.dead_letter_writer.unreadable == 1
    assert any("cannot be read" in remark for remark in scene.broker.store.remarks)
    assert (await scene.describe()).dying == 0


@staged
async def test_a_seek_while_a_message_is_dying_does_no_harm(scene: Scene) -> None:
    """The burial of (0, 1) is under way, a seek forgets it, and another lot of that name dies."""
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b", b"c")
    dead_letter_writer = scene.broker.coordinator.dead_letter_writer
    scene.broker.coordinator.dead_letter_writer = Nobody(scene.broker.coordinator)
    host = scene.broker.coordinator.host("orders", "billing")
    handed = await ann.pull()
    await ann.reject(handed)
    old = tuple(host.state_machine.begin_life(0, 0))
    await scene.seek(m.Whence.EARLIEST)
    [lot] = (await ann.pull(most=1)).lots
    scene.broker.coordinator.dead_letter_writer = dead_letter_writer
    await ann.settle_all([m.Settle(m.Settlement.REJECT, lot.first, lot.attempt, lot.spans)])
    dead_letter_writer.mark_dead(host, old)
    await scene.sleep(1)
    assert (await scene.describe()).dying == 0
    await scene.restart()
    assert (await scene.describe()).cursor == 1


@staged
async def test_nobody_sends_to_a_dead_letter_subject(scene: Scene) -> None:
    assert await refused(scene.send(b"a", subject=DEAD)) is Code.BAD_NAME
    assert await refused(scene.send(b"a", subject="inbox:billing:orders")) is Code.BAD_NAME


@staged
async def test_dead_letters_can_be_consumed_and_an_inbox_cannot(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    doctor = await scene.worker("doc", group="clinic", subject=DEAD)
    handed = await doctor.pull()
    assert handed.payloads == [b"a"]
    await doctor.reject(handed)
    await scene.sleep(1)
    nested = f"dead:clinic:{DEAD}"
    assert [each.payload for each in await scene.scan(nested)] == [b"a"]
    assert await refused(scene.worker("x", subject="inbox:billing:orders")) is Code.BAD_NAME
    assert await refused(scene.worker("x", subject=nested)) is Code.BAD_NAME


@staged
async def test_a_read_only_subject_still_gives_up_its_dead(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await scene.switch(Lever.READ_ONLY, is_on=True)
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    assert len(await scene.scan(DEAD)) == 1


@staged
async def test_a_disk_without_room_delays_a_burial(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    handed = await ann.pull()
    scene.broker.store.has_room = False
    free = scene.disk.free_bytes()
    scene.disk.publish("hog", [bytes(free - 100)])
    await ann.reject(handed)
    await scene.sleep(5)
    assert (await scene.describe()).dying == 1
    scene.disk.remove("hog")
    await scene.sleep(5)
    assert (await scene.describe()).dying == 0
    assert [each.payload for each in await scene.scan(DEAD)] == [b"a"]


@staged
async def test_the_reason_outlives_a_crash(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    handed = await ann.pull()
    # the power goes before anybody gets to it
    scene.broker.coordinator.dead_letter_writer = Nobody(scene.broker.coordinator)
    await ann.reject(handed, "no such hotel")
    await scene.power_cut()
    await scene.sleep(1)
    assert [each.headers[HISTORY_REASON] for each in await scene.scan(DEAD)] == ["no such hotel"] * 2


@staged
async def test_a_message_is_sure_to_die_before_it_is_copied(scene: Scene) -> None:
    """Else a power cut may leave it alive, and its copy in dead letter."""
    ann = await scene.worker("ann")
    await scene.send(b"a")
    handed = await ann.pull()
    await scene.sleep(1)
    scene.disk.slowness = 1_000
    rejecting = scene.sim.loop.create_task(ann.reject(handed))
    actions = scene.broker.store.actions.log
    before = actions.end
    while actions.end == before:
        await scene.sleep(0.001)
    said = actions.end
    while scene.broker.store.messages.views.subjects.find(Subject(DEAD)) is None:
        await scene.sleep(0.001)
    assert actions.committed_end >= said
    await rejecting


@staged
async def test_what_is_on_its_way_to_dead_letter_is_not_copied_again(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.reject(await ann.pull(most=1))
    await scene.sleep(1)
    log = scene.broker.store.messages
    dead = scene.broker.coordinator.subject(DEAD)
    copies = CopiedRanges(log, dead.id, stream_of(Subject("orders"), GroupName("billing")))
    copies.refresh()
    assert copies.missing(0, 2) == [(1, 1)]
    stream = stream_of(Subject("orders"), GroupName("billing"))
    letter = batch.encode([b"b"], producer_id=stream, first_sequence=1, created_ms=1)
    log.append_own(Subject(DEAD), letter, batch.check(letter))
    copies.refresh()
    assert copies.missing(0, 2) == []


@staged
async def test_each_attempt_is_in_its_history_through_crashes_restarts_and_leases(scene: Scene) -> None:
    await scene.configure(GroupConfig(attempts_max=5, backoff=Backoff(first_ms=1_000, cap_ms=1_000)))
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.retry(await ann.pull(), after_s=1, reason="first")
    await scene.power_cut()
    await scene.sleep(2)
    ann = await scene.worker("ann")
    await ann.retry(await ann.pull(), after_s=1, reason="second")
    await scene.restart()  # with a checkpoint
    await scene.sleep(2)
    ann = await scene.worker("ann")
    assert (await ann.pull()).attempts == [3, 3]
    await scene.sleep(20)  # and is never heard of again
    ben = await scene.worker("ben")
    await ben.retry(await ben.pull(), after_s=1, reason="fourth")
    await scene.kill()
    await scene.sleep(2)
    ben = await scene.worker("ben")
    handed = await ben.pull()
    # the process dies before anybody gets to it
    scene.broker.coordinator.dead_letter_writer = Nobody(scene.broker.coordinator)
    await ben.retry(handed, reason="fifth")
    await scene.restart()
    await scene.sleep(1)
    expected = [
        (1, "ann", "first"),
        (2, "ann", "second"),
        (3, "ann", "the consumer's lease ended"),
        (4, "ben", "fourth"),
        (5, "ben", "fifth"),
    ]
    assert [attempts_of(dead) for dead in await scene.scan(DEAD)] == [expected, expected]


@staged
async def test_a_history_that_its_sender_wrote_is_not_believed(scene: Scene) -> None:
    ann = await scene.worker("ann")
    forged = encode((Attempt(1, 1, "eve", "forged"),), 1)
    data = batch.encode([b"a"], producer_id=9, first_sequence=0, created_ms=1, headers=[{HISTORY: forged}])
    await (await scene.control()).produce("orders", data)
    await ann.reject(await ann.pull(), "no")
    await scene.sleep(1)
    [dead] = await scene.scan(DEAD)
    assert attempts_of(dead) == [(1, "ann", "no")]


@staged
async def test_a_batch_without_room_for_all_attempts_has_the_first_and_the_last(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(*[b"a"] * 20)
    for _ in range(9):
        await ann.retry(await ann.pull(), after_s=0, reason="x" * 200)
    handed = await ann.pull()
    for bytes_max, shown in ((20_000, [1, 10]), (6_000, [])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "BATCH_RAW_BYTES_MAX", bytes_max)
            lot = handed.lots[0]
            span = m.SequenceRange(0 if shown else 10, 10)
            await ann.settle_all([m.Settle(m.Settlement.REJECT, lot.first, lot.attempt, [span], None, "no")])
            await scene.sleep(1)
        dead = (await scene.scan(DEAD))[-10:]
        assert [[number for number, _, _ in attempts_of(each)] for each in dead] == [shown] * 10
