"""Reads without a group: the action log by position, committed, with names for every number in it. Whoever scans
everything leaves the loop to those who wait for a message.
"""

from __future__ import annotations

import asyncio

import msgspec

from fairway.broker.groups import Groups
from fairway.broker.scan import BESIDE_GROUPS_BYTES_MAX, LATEST_MAX, NameTable
from fairway.errors import Code
from fairway.group_events import ActionKind, joined
from fairway.groups import GroupDecision, GroupOutcome
from fairway.limits import KIB, MIB, NAMES_MAX, RETRACE_BYTES_MAX
from fairway.names import GroupName
from fairway.protocol.admin_messages import (
    Index,
    Indexed,
    Named,
    Names,
    NumberedConsumer,
    Retrace,
    Retraced,
    Scan,
    Scanned,
)  # fmt: skip
from fairway.protocol.messages import Whence
from fairway.storage import record
from fairway.storage.action_log import Action, unpack
from fairway.storage.index_file import ENTRY
from fairway.storage.record import RecordHeader, RecordKind
from fairway.storage.segment import HEADER_BYTES
from fairway.storage.subjects import SubjectTable
from tests.unit.broker.scene import GROUP, SUBJECT, Scene, refused, staged

ALL = 1 << 40


async def trail(scene: Scene, position: int = 0, bytes_max: int = ALL) -> list[tuple[RecordHeader, bytes]]:
    """The records from there on, as somebody reads them who has nothing but the answers."""
    found: list[tuple[RecordHeader, bytes]] = []
    data = b""
    while True:
        answer: Retraced = await scene.ask(Retrace(Whence.SEQUENCE, position, bytes_max), Retraced)
        if not answer.data and answer.position >= answer.committed_end:
            assert not data, "the committed end is the end of a record"
            return found
        if answer.position != position:
            assert not data
            assert answer.position == answer.segment_base + HEADER_BYTES
        data += answer.data
        position = answer.position + len(answer.data)
        start = position - len(data)
        at = 0
        while len(data) - at >= record.HEADER_BYTES:
            header = record.parse_header(data, at, start + at, answer.log_id)
            if len(data) - at < record.HEADER_BYTES + header.body_bytes:
                break
            body = data[at + record.HEADER_BYTES : at + record.HEADER_BYTES + header.body_bytes]
            record.check_body(header, body)
            found.append((header, body))
            at += record.HEADER_BYTES + header.body_bytes
        data = data[at:]


def actions(found: list[tuple[RecordHeader, bytes]], kind: RecordKind = RecordKind.ACTIONS) -> list[Action]:
    return [each for header, body in found if header.kind == kind for each in unpack(body)]


def named(found: list[Action]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    groups, consumers = {}, {}
    for group_id, _, event in found:
        if event.kind is ActionKind.GROUP_CONFIG:
            groups[group_id] = msgspec.msgpack.decode(event.detail)[0]
        elif event.kind is ActionKind.JOIN:
            consumers[group_id, event.consumer_id] = event.detail.decode()
    return groups, consumers


async def busy(scene: Scene, rounds: int) -> None:
    """Work enough for segments to be filled: small acks, one at a time."""
    ann = await scene.worker("ann")
    for number in range(rounds):
        await scene.send(b"%d" % number)
        await ann.ack(await ann.pull())


@staged
async def test_life_of_a_message_is_there_in_order(scene: Scene) -> None:
    await scene.send(b"a", b"b")
    ann = await scene.worker("ann")
    handed = await ann.pull()
    await ann.retry(handed, after_s=1, reason="no stock")
    await scene.sleep(2)
    await ann.ack(await ann.pull())
    told = [each.event for each in actions(await trail(scene)) if each.event.ranges]
    kinds = [ActionKind.PULL, ActionKind.RETRY, ActionKind.PULL, ActionKind.ACK]
    assert [(each.kind, each.ranges, each.attempt) for each in told] == [
        (kind, ((0, 2),), attempt) for kind, attempt in zip(kinds, (1, 1, 2, 2), strict=True)
    ]
    assert told[1].detail == b"no stock"


@staged
async def test_pieces_give_the_same_records_as_the_whole(scene: Scene) -> None:
    await busy(scene, 300)
    whole = await trail(scene)
    assert await trail(scene, bytes_max=1_000) == whole
    assert len({each.position // (64 * KIB) for each, _ in whole}) > 1
    middle = whole[len(whole) // 2][0].position
    assert await trail(scene, middle) == whole[len(whole) // 2 :]
    answer: Retraced = await scene.ask(Retrace(Whence.EARLIEST, 0, ALL), Retraced)
    assert len(answer.data) <= RETRACE_BYTES_MAX
    assert answer.position + len(answer.data) <= answer.segment_end


@staged
async def test_every_segment_opens_with_the_names_it_needs(scene: Scene) -> None:
    bob = await scene.worker("bob", group="mail")
    await busy(scene, 400)
    await bob.leave()
    found = await trail(scene)
    restated = [at for at, (header, _) in enumerate(found) if header.kind == RecordKind.NAMES]
    assert restated, "segments were filled"
    groups, consumers = named(actions(found))
    for at in restated:
        told = named(actions(found[at : at + 1], RecordKind.NAMES))
        assert told == (groups, consumers), "all were there at that time"
    answer: Retraced = await scene.ask(Retrace(Whence.SEQUENCE, found[restated[0]][0].position, 0), Retraced)
    assert answer.position == answer.segment_base + HEADER_BYTES == found[restated[0]][0].position


@staged
async def test_restated_names_are_no_events(scene: Scene) -> None:
    """What a restart replays is what happened: the members are the same, their configuration is the one in force."""
    await busy(scene, 400)
    before = await scene.describe()
    await scene.power_cut()
    after = await scene.describe()
    assert (after.cursor, after.config_version, after.lag) == (before.cursor, before.config_version, before.lag)
    assert [each.name for each in after.consumers] == ["ann"]


@staged
async def test_names_of_those_who_are_gone(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await ann.leave()
    [join] = [each for each in actions(await trail(scene)) if each.event.kind is ActionKind.JOIN]
    consumer = NumberedConsumer(join.group_id, join.event.consumer_id)
    asked = Names([join.subject_id, 99], [join.group_id, 99], [consumer])
    answer: Named = await scene.ask(asked, Named)
    assert answer == Named([SUBJECT, ""], [GROUP, ""], ["ann"])
    await scene.restart()
    answer = await scene.ask(asked, Named)
    assert answer == Named([SUBJECT, ""], [GROUP, ""], [""]), "from then on the log alone knows"
    too_many = Names(list(range(NAMES_MAX + 1)), [], [])
    assert await refused(scene.ask(too_many, Named)) is Code.BAD_REQUEST


def test_book_of_names_is_bounded() -> None:
    book, groups = NameTable(Groups()), Groups()
    host = groups.introduce(1, GroupName(GROUP))
    most = LATEST_MAX
    for number in range(1, most + 3):
        book.note([(host, GroupDecision(GroupOutcome.DONE, (joined(number, f"c-{number}", 1, 0),)))])
    asked = Names([], [], [NumberedConsumer(host.id, each) for each in (1, 2, 3, most + 2)])
    assert book.answer(asked, SubjectTable()).consumers == ["", "", "c-3", f"c-{most + 2}"]


@staged
async def test_waiting_for_the_next_action(scene: Scene) -> None:
    end: Retraced = await scene.ask(Retrace(Whence.LATEST, 0, 0), Retraced)
    watcher = await scene.connect()
    asking = asyncio.ensure_future(
        watcher.ask(Retrace(Whence.SEQUENCE, end.position, ALL, end.log_id, 30_000), Retraced)
    )
    await scene.sleep(5)
    assert not asking.done()
    await scene.worker("ann")
    assert (await asking)[0].data
    end = await scene.ask(Retrace(Whence.LATEST, 0, 0), Retraced)
    begun_ns = scene.clock.monotonic_ns()
    nothing = (await watcher.ask(Retrace(Whence.SEQUENCE, end.position, ALL, None, 2_000), Retraced))[0]
    assert (nothing.data, nothing.position) == (b"", end.committed_end)
    assert scene.clock.monotonic_ns() - begun_ns >= 2_000_000_000


@staged
async def test_time_leads_to_its_segment(scene: Scene) -> None:
    await busy(scene, 400)
    middle_ms = scene.clock.wall_ms()
    await scene.sleep(60)
    await busy(scene, 5)
    found = await trail(scene)
    answer: Retraced = await scene.ask(Retrace(Whence.TIME, middle_ms + 1, 0), Retraced)
    first = next(header for header, _ in found if header.appended_ms > middle_ms)
    assert answer.segment_base <= first.position < answer.segment_end
    beyond: Retraced = await scene.ask(Retrace(Whence.TIME, middle_ms + 3_600_000, 0), Retraced)
    assert beyond.position == beyond.committed_end


@staged
async def test_another_log_is_refused(scene: Scene) -> None:
    assert await refused(scene.ask(Retrace(Whence.EARLIEST, 0, ALL, 1), Retraced)) is Code.FENCED
    await scene.send(b"a")
    index = Index(SUBJECT, Whence.EARLIEST, 0, None, 10, 1)
    assert await refused(scene.ask(index, Indexed)) is Code.FENCED


@staged
async def test_index_tells_what_was_stored(scene: Scene) -> None:
    for count in (3, 1, 2):
        await scene.send(*[b"x"] * count)
    answer: Indexed = await scene.ask(Index(SUBJECT, Whence.EARLIEST, 0, None, 100), Indexed)
    entries = [each[:2] for each in ENTRY.iter_unpack(answer.data)]
    assert entries == [(0, 3), (3, 1), (4, 2)]
    assert (answer.entries, answer.next_sequence, answer.committed_end) == (3, 6, 6)
    some: Indexed = await scene.ask(Index(SUBJECT, Whence.SEQUENCE, 1, 4, 100), Indexed)
    assert [each[:2] for each in ENTRY.iter_unpack(some.data)] == [(0, 3), (3, 1)]
    dry: Indexed = await scene.ask(Index(SUBJECT, Whence.EARLIEST, 0, None, 2, None, True), Indexed)
    assert (dry.data, dry.entries, dry.next_sequence) == (b"", 2, 4)
    at_end: Indexed = await scene.ask(Index(SUBJECT, Whence.LATEST, 0, None, 100), Indexed)
    assert (at_end.data, at_end.next_sequence) == (b"", 6)


# --- scans beside groups ---------------------------------------------------------------------------------------------

BATCHES = 20


async def scanned(scene: Scene, begin: int = 0, *, is_dry: bool = False) -> Scanned:
    asked = Scan(SUBJECT, Whence.SEQUENCE, begin, None, MIB, is_dry=is_dry)
    found, _ = await (await scene.control()).ask(asked, Scanned)
    return found


@staged
async def test_a_scan_is_answered_in_smaller_parts_while_groups_are_at_work(scene: Scene) -> None:
    for number in range(BATCHES):
        await scene.send(b"%d" % number * 16 * KIB)
    ann = await scene.worker("ann")
    await asyncio.sleep(1)
    assert len((await scanned(scene)).batches) == BATCHES
    await ann.ack(await ann.pull())
    part = await scanned(scene)
    assert 1 <= len(part.batches) < BATCHES
    assert part.size_bytes <= BESIDE_GROUPS_BYTES_MAX
    rest = await scanned(scene, part.next_sequence)
    assert rest.batches[0].first_sequence == part.next_sequence  # nothing is left out


@staged
async def test_how_much_there_is_does_not_depend_on_who_is_at_work(scene: Scene) -> None:
    for number in range(BATCHES):
        await scene.send(b"%d" % number * 16 * KIB)
    ann = await scene.worker("ann")
    await ann.ack(await ann.pull())
    assert (await scanned(scene, is_dry=True)).next_sequence == BATCHES
