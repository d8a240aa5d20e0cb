"""A master with messages in buckets of all ages, and an empty directory that is filled from its snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from fairway.delay import install
from fairway.delay.engine import Engine
from fairway.delay.install import Disks
from fairway.delay.schedule.pending_rows import RowState
from fairway.delay.snapshot import RefillOptions, SnapshotOptions, SnapshotReceiver, Snapshots
from fairway.errors import Code, Refused
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.replication_messages import Fetched, TakeSnapshot
from fairway.replication.connection import ResponseFuture
from fairway.replication.peers import ReplicaQuestion
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from fairway.storage import directory
from fairway.storage.directory import DirectoryIdentity
from tests.unit.delay.helpers import BILLS, DAY_MS, HOUR_MS, OPTIONS, SECOND_MS, World

AnswerT = TypeVar("AnswerT", bound=ControlMessage)
Tamper: TypeAlias = Callable[[ControlMessage, Sequence[Bytes]], tuple[ControlMessage, Sequence[Bytes]]]
Told: TypeAlias = dict[tuple[int, int], tuple[int, int]]

GROUP, EPOCH, REPLICA = "d1", 3, 161
SMALL = RefillOptions(part_bytes=256, parts=3)


class Session:
    """A replica's connection, as the master sees it."""

    def __init__(self) -> None:
        self.is_gone = False


class Asked:
    """One question, with the way back."""

    def __init__(self, line: Line, message: ControlMessage, answer: ResponseFuture) -> None:
        self.message = message
        self.attachments: tuple[Bytes, ...] = ()
        self.session = line.session
        self._line = line
        self._answer = answer

    def respond(self, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> None:
        self._line.under_way -= 1
        if not self._answer.done():
            self._answer.set_result(self._line.tamper(message, attachments))

    def refuse(self, refused: Refused) -> None:
        self._line.under_way -= 1
        if not self._answer.done():
            self._answer.set_exception(refused)

    def end(self) -> None:
        self._line.under_way -= 1


class Line:
    """What a replica asks its master through: no sockets, and whatever goes wrong on the way is said by the test."""

    def __init__(self, snapshots: Snapshots, tamper: Tamper = lambda message, attached: (message, attached)) -> None:
        self.session = Session()
        self.tamper = tamper
        self.under_way = 0
        self.most_under_way = 0
        self.parts = 0
        self.parts_max: int | None = None  # then nothing more is answered
        self._snapshots = snapshots

    async def ask(self, message: ControlMessage, answer: type[AnswerT]) -> tuple[AnswerT, Sequence[Bytes]]:
        told, attached = await self.post(message)
        assert isinstance(told, answer)
        return told, attached

    def post(self, message: ControlMessage) -> ResponseFuture:
        future: ResponseFuture = asyncio.get_running_loop().create_future()
        self.parts += 1
        if self.parts_max is not None and self.parts > self.parts_max:
            return future
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        question = Asked(self, message, future)
        try:
            self._snapshots.answer(question)
        except Refused as refused:
            question.refuse(refused)
        return future


class Stage:
    """A master, through `world`; and the replica's disks."""

    def __init__(self, seed: int | str = 0, *, apart: bool = False, capacity_bytes: int = 1 << 30) -> None:
        self.world = World(seed, apart=apart, options=replace(OPTIONS, catalogue_messages=8))
        self.apart = apart
        self.disk = self._new_disk("replica", capacity_bytes)
        self.schedule_disk = self._new_disk("replica's buckets", capacity_bytes) if apart else self.disk
        self._lives = 0
        self.following: dict[int, Session] = {}  # by directory; whoever is not in it follows on any connection
        directory.claim(self.disk, SeededRng("what was there"), self.identity)
        for disk, name in self.old_files():
            disk.publish(name, [f"old {name}".encode()])
        self.snapshots = self.reign()

    def old_files(self) -> list[tuple[SimDisk, str]]:
        """What the replica had before; two of its names are the master's too."""
        logs = ["messages/00000000000000000000.log", "actions/00000000000000009999.log", "catching-up"]
        logs += ["checkpoints/00000000000000000007.ckpt", "index/00000000000000000000.idx", "actions/ballast"]
        buckets = ["schedule/manifest", "schedule/00000000000000000001.log", "schedule/00000000000000000444.log"]
        return [(self.disk, name) for name in logs] + [(self.schedule_disk, name) for name in buckets]

    def _new_disk(self, name: str, capacity_bytes: int) -> SimDisk:
        sim = self.world.sim
        return SimDisk(sim.rng.child(name), sim.loop.call_later, capacity_bytes=capacity_bytes)

    @property
    def disks(self) -> Disks:
        return Disks(self.disk, self.schedule_disk)

    @property
    def master_disks(self) -> Disks:
        return Disks(self.world.disk, self.world.schedule_disk or self.world.disk)

    @property
    def identity(self) -> DirectoryIdentity:
        return self.world.engine.store.identity

    def reign(self, options: SnapshotOptions | None = None) -> Snapshots:
        """Another one, of the same engine."""
        sim = self.world.sim
        self.snapshots = Snapshots(
            self.world.engine,
            self.master_disks,
            sim.clock,
            sim.loop.call_later,
            GROUP,
            EPOCH,
            self.check_follower,
            options,
        )
        return self.snapshots

    def check_follower(self, question: ReplicaQuestion, message: TakeSnapshot) -> None:
        """As the leader does: only the connection that follows under an id may ask under it."""
        if question.session is not self.following.get(message.directory_id, question.session):
            raise Refused(Code.FENCED, "follow again")

    def live_a_while(self) -> None:
        """Leave traces of every kind: near and far, sent, cancelled, put off, split, forgotten."""
        world = self.world
        now_ms = world.now_ms
        for number in range(12):
            after_ms = (number % 5) * HOUR_MS + (number % 3) * 40 * DAY_MS + number * SECOND_MS
            keys: list[str | None] = [f"k-{number}", None, f"k-{number}"]
            subject = {"subject": BILLS, "producer": 2} if number % 4 == 0 else {"producer": 1}
            payloads = [b"%d-%d" % (number, each) + b"x" * 60 for each in range(3)]
            world.schedule(payloads, [now_ms + after_ms + each * DAY_MS for each in range(3)], keys=keys, **subject)
            world.advance(SECOND_MS)
        world.decide(world.engine.cancel_key(BILLS, "k-4"))
        world.decide(world.engine.reschedule_key(BILLS, "k-8", now_ms + 300 * DAY_MS))
        for _ in range(4):
            world.advance(DAY_MS)
        self.checkpoint()
        world.schedule([b"young"], [world.now_ms + 2 * HOUR_MS])

    def checkpoint(self) -> None:
        self.world.engine.store.checkpoint()
        self.world.settle()

    def refill(self, options: RefillOptions = SMALL) -> SnapshotReceiver:
        """Of the replica as it is now: only what the engine says of itself matters, so the master's will do."""
        return SnapshotReceiver(self.world.engine, self.disks, options)

    def fetch(self, line: Line | None = None, refill: SnapshotReceiver | None = None) -> SnapshotReceiver:
        refill = refill or self.refill()
        self.world.run(refill.fetch(line or Line(self.snapshots), GROUP, EPOCH, REPLICA))
        return refill

    def install(self) -> list[str]:
        return install.install(self.disk, self.schedule_disk, SeededRng("replica"), self.identity, EPOCH)

    def end_life(self, how: Callable[[SimDisk], SimDisk] = SimDisk.crash_process) -> None:
        """Of the replica's process, or of its machine."""
        self._lives += 1
        self.disk, before = how(self.disk), self.disk
        self.schedule_disk = how(self.schedule_disk) if self.schedule_disk is not before else self.disk

    def open(self) -> Engine:
        """The replica as the only one that is left: nothing that is due goes out yet."""
        self._lives += 1
        life = self._lives
        loop = self.world.sim.loop
        engine = Engine(
            self.disk,
            self.world.clock,
            SeededRng(f"replica {life}"),
            defer=lambda callback: loop.call_soon(lambda: callback() if self._lives == life else None),
            route=lambda _subject: None,
            schedule_disk=self.schedule_disk if self.apart else None,
            options=self.world.options,
        )
        for _ in range(2_000):
            engine.on_time()
            if engine.is_loaded and engine.wait_ms() != 0:
                return engine
            self.world.sleep(5)
        raise AssertionError("the replica is never loaded")

    def take_over(self) -> None:
        """The replica goes on in the master's place."""
        self.world.kill()
        self.end_life()
        self.world.disk = self.disk
        self.world.schedule_disk = self.schedule_disk if self.apart else None
        self.world.open()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *problem: object) -> None:
        self.world.__exit__(*problem)  # type: ignore[arg-type]


def known(engine: Engine) -> Told:
    """What a delay server would still send: by subject and sequence, state and due time."""
    rows = engine.rows
    return {
        (int(rows.subject_id[row]), int(rows.sequence[row])): (int(rows.state[row]), int(rows.due_ms[row]))
        for state in (RowState.PENDING, RowState.INTENDED)
        for row in rows.in_state(state).tolist()
    }


def spoiled(message: ControlMessage, attached: Sequence[Bytes], at: int = 32) -> tuple[ControlMessage, Sequence[Bytes]]:
    """One bit of a part flips on its way."""
    if not isinstance(message, Fetched):
        return message, attached
    data = bytearray(attached[0])
    data[at] ^= 1
    return message, [bytes(data)]
