"""Files of a master for those who lack more than logs: what is given, how fast, how long; and what is not believed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

from fairway.delay.schedule import manifest
from fairway.delay.snapshot import RefillOptions, SnapshotOptions
from fairway.errors import Code, Misuse, Refused, RemoteProtocolError
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.frames import stretch, stretched
from fairway.protocol.replication_messages import Fetch, Fetched, Snapshot, SnapshotFile, TakeSnapshot
from fairway.storage import checkpoint as checkpoints
from fairway.storage.directory import DirectoryIdentity
from tests.unit.delay.helpers import DAY_MS
from tests.unit.delay.snapshots import EPOCH, GROUP, REPLICA, Line, Stage, Tamper, known, spoiled
from tests.unit.storage.helpers import content, names

TAKE = TakeSnapshot(GROUP, EPOCH, REPLICA)


@pytest.fixture(name="stage")
def _stage() -> Iterator[Stage]:
    with Stage() as stage:
        stage.live_a_while()
        yield stage


def _taken(stage: Stage, line: Line, message: TakeSnapshot = TAKE) -> Snapshot:
    return stage.world.run(line.ask(message, Snapshot))[0]


def _refusal(stage: Stage, line: Line, message: ControlMessage) -> Refused:
    with pytest.raises(Refused) as caught:
        stage.world.run(line.ask(message, ControlMessage))
    return caught.value


# --- the master's side -----------------------------------------------------------------------------------------------


def test_a_snapshot_is_the_newest_checkpoint_the_manifest_its_buckets_and_both_logs(stage: Stage) -> None:
    taken = _taken(stage, Line(stage.snapshots))
    sizes = {each.name: each.size for each in taken.files}
    disk = stage.world.disk
    listed = manifest.unpack(content(disk, manifest.NAME))
    assert {f"schedule/{each.number:020d}.log" for each in listed.buckets} <= set(sizes)
    assert [name for name in sizes if name.startswith("checkpoints/")] == names(disk, "checkpoints")[-1:]
    covered = checkpoints.unpack(content(disk, names(disk, "checkpoints")[-1]))
    assert covered.actions.end == stage.world.engine.store.actions.log.synced_end
    for log, mark in (("messages", covered.messages), ("actions", covered.actions)):
        bases = [int(name[-24:-4]) for name in sizes if name.startswith(log)]
        assert min(bases) <= mark.first_base
        assert max(int(name[-24:-4]) + size for name, size in sizes.items() if name.startswith(log)) >= mark.end
    assert (taken.epoch, taken.number) == (EPOCH, 1)


def test_a_stranger_that_asks_under_the_id_of_a_replica_takes_no_snapshot_from_it(stage: Stage) -> None:
    replica, stranger = Line(stage.snapshots), Line(stage.snapshots)
    stage.following[REPLICA] = replica.session
    taken = _taken(stage, replica)
    assert _refusal(stage, stranger, TAKE).code is Code.FENCED
    assert len(stage.snapshots) == 1
    first = taken.files[0]
    fetched, attached = stage.world.run(replica.ask(Fetch(taken.number, 0, 0, first.size), Fetched))
    assert (fetched.position, len(stretched(attached[0]))) == (0, first.size)


def test_what_the_master_removes_meanwhile_can_still_be_fetched(stage: Stage) -> None:
    line, world = Line(stage.reign(SnapshotOptions(idle_ms=400 * DAY_MS))), stage.world
    taken = _taken(stage, line)
    before = {each.name: content(world.disk, each.name)[: each.size] for each in taken.files}
    world.advance(200 * DAY_MS)
    stage.checkpoint()
    gone = [name for name in before if name not in names(world.disk, name.partition("/")[0])]
    assert any(name.startswith("schedule/") for name in gone)
    for index, each in enumerate(taken.files):
        if each.name in gone and each.size:
            fetched, attached = world.run(line.ask(Fetch(taken.number, index, 0, each.size), Fetched))
            assert stretched(attached[0]) == before[each.name]
            assert fetched.position == 0


def test_a_replica_is_told_what_it_may_not_ask(stage: Stage) -> None:
    line = Line(stage.snapshots)
    assert _refusal(stage, line, TakeSnapshot("d2", EPOCH, REPLICA)).code is Code.BAD_REQUEST
    assert _refusal(stage, line, TakeSnapshot(GROUP, EPOCH - 1, REPLICA)).code is Code.FENCED
    assert _refusal(stage, line, Fetch(1, 0, 0, 8)).code is Code.FENCED
    taken = _taken(stage, line)
    size = taken.files[0].size
    for bad in (Fetch(1, len(taken.files), 0, 8), Fetch(1, 0, size, 1), Fetch(1, 0, 0, size + 1), Fetch(1, 0, 0, 0)):
        assert _refusal(stage, line, bad).code is Code.BAD_REQUEST
    assert _refusal(stage, Line(stage.snapshots), Fetch(1, 0, 0, 8)).code is Code.FENCED  # another's connection


def test_a_snapshot_is_kept_for_as_long_as_somebody_fetches(stage: Stage) -> None:
    world, line = stage.world, Line(stage.snapshots)
    _taken(stage, line)
    for _ in range(4):
        world.sleep(50_000)
        world.run(line.ask(Fetch(1, 0, 0, 8), Fetched))
    assert len(stage.snapshots) == 1
    world.sleep(70_000)
    assert len(stage.snapshots) == 0
    assert _refusal(stage, line, Fetch(1, 0, 0, 8)).code is Code.FENCED
    _taken(stage, line)
    line.session.is_gone = True
    world.sleep(10_000)
    assert len(stage.snapshots) == 0


def test_so_many_are_kept_and_no_more(stage: Stage) -> None:
    snapshots = stage.reign(SnapshotOptions(kept_max=2))
    lines = [Line(snapshots) for _ in range(3)]
    for number in range(2):
        _taken(stage, lines[number], TakeSnapshot(GROUP, EPOCH, number))
    assert _refusal(stage, lines[2], TakeSnapshot(GROUP, EPOCH, 2)).code is Code.BUSY
    _taken(stage, lines[1], TakeSnapshot(GROUP, EPOCH, 1))  # in the place of its own
    lines[0].session.is_gone = True
    _taken(stage, lines[2], TakeSnapshot(GROUP, EPOCH, 2))
    assert len(snapshots) == 2


def test_so_many_are_kept_also_where_they_are_asked_for_at_once(stage: Stage) -> None:
    snapshots = stage.reign(SnapshotOptions(kept_max=2))
    lines = [Line(snapshots) for _ in range(4)]

    async def ask_all() -> list[object]:
        asked = [line.post(TakeSnapshot(GROUP, EPOCH, number)) for number, line in enumerate(lines)]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    answers = stage.world.run(ask_all())
    assert [each.code for each in answers if isinstance(each, Refused)] == [Code.BUSY] * 2
    assert len(snapshots) == 2


def test_a_master_whose_manifest_has_rotted_says_so(stage: Stage) -> None:
    stage.world.disk.flip(manifest.NAME, 8 * 100)
    refused = _refusal(stage, Line(stage.snapshots), TAKE)
    assert refused.code is Code.DAMAGED
    assert "no snapshot can be taken" in str(refused)
    assert len(stage.snapshots) == 0


def test_the_master_says_how_fast(stage: Stage) -> None:
    snapshots = stage.reign(SnapshotOptions(bytes_per_s=1_000))
    began_ms = stage.world.now_ms
    refill = stage.fetch(Line(snapshots))
    assert stage.world.now_ms - began_ms >= refill.total_bytes - 256
    assert snapshots.bytes == refill.total_bytes > 3_000


def test_an_end_leaves_nothing_open(stage: Stage) -> None:
    line = Line(stage.snapshots)
    _taken(stage, line)
    late = Line(stage.snapshots)

    async def ask_and_close() -> None:
        late.post(TAKE).add_done_callback(lambda _: None)
        stage.snapshots.close()

    stage.world.run(ask_and_close())
    stage.world.sleep(10_000)
    assert (len(stage.snapshots), late.under_way) == (0, 0)


# --- the replica's side ----------------------------------------------------------------------------------------------


def test_a_few_parts_are_under_way_at_a_time(stage: Stage) -> None:
    line = Line(stage.snapshots)
    refill = stage.fetch(line, stage.refill(RefillOptions(part_bytes=100, parts=5)))
    assert line.most_under_way == 5
    assert refill.arrived_bytes == refill.total_bytes
    assert line.parts > refill.total_bytes // 100


def test_what_has_arrived_is_not_fetched_again(stage: Stage) -> None:
    first = Line(stage.snapshots)
    first.parts_max = 20
    refill = stage.refill()
    task = stage.world.sim.loop.create_task(refill.fetch(first, GROUP, EPOCH, REPLICA))
    stage.world.sleep(5_000)
    task.cancel()
    stage.world.sleep(0)
    stage.world.schedule([b"one more"], [stage.world.now_ms + 50 * DAY_MS])
    stage.world.settle()
    wanted, second = known(stage.world.engine), Line(stage.snapshots)
    sent = stage.snapshots.bytes
    stage.fetch(second, refill)
    assert stage.snapshots.bytes - sent < refill.total_bytes - 10 * 256
    stage.install()
    stage.end_life()
    assert known(stage.open()) == wanted


def test_under_another_epoch_nothing_that_arrived_is_worth_anything(stage: Stage) -> None:
    stage.fetch()
    stage.disk.publish("arriving/00000000000000000002-messages-00000000000000000000.log", [b"x"])
    stage.fetch()
    assert all(name.startswith("arriving/00000000000000000003-") for name in names(stage.disk, "arriving"))
    stage.refill().discard()
    assert names(stage.disk, "arriving") == []


def test_what_an_earlier_life_left_torn_is_fetched_again(stage: Stage) -> None:
    refill = stage.fetch()
    torn = [name for name in names(stage.disk, "arriving") if "-schedule-0" in name or "-messages-" in name]
    for name in torn:
        stage.disk.rot(name, 3)
    stage.end_life()
    refill = stage.fetch()
    assert refill.damaged == []
    stage.install()
    stage.end_life()
    engine = stage.open()
    assert (engine.damaged, engine.store.findings) == ([], [])
    assert known(engine) == known(stage.world.engine)


def test_what_has_rotted_on_the_master_is_taken_as_it_is_and_named(stage: Stage) -> None:
    world = stage.world
    bucket = f"schedule/{world.files[-1]}"
    world.disk.flip(bucket, 8 * 200)
    refill = stage.fetch()
    (said,) = refill.damaged
    assert said.startswith(bucket)
    pending, before = len(known(world.engine)), len(world.broker.payloads)
    stage.install()
    stage.take_over()
    world.settle()
    for _ in range(40):
        world.advance(10 * DAY_MS)
    assert before < len(world.broker.payloads) < before + pending
    assert world.engine.damaged


def test_there_has_to_be_room(stage: Stage) -> None:
    with Stage(capacity_bytes=2_000) as small:
        small.live_a_while()
        with pytest.raises(Refused, match="make room, then it goes on") as caught:
            small.fetch()
        assert caught.value.code is Code.READ_ONLY
    stage.disk.fail_write(30)
    refill = stage.refill()
    with pytest.raises(Refused, match="make room, then it goes on"):
        stage.fetch(None, refill)
    stage.fetch(None, refill)
    stage.install()
    stage.end_life()
    assert known(stage.open()) == known(stage.world.engine)


# --- garbage ---------------------------------------------------------------------------------------------------------


def _short(message: ControlMessage, attached: Sequence[Bytes]) -> tuple[ControlMessage, Sequence[Bytes]]:
    return (message, [stretch(stretched(attached[0])[:-1])]) if isinstance(message, Fetched) else (message, attached)


def _elsewhere(message: ControlMessage, attached: Sequence[Bytes]) -> tuple[ControlMessage, Sequence[Bytes]]:
    return (Fetched(8, message.crc), attached) if isinstance(message, Fetched) else (message, attached)


def _nothing(message: ControlMessage, attached: Sequence[Bytes]) -> tuple[ControlMessage, Sequence[Bytes]]:
    return (Fetched(message.position, 0), [stretch(b"")]) if isinstance(message, Fetched) else (message, attached)


def test_a_part_that_is_not_what_was_asked_for_is_not_taken(stage: Stage) -> None:
    for tamper in (spoiled, _short, _elsewhere, _nothing):
        with pytest.raises(RemoteProtocolError, match="snapshot"):
            stage.fetch(Line(stage.snapshots, tamper))
        with pytest.raises(Misuse, match="no whole snapshot"):
            stage.install()
    stage.fetch()
    stage.install()


def _with(change: Callable[[list[SnapshotFile]], list[SnapshotFile]]) -> Tamper:
    def tamper(message: ControlMessage, attached: Sequence[Bytes]) -> tuple[ControlMessage, Sequence[Bytes]]:
        if isinstance(message, Snapshot):
            message = Snapshot(message.epoch, message.number, change(message.files))
        return message, attached

    return tamper


def _named(name: str) -> Tamper:
    return _with(lambda files: [*files, SnapshotFile(name, 8)])


def _without(start: str) -> Tamper:
    """As if there were nothing in files with such names."""

    def emptied(each: SnapshotFile) -> SnapshotFile:
        return SnapshotFile(each.name, 0) if each.name.startswith(start) else each

    return _with(lambda files: [emptied(each) for each in files])


LISTS = [
    (_named("../outside"), "which none may have"),
    (_named("schedule/../identity"), "which none may have"),
    (_named("identity"), "which none may have"),
    (_named("/etc/passwd"), "which none may have"),
    (_named("messages/00000000000000000000.log/x"), "which none may have"),
    (_named("checkpoints/7.ckpt"), "which none may have"),
    (_with(lambda files: [*files, files[0]]), "twice"),
    (_with(lambda files: files * 5_000), "files: at most"),
    (_without("schedule/0"), "and its manifest"),
    (_without("schedule/manifest"), "no manifest"),
    (_without("checkpoints"), "no checkpoint"),
    (_without("actions"), "and its checkpoint says"),
    (_with(lambda files: [SnapshotFile(each.name, max(each.size - 8, 0)) for each in files]), "damaged"),
]


def test_a_list_that_cannot_be_is_refused(stage: Stage) -> None:
    before = {name: content(disk, name) for disk, name in stage.old_files()}
    for tamper, why in LISTS:
        with pytest.raises(RemoteProtocolError, match=why):
            stage.fetch(Line(stage.snapshots, tamper))
    assert {name: content(disk, name) for disk, name in stage.old_files()} == before


def test_the_files_of_another_group_are_refused(stage: Stage) -> None:
    refill = stage.refill()
    for other in (
        DirectoryIdentity(1, 2, stage.identity.actions_id),
        DirectoryIdentity(1, stage.identity.messages_id, 2),
    ):
        refill._identity = other
        with pytest.raises(RemoteProtocolError, match="speaks of"):
            stage.fetch(None, refill)
