"""A long life: a broker that serves for days, with crashes, keeps a flat amount on its disk, and what it retains has
its whole trace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest

from fairway.broker.groups import Groups
from fairway.group_events import ActionKind
from fairway.limits import KIB
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from fairway.storage import action_log, checkpoint, replica_directory, segment
from fairway.storage.action_log import Action
from fairway.storage.record import RecordKind
from fairway.storage.retention import Policy
from fairway.storage.segment import SegmentScan
from fairway.storage.store import Store
from tests.unit.broker.scene import STORE, SUBJECT, Scene, options_of

HOUR_S = 3_600
AGE_HOURS = 2
STORE_OPTIONS = replace(
    STORE,
    segment_bytes=8 * KIB,
    action_segment_bytes=4 * KIB,
    checkpoint_every_bytes=16 * KIB,
    retention=Policy(age_ms_max=AGE_HOURS * HOUR_S * 1_000),
)
GROUPS = ("billing", "audit", "mail")


def _disk_bytes(scene: Scene) -> int:
    folders = ("messages", "actions", "index", "checkpoints")
    names = [f"{where}/{name}" for where in folders for name in scene.disk.listing(where)]
    total = 0
    for name in names:
        file = scene.disk.open(name)
        total += file.size
        file.close()
    return total


def _actions(store: Store) -> Iterator[Action]:
    log = store.actions.log
    for each in log.segments:
        file = log.file(each)
        for found in SegmentScan(
            file, each.base, each.base + segment.HEADER_BYTES, log.log_id, epoch=0, limit=each.end
        ):
            if found.header is not None and found.header.kind == RecordKind.ACTIONS:
                yield from action_log.unpack(found.body)  # type: ignore[union-attr]


def _check_trace(scene: Scene) -> None:
    """Every message that is retained has been acked by every group, and the log says so."""
    store = scene.broker.store
    subject_id = next(each.id for each in store.messages.views.subjects if str(each.name) == SUBJECT)
    first = store.messages.first_sequence(subject_id)
    end = store.messages.end_sequence(subject_id)
    acked: dict[int, set[int]] = {}
    for each in _actions(store):
        if each.event.kind is ActionKind.ACK and each.subject_id == subject_id:
            for start, count in each.event.ranges:
                acked.setdefault(each.group_id, set()).update(range(start, start + count))
    for host in scene.broker.coordinator.groups:
        if host.subject_id == subject_id:
            missing = set(range(first, end)) - acked.get(host.id, set())
            assert not missing, f"{host.name}: no ack of {sorted(missing)[:5]} is retained, of {first} to {end}"


def _rebuilt(scene: Scene) -> bytes:
    """The groups as the action log alone makes them."""
    groups, log = Groups(), scene.broker.store.actions.log
    for each in log.segments:
        for found in SegmentScan(
            log.file(each), each.base, each.base + segment.HEADER_BYTES, log.log_id, epoch=0, limit=each.end
        ):
            groups.replay(found)  # type: ignore[arg-type]
    return groups.picture()


class _NewCopy:
    """A copy that begins where its master's logs begin now, filled by and by."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._master = scene.broker.store
        self._disk = SimDisk(SeededRng("copy"), scene.sim.loop.call_later)
        self.positions = list(self._master.first_bases())
        replica_directory.wipe(self._disk, SeededRng("copy"), self._master.identity, *self.positions)
        self._disk.close()
        self.open()

    def open(self) -> None:
        self._disk = self._disk.crash_process()
        self.groups = Groups()
        self.store = Store.open(
            self._disk,
            self._scene.clock,
            SeededRng("copy"),
            defer=self._scene.sim.loop.call_soon,
            options=STORE_OPTIONS,
            action_view=self.groups,
            follows=True,
            adopt=self._master.identity,
        )

    def fill(self, log: int, below: int | None = None) -> None:
        """Record by record, those that end below."""
        while (chunk := self._master.read_chunk(log, self.positions[log], 1)) is not None:
            end = chunk.position + len(chunk.data)
            if below is not None and end > below:
                break
            self.store.follow(log, chunk.base, chunk.position, chunk.data)
            self.positions[log] = end

    async def restart(self) -> None:
        """With a checkpoint that covers everything so far."""
        await self._scene.sleep(1)
        self.store.confirm(*self.positions)
        ended = asyncio.Event()
        self.store.checkpoint(ended.set)
        await ended.wait()
        self.store.abandon()
        self.open()

    def check(self) -> None:
        """Filled to the end, it arrives at the same groups, byte by byte."""
        for log in (0, 1):
            self.fill(log)
        assert self.groups.picture() == self._scene.broker.coordinator.groups.picture()
        self.store.abandon()


async def _live(scene: Scene, seed: str, hours: int) -> list[int]:
    """Disk use, hour by hour."""
    rng = SeededRng(seed)
    used: list[int] = []
    delivered: dict[str, list[bytes]] = {name: [] for name in GROUPS}
    sent: list[bytes] = []
    for hour in range(hours):
        workers = [await scene.worker("ann", group=name) for name in GROUPS]
        for round_ in range(12):
            payloads = [b"%d-%d-%d" % (hour, round_, number) for number in range(3)]
            sent += payloads
            await scene.send(*payloads)
            for worker in workers:
                handed = await worker.pull()
                if rng.uniform() < 0.2:
                    await worker.retry(handed, after_s=1)
                    await scene.sleep(2)
                    handed = await worker.pull()
                await worker.ack(handed)
                delivered[worker.group] += handed.payloads
            await scene.sleep(5)
        for worker in workers:
            await worker.leave()
        await scene.sleep(HOUR_S - 12 * 11)
        _check_trace(scene)
        used.append(_disk_bytes(scene))
        crash = rng.below(4)
        if crash == 0:
            await scene.power_cut()
        elif crash == 1:
            await scene.kill()
        elif crash == 2:
            await scene.restart()
    assert all(each == sent for each in delivered.values()), "each message once, in order, whatever was dropped"
    return used


def _story(seed: str, hours: int) -> None:
    async def story(scene: Scene) -> None:
        used = await _live(scene, seed, hours)
        settled = used[2 * AGE_HOURS : len(used) // 2]
        assert max(used[len(used) // 2 :]) <= 1.3 * max(settled), used
        assert scene.broker.store.actions.log.segments[0].base > 0, "actions were let go of"
        _NewCopy(scene).check()
        assert _rebuilt(scene) == scene.broker.coordinator.groups.picture()
        await scene.stop()
        for number in checkpoint.numbers(scene.disk):
            scene.disk.remove(checkpoint.file_name(number))
        await scene.start()
        assert (await scene.describe(group="billing")).lag == 0, "without a checkpoint, from what is left of the log"

    Scene(seed, options_of(store=STORE_OPTIONS)).play(story)


@pytest.mark.parametrize("seed", ["a"])
def test_the_disk_use_of_a_long_life_is_flat(seed: str) -> None:
    _story(seed, 16)


def _first_picture(scene: Scene) -> int:
    store = scene.broker.store
    log, first = store.actions.log, store.actions.log.segments[0]
    for found in SegmentScan(log.file(first), first.base, first.base + segment.HEADER_BYTES, log.log_id, epoch=0):
        if found.header is not None and found.header.kind == RecordKind.GROUPS:
            return found.header.position
    raise AssertionError("the first segment states no groups")


@pytest.mark.parametrize("records", ["none", "all before the groups", "all"])
def test_a_copy_that_restarts_while_it_is_filled_loses_no_group(records: str) -> None:
    async def story(scene: Scene) -> None:
        await _live(scene, "a", 8)
        assert scene.broker.store.first_bases()[1] > 0, "actions were let go of"
        copy = _NewCopy(scene)
        copy.fill(0)
        if records != "none":
            copy.fill(1, below=_first_picture(scene) if records == "all before the groups" else None)
        await copy.restart()
        copy.check()

    Scene("a", options_of(store=STORE_OPTIONS)).play(story)


def test_a_copy_that_restarts_again_and_again_while_it_is_filled_loses_no_group() -> None:
    async def story(scene: Scene) -> None:
        await _live(scene, "b", 8)
        copy, end = _NewCopy(scene), scene.broker.store.actions.log.end
        first = copy.positions[1]
        copy.fill(0)
        for part in range(1, 20):
            copy.fill(1, below=first + (end - first) * part // 20)
            await copy.restart()
        copy.check()

    Scene("b", options_of(store=STORE_OPTIONS)).play(story)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [f"long {number}" for number in range(6)])
def test_the_disk_use_of_a_longer_life_is_flat(seed: str) -> None:
    _story(seed, 200)


@pytest.mark.parametrize(
    ("crash", "life_min", "hours"),
    [
        (Scene.kill, 50, 16),
        pytest.param(Scene.kill, 50, 60, marks=pytest.mark.slow),
        pytest.param(Scene.power_cut, 50, 60, marks=pytest.mark.slow),
        pytest.param(Scene.power_cut, 20, 40, marks=pytest.mark.slow),
        pytest.param(Scene.restart, 50, 60, marks=pytest.mark.slow),
    ],
)
def test_a_broker_that_ends_within_every_hour_keeps_a_flat_amount_too(
    crash: Callable[[Scene], Awaitable[None]], life_min: int, hours: int
) -> None:
    """No process lives as long as a jump of the clock is held back, and each sees one: the time since the last
    checkpoint."""

    async def story(scene: Scene) -> None:
        used: list[int] = []
        for _ in range(hours * 60 // life_min):
            workers = [await scene.worker("ann", group=name) for name in GROUPS]
            for number in range(4):
                await scene.send(b"%d" % number)
                for worker in workers:
                    await worker.ack(await worker.pull())
            for worker in workers:
                await worker.leave()
            await scene.sleep(life_min * 60)
            used.append(_disk_bytes(scene))
            assert scene.clock.wall_ms() - scene.broker.store.aging_ms() <= 3 * HOUR_S * 1_000
            await crash(scene)
        half = len(used) // 2
        assert max(used[half:]) <= 1.3 * max(used[half // 2 : half]), used

    Scene(f"ends after {life_min}", options_of(store=STORE_OPTIONS)).play(story)
