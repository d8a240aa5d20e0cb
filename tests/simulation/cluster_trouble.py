"""The faults of a group of copies: of processes, disks, network and registry.

One fault at a time is survived easily. So every other time a master gets into trouble first: parted from its replicas,
out of the registry's reach, with slow disks around it, or with a clock that was set back. It stays there for about as
long as one of the deadlines that the copies keep. Perhaps it is cut off from its clients for a moment, so that they ask
again. Then it falls, or its successor does, or all do.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from fairway.broker.broker_copy import BrokerCopy
from fairway.errors import FairwayError
from fairway.registry.layout import GroupRecord, group_path, unpack
from fairway.registry.port import Registry, RegistryError
from fairway.replication.leadership import GroupNode, NotPromoted, change_master
from tests.simulation.broker_truth import MS_NS
from tests.simulation.cluster_world import GROUP, Copy

if TYPE_CHECKING:
    from tests.simulation.copies_history import CopiesHistory


Pair: TypeAlias = tuple[str, str]  # of hosts


class Incident(enum.Enum):
    """What happens to a copy, to the ways between copies, or to the registry."""

    KILL = "kill"
    POWER_CUT = "power cut"
    STOP = "stop"
    WIPE = "wipe"
    PART = "parted"
    PART_ONE_WAY = "parted one way"
    PART_ALL = "all parted from one another"
    DROP = "connections broken"
    FLAP = "flapping"
    ISOLATE = "cut off from the registry"
    ISOLATE_ONE_WAY = "cut off from the registry one way"
    FREEZE = "stands still"
    EXPIRE = "session ended"
    REGISTRY_DOWN = "registry down"
    REGISTRY_LOSSY = "registry hears every other word"
    LAG = "slow disk"
    LAG_OTHERS = "slow disks of the others"
    MAROON = "cut off from copies and registry, not from clients"
    FALL_TWICE = "falls, and its successor"
    CLOCK = "clock step"
    ALL_DOWN = "all lose their power"
    PLIGHT = "plight"


DRAWN = (
    *(Incident.KILL,) * 3,
    *(Incident.POWER_CUT,) * 4,
    *(Incident.STOP,) * 2,
    *(Incident.WIPE,) * 2,
    *(Incident.PART,) * 2,
    *(Incident.PART_ONE_WAY,) * 2,
    Incident.PART_ALL,
    Incident.DROP,
    Incident.FLAP,
    *(Incident.ISOLATE,) * 2,
    *(Incident.ISOLATE_ONE_WAY,) * 2,
    *(Incident.FREEZE,) * 3,
    Incident.EXPIRE,
    Incident.REGISTRY_DOWN,
    Incident.REGISTRY_LOSSY,
    Incident.LAG,
    Incident.LAG_OTHERS,
    *(Incident.MAROON,) * 2,
    *(Incident.FALL_TWICE,) * 2,
    *(Incident.CLOCK,) * 2,
    *(Incident.ALL_DOWN,) * 2,
    *(Incident.PLIGHT,) * 30,
)

PLIGHTS = (
    *(Incident.PART,) * 3,
    Incident.PART_ONE_WAY,
    *(Incident.PART_ALL,) * 3,
    Incident.ISOLATE,
    Incident.ISOLATE_ONE_WAY,
    *(Incident.MAROON,) * 2,
    Incident.REGISTRY_DOWN,
    *(Incident.REGISTRY_LOSSY,) * 3,
    *(Incident.LAG_OTHERS,) * 3,
    *(Incident.CLOCK,) * 2,
)

ENDS = (
    None,
    *(Incident.KILL,) * 3,
    *(Incident.POWER_CUT,) * 2,
    Incident.STOP,
    Incident.WIPE,
    Incident.FREEZE,
    Incident.EXPIRE,
    *(Incident.FALL_TWICE,) * 3,
    *(Incident.ALL_DOWN,) * 2,
)


class Trouble:
    """Makes it for one history."""

    def __init__(self, history: CopiesHistory) -> None:
        self._history = history
        self._world = history.world
        self._cluster = history.cluster
        self._rng = history.rng
        self._session_ms = history.cluster.membership.session_ms
        self._lag_ms = history.cluster.membership.leader.lag_ms
        self.is_registry_lossy = False
        self._rising: dict[str, asyncio.Task[None]] = {}
        self._operator: asyncio.Task[None] | None = None
        self._ways: dict[Incident, Callable[[Copy], Coroutine[Any, Any, None]]] = {
            Incident.KILL: self._kill,
            Incident.POWER_CUT: self._cut_power,
            Incident.ALL_DOWN: self._cut_all,
            Incident.STOP: self._stop,
            Incident.WIPE: self._wipe,
            Incident.PART: self._part_for_a_while,
            Incident.PART_ONE_WAY: partial(self._part_for_a_while, is_one_way=True),
            Incident.PART_ALL: self._part_all,
            Incident.DROP: self._drop,
            Incident.FLAP: self._flap,
            Incident.ISOLATE: self._isolate_for_a_while,
            Incident.ISOLATE_ONE_WAY: partial(self._isolate_for_a_while, is_one_way=True),
            Incident.FREEZE: self._stand_still,
            Incident.EXPIRE: self._expire,
            Incident.REGISTRY_DOWN: self._stop_registry,
            Incident.REGISTRY_LOSSY: self._muffle_registry,
            Incident.LAG: self._slow_down,
            Incident.LAG_OTHERS: self._slow_others,
            Incident.MAROON: self._maroon,
            Incident.FALL_TWICE: self._fall_twice,
            Incident.CLOCK: self._step_clock,
            Incident.PLIGHT: self._bring_into_a_plight,
        }

    def _somebody(self) -> Copy:
        """The master more often than others."""
        masters = self._cluster.masters
        if masters and self._rng.below(3):
            return masters[0]
        names = list(self._cluster.copies)
        return self._cluster.copies[names[self._rng.below(len(names))]]

    async def meet(self, incident: Incident) -> None:
        await self._befall(incident, self._somebody())

    async def _befall(self, incident: Incident, copy: Copy) -> None:
        self._world.loop.note(f"{incident.value}: {copy.name}, {self._cluster.why()}")
        if incident is Incident.WIPE and not self._may_wipe(copy):
            incident = Incident.KILL
        self._history.incidents[incident.value] += 1
        await self._ways[incident](copy)

    async def _kill(self, copy: Copy) -> None:
        self._fall(copy.name, is_cut=False)

    async def _cut_power(self, copy: Copy) -> None:
        if self._rng.below(2):  # much is written, and little of it synced
            copy.disk.slowness = 200.0
            await asyncio.sleep(self._rng.below(200) / 1_000)
        self._fall(copy.name, is_cut=True)

    async def _cut_all(self, copy: Copy) -> None:
        for other in self._cluster.copies.values():
            if other is not copy and self._rng.below(2):
                other.disk.slowness = 200.0  # what it has received is not synced when the power goes
        await asyncio.sleep(self._rng.below(200) / 1_000)
        is_first_late = bool(self._rng.below(2))  # whoever comes first leads
        for name in list(self._cluster.copies):
            self._fall(name, is_cut=True, is_late=is_first_late if name == copy.name else None)

    async def _wipe(self, copy: Copy) -> None:
        self._mark_dead(copy.name)
        self._cluster.wipe(copy.name)
        self._rise_later(copy.name)

    async def _part_for_a_while(self, copy: Copy, *, is_one_way: bool = False) -> None:
        self._heal_later(self._part(copy.name, is_one_way=is_one_way))

    async def _part_all(self, _copy: Copy) -> None:
        self._heal_later([pair for name in self._cluster.copies for pair in self._part_from_copies(name)])

    async def _drop(self, copy: Copy) -> None:
        """Whoever was not answered dials, and asks again."""
        if copy.member is not None:
            self._world.net.drop(copy.name)

    async def _flap(self, copy: Copy) -> None:
        for _ in range(2 + self._rng.below(5)):
            parted = self._part(copy.name, is_one_way=bool(self._rng.below(2)))
            await asyncio.sleep(self._rng.below(self._lag_ms) / 1_000)
            self._heal(parted)
            await asyncio.sleep(self._rng.below(self._lag_ms) / 1_000)

    async def _isolate_for_a_while(self, copy: Copy, *, is_one_way: bool = False) -> None:
        if self._isolate(copy, is_one_way=is_one_way):
            self._heal_later([], copy.name)

    async def _stand_still(self, copy: Copy) -> None:
        self._freeze(copy, 100 + self._rng.below(3 * self._session_ms))

    async def _expire(self, copy: Copy) -> None:
        if copy.member is not None and copy.registry is not None and not copy.registry.is_gone:
            until_ns = self._world.clock.monotonic_ns() + self._session_ms * MS_NS
            self._history.truth.note_lease_void(copy.name, until_ns)
            self._cluster.ensemble.expire(copy.name)

    async def _stop_registry(self, _copy: Copy) -> None:
        self._cluster.ensemble.stop()
        self._history.start_task(self._registry_returns(50 + self._rng.below(2 * self._session_ms)))

    async def _muffle_registry(self, _copy: Copy) -> None:
        """Every other request, or the answer to it, breaks its connection; the weather changes when that is over."""
        self.is_registry_lossy = True
        is_answered = bool(self._rng.below(2))
        self._cluster.ensemble.lose(requests=0.0 if is_answered else 0.5, replies=0.5 if is_answered else 0.0)

        async def end() -> None:
            await asyncio.sleep((self._lag_ms + self._rng.below(self._session_ms)) / 1_000)
            self.is_registry_lossy = False

        self._history.start_task(end())

    async def _slow_down(self, copy: Copy) -> None:
        copy.disk.slowness = (20.0, 200.0, 1_000.0)[self._rng.below(3)]
        self._history.start_task(self._speed_up(copy, 200 + self._rng.below(3 * self._session_ms)))

    async def _slow_others(self, copy: Copy) -> None:
        """Much is on this one alone for a while."""
        for other in self._cluster.copies.values():
            if other is not copy:
                other.disk.slowness = (100.0, 300.0, 1_000.0)[self._rng.below(3)]
                self._history.start_task(self._speed_up(other, self._lag_ms + self._rng.below(self._session_ms)))

    async def _bring_into_a_plight(self, copy: Copy) -> None:
        """One or two things that last, and then an end."""
        for _ in range(1 + self._rng.below(2)):
            await self._befall(PLIGHTS[self._rng.below(len(PLIGHTS))], copy)
        await asyncio.sleep(self._rng.below(self._deadline_ms()) / 1_000)
        if self._rng.below(2):
            await self._befall(Incident.DROP, copy)
            await asyncio.sleep((5 + self._rng.below(120)) / 1_000)
        end = ENDS[self._rng.below(len(ENDS))]
        if end is not None:
            await self._befall(end, copy)

    def _deadline_ms(self) -> int:
        """By then a replica is struck out, a lease has ended, another one leads; or nothing has happened yet."""
        half_way = self._lag_ms // 2
        return (half_way, self._lag_ms, 2 * self._lag_ms, self._session_ms, 2 * self._session_ms)[self._rng.below(5)]

    async def _maroon(self, copy: Copy) -> None:
        """Its clients still reach it, and want answers."""
        is_isolated = self._isolate(copy, is_one_way=False)
        self._heal_later(self._part_from_copies(copy.name), copy.name if is_isolated else None)

    async def _fall_twice(self, copy: Copy) -> None:
        """The second time while the others have not found their new master yet, or just now."""
        self._fall(copy.name, is_cut=bool(self._rng.below(2)))
        with suppress(TimeoutError):
            successor = await self._cluster.master(3 * self._session_ms / 1_000)
            await asyncio.sleep(self._rng.below(2 * self._lag_ms) / 1_000)
            self._fall(successor.name, is_cut=bool(self._rng.below(2)))

    async def _step_clock(self, copy: Copy) -> None:
        off_ms = copy.clock.wall_ms() - self._world.clock.wall_ms()
        to_ms = (
            self._rng.below(24_000) - 12_000
        )  # no further: what is to be tried again waits for a master's wall clock
        copy.clock.jump(to_ms - off_ms)
        if self._rng.below(2):
            await self._isolate_for_a_while(copy)

    def _may_wipe(self, copy: Copy) -> bool:
        """Whether what is committed is on another copy that counts, and goes on to count: that it alone counts is what
        a master may have asked for, to be carried out later, and with its disk everything would be gone."""
        if self._cluster.ensemble.is_still_heard(copy.name):
            return False
        path = group_path(self._cluster.membership.group)
        node = self._cluster.ensemble.tree.get(path)
        if node is None or not node.value:
            return False
        in_sync = unpack(GroupRecord, path, node.value).in_sync
        others = [each.member for each in self._cluster.copies.values() if each is not copy and each.member is not None]
        return any(each.directory in in_sync for each in others if each.server is not None)

    def _fall(self, name: str, *, is_cut: bool, is_late: bool | None = None) -> None:
        self._mark_dead(name)
        (self._cluster.cut_power if is_cut else self._cluster.kill)(name)
        self._rise_later(name, is_late=is_late)

    def _mark_dead(self, name: str) -> None:
        rising = self._rising.pop(name, None)
        if rising is not None:
            rising.cancel()
        self._history.truth.note_crash(self._world.clock.monotonic_ns())

    def _rise_later(self, name: str, *, is_late: bool | None = None) -> None:
        if is_late is None:
            is_late = bool(self._rng.below(2))
        late_ms = self._rng.below(3 * self._session_ms) if is_late else self._rng.below(100)

        async def rise() -> None:
            await asyncio.sleep(late_ms / 1_000)
            await self.rise(name)

        self._rising[name] = self._world.loop.create_task(self._history.guarded(rise()))

    async def rise(self, name: str) -> None:
        """As often as it takes: a disk that fails in the middle of a start is tried again."""
        copy = self._cluster.copies[name]
        while copy.member is None:
            try:
                member = await self._cluster.start(name)
            except FairwayError as fault:
                self._world.loop.note(f"{name} not started: {fault}")
                self._history.counts["starts that failed"] += 1
                self._cluster.kill(name)
                await asyncio.sleep(0.05)
            else:
                self._history.start_task(self._mind(copy, member))

    async def _mind(self, copy: Copy, member: BrokerCopy) -> None:
        """A process that cannot go on ends, and is started again."""
        await member.failed()
        if copy.member is member:
            self._history.counts["faults"] += 1
            self._fall(copy.name, is_cut=False)

    async def _stop(self, copy: Copy) -> None:
        """The power may go while it stops."""
        name = copy.name
        self._mark_dead(name)
        if copy.member is None:
            self._rise_later(name)
            return
        stopping = self._world.loop.create_task(self._stopping(name))
        if self._rng.below(4) == 0:
            await asyncio.sleep(self._rng.below(30) / 1_000)
        else:
            await asyncio.wait([stopping])
        stopping.cancel()
        self._fall(name, is_cut=bool(self._rng.below(2)))

    async def _stopping(self, name: str) -> None:
        try:
            await self._cluster.stop(name)
        except FairwayError as fault:
            self._world.loop.note(f"{name} not stopped cleanly: {fault}")

    def _part(self, name: str, *, is_one_way: bool) -> list[Pair]:
        """From the other copies, and now and then from everybody."""
        others = [each for each in self._cluster.copies if each != name]
        everybody = others if self._rng.below(3) else others + self._history.clients
        pairs = [(name, other) if self._rng.below(2) else (other, name) for other in everybody]
        for pair in pairs:
            self._world.net.partition(*pair, one_way=is_one_way)
        return pairs

    def _part_from_copies(self, name: str) -> list[Pair]:
        pairs = [(name, other) for other in self._cluster.copies if other != name]
        for pair in pairs:
            self._world.net.partition(*pair)
        return pairs

    def _isolate(self, copy: Copy, *, is_one_way: bool) -> bool:
        if copy.member is None:
            return False
        only = None if not is_one_way else ("there" if self._rng.below(2) else "back")
        self._cluster.ensemble.cut(copy.name, only)  # type: ignore[arg-type]
        return True

    def heal_all(self) -> None:
        for name in self._cluster.copies:
            self._heal(
                [(name, other) for other in (*self._cluster.copies, *self._history.clients) if other != name], name
            )

    def _heal(self, pairs: Sequence[Pair], isolated: str | None = None) -> None:
        for pair in pairs:
            self._world.net.heal(*pair)
        if isolated is not None:
            self._cluster.ensemble.mend(isolated)

    def _heal_later(self, pairs: Sequence[Pair], isolated: str | None = None) -> None:
        ms = 100 + self._rng.below(3 * self._session_ms)

        async def heal() -> None:
            await asyncio.sleep(ms / 1_000)
            self._heal(pairs, isolated)

        self._history.start_task(heal())

    def _freeze(self, copy: Copy, ms: int) -> None:
        """Nothing reaches it and nothing leaves it for a while. Its timers ring: what they do reaches nobody."""
        if copy.member is None:
            return
        registry = copy.registry
        pairs = [(copy.name, other) for other in (*self._cluster.copies, *self._history.clients) if other != copy.name]
        for pair in pairs:
            self._world.net.partition(*pair)
        copy.disk.stall(ms / 1_000)
        self._cluster.ensemble.pause(copy.name)

        async def thaw() -> None:
            await asyncio.sleep(ms / 1_000)
            if copy.registry is registry and registry is not None and not registry.is_gone:
                self._cluster.ensemble.resume(copy.name)
            self._heal(pairs)

        self._history.start_task(thaw())

    async def _registry_returns(self, ms: int) -> None:
        await asyncio.sleep(ms / 1_000)
        self._cluster.ensemble.start()

    async def _speed_up(self, copy: Copy, ms: int) -> None:
        await asyncio.sleep(ms / 1_000)
        copy.disk.slowness = 1.0

    async def promote_now_and_then(self) -> None:
        """An operator who names other masters, by hand and without a loss, and changes how many copies must be in sync.
        In some histories only."""
        rng = self._world.rng.child("operator")
        if rng.below(3):
            return
        registry = self._cluster.ensemble.client("operator")
        self._operator = asyncio.current_task()
        while True:
            await asyncio.sleep(rng.below(3 * self._session_ms) / 1_000)
            with suppress(RegistryError, NotPromoted):
                if rng.below(3):
                    await change_master(registry, GROUP, None)
                    self._history.counts["promoted"] += 1
                else:
                    await self._change_least(registry, 1 + rng.below(2))

    def dismiss_operator(self) -> None:
        """What was asked for by now may be carried out a little later, and nothing else."""
        if self._operator is not None:
            self._operator.cancel()
            self._cluster.ensemble.crash("operator")

    async def _change_least(self, registry: Registry, copies: int) -> None:
        node = GroupNode(registry, GROUP)
        record = await node.read()
        if record is not None and await node.change(msgspec.structs.replace(record, min_in_sync=copies)):
            self._history.counts["other min_in_sync"] += 1
