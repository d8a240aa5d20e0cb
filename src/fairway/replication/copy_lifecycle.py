"""The life of one copy of a group: it registers, sees who leads, and follows or leads itself.

    turn:   register ─► read the group's node and the live copies ─► decide (`leadership`) ─► act ─► wait for news

A copy opens its directory once, as a follower, and takes over with the same open store. A deposed master closes
everything and removes its own node, so that the next master need not wait for it. Then it opens its directory again as
a follower, which can cut off records that no other copy has. Recovery runs beside the loop, so that the copy answers
probes meanwhile.

To take over, a copy stops following: from then on it acknowledges nothing to any master. It changes the group's node by
compare-and-set, puts the promise of the new epoch on disk, and writes the epoch into both logs. It waits until
everything in them is committed. Then it opens to clients.

To stop, a master takes no more requests, waits until everything is committed, and falls silent. Only then does it
remove its own node, so that a replica takes over at once.

The subclass (a broker's or a delay server's) supplies the server (`ReplicatedServer`) in `_serve`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import closing, suppress
from dataclasses import replace
from typing import Generic

import msgspec

from fairway.batch.identity import copy_verifier_of, new_secret
from fairway.errors import (
    CannotListen,
    DiskFull,
    FairwayError,
    Misuse,
    Refused,
    StorageFault,
    WrongDirectory,
)
from fairway.protocol import ConnectionOptions
from fairway.registry.layout import MASTER, GroupRecord, group_path, hex_id, members_path
from fairway.registry.layout import RegisteredCopy as MemberRecord
from fairway.registry.port import RegistryError, SessionState
from fairway.replication import leadership
from fairway.replication.copies import CopyOptions, CopyRuntime, CopyStatus, Face, ProbePort, ServerT
from fairway.replication.follower import ActionsRepaired, Diverged, Follower, Remedy, ReplicaRefill, TooFarBehind
from fairway.replication.leader import Leader
from fairway.replication.leadership import EpochPromise, GroupNode, OwnStep, living
from fairway.replication.peers import NS_PER_MS
from fairway.replication.registration import CopyRegistration
from fairway.runtime.disk import Disk
from fairway.storage import replica_directory
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.recovery import Finding

_CLOSE_S = 2.0  # for a registry to end a session


class CopyLifecycle(ABC, Generic[ServerT]):
    """One copy. `await begin()`, then `await stop()`."""

    kind: str  # of the group

    def __init__(
        self, world: CopyRuntime, membership: CopyOptions, face: Face, copy_status: CopyStatus, probes: ProbePort
    ) -> None:
        self.membership = membership
        self.copy_status = copy_status
        self.face = face
        self.server: ServerT | None = None
        self.role = "waiting"
        self.findings: list[str] = []  # cut off or set aside
        self.probes = probes
        self._world = world
        self._node = GroupNode(world.registry, membership.group)
        self._promise: EpochPromise | None = None
        self._disk: Disk | None = None
        # of this process, in no file: it proves to masters that this process is this copy
        self._secret = new_secret(world.rng)
        self._place = CopyRegistration(world.registry, world.clock, membership.group, membership.session_ms)
        self._ruling_since_ns: int | None = None
        self._rest_until_ns = 0  # set when the disk was full
        self._following: leadership.FollowDecision | None = None
        self._follower: Follower | None = None
        self._held_up = ""  # why its last try to follow failed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._remedy: Remedy | None = None
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()
        self._fault: FairwayError | None = None
        self._is_stopping = False
        self._started_ms = world.clock.wall_ms()
        self._beaten_ns = 0

    async def begin(self) -> None:
        """Open the directory, listen, and take part from now on. The copy learns its role later."""
        registry, group = self._world.registry, self.membership.group
        self.face = replace(self.face, http_port=await self.probes.listen(self.face.host, self.face.http_port))
        registry.on_session = self._on_session
        try:
            await self._first_look()
            await self._open()
        except BaseException:  # also when the task is cancelled
            self._let_go()
            self.probes.close()
            raise
        for path in (group_path(group), members_path(group)):
            registry.watch(path, self._changed.set)
        self._begin("life", self._live())

    # --- the server --------------------------------------------------------------------------------------------------

    @abstractmethod
    async def _serve(self, disk: Disk, adopt: DirectoryIdentity | None) -> ServerT:
        """Open the directory as a follower, and listen. `adopt` names the logs for a directory that has none."""

    @abstractmethod
    def _load(self, server: ServerT, now_ns: int) -> dict[str, float]:
        """Figures for the copy's own node, of the time since the last call."""

    def _refill(self, server: ServerT) -> ReplicaRefill | None:
        """The refill for a copy that starts over; None: its logs are all of its state."""
        del server
        return None

    def _why_closed(self, server: ServerT) -> str:
        """Why a master takes no messages, copies apart; empty: it takes them."""
        del server
        return ""

    @property
    def directory(self) -> str:
        return hex_id(self._opened.store.identity.directory_id)

    @property
    def port(self) -> int:
        return self.face.port

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.membership.advertise or (self.face.host, 0)
        return host, port or self.port

    @property
    def _opened(self) -> ServerT:
        if self.server is None:
            raise Misuse("the data directory is being opened")
        return self.server

    def sentence(self) -> str:
        """What the copy does, for operators."""
        group, leader = self.membership.group, self.copy_status.leader
        if leader is not None:
            copies = f"in sync: {', '.join(leader.in_sync)}"
            about = f"leads group {group} under epoch {leader.epoch}, {copies}"
            return about if self.copy_status.is_open else f"{about}; it is not open to clients yet"
        if self._following is not None:
            about = f"follows {self._following.address} in group {group}, under epoch {self._following.epoch}"
            is_held_up = self._held_up and (self._follower is None or not self._follower.is_streaming)
            return f"{about}, and is held up: {self._held_up}" if is_held_up else about
        return f"waits in group {group}: {self.copy_status.why}"

    async def failed(self) -> None:
        """Return when this copy cannot go on. After that, `stop` raises the reason."""
        await self._failed.wait()

    # --- opening -----------------------------------------------------------------------------------------------------

    async def _first_look(self) -> None:
        """Read the group's node: a new directory takes the ids of its logs from there."""
        while True:
            try:
                record = await self._node.read(fresh=True)
            except (RegistryError, Refused):
                await asyncio.sleep(self.membership.backoff_ms / 1_000)
            else:
                leadership.check_kind(self.membership.group, record, self.kind)
                return

    async def _open(self) -> None:
        """Open the directory as a follower. An empty directory takes the group's logs."""
        record = self._node.record
        adopt = None
        if record is not None and record.messages_id:
            adopt = DirectoryIdentity(0, record.messages_id, record.actions_id)
        self._disk = self._world.open_disk()
        self.server = server = await self._serve(self._disk, adopt)
        self.probes.opened(server.pages)
        self._promise = promise = EpochPromise(self._disk)
        self.face = replace(self.face, port=server.port)
        self._follower = Follower(
            server.store,
            promise,
            self._world.net,
            self._world.clock,
            self.membership.group,
            server.on_committed,
            replace(self.membership.follower, connection=ConnectionOptions(name=self.face.name)),
            self._refill(server),
            secret=self._secret,
        )
        self._begin("fault", self._watch_for_faults(server))

    async def _watch_for_faults(self, server: ServerT) -> None:
        await server.failed()
        fault = server.failure()
        if isinstance(fault, DiskFull):
            self._rest_until_ns = self._world.clock.monotonic_ns() + self.membership.look_ms * NS_PER_MS
            self._step_down(f"there is no room on its disk: {fault}")
        else:
            self._fail(fault)

    def _fail(self, fault: FairwayError) -> None:
        if self._fault is None:
            self._fault = fault
            self._stop_leading()
            self._stop_following()
            self._failed.set()

    def _let_go(self) -> None:
        """Let go of the directory and of all connections, at once."""
        self._stop_leading()
        self._stop_following()
        self._cancel("fault")
        server, self.server = self.server, None
        if server is not None:
            server.abandon()
        self.probes.closed()

    # --- turns -------------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        while not self._is_stopping and self._fault is None:
            self._changed.clear()
            try:
                wait_ms = await self._turn()
            except Refused as refused:
                self._say(f"the registry refuses it: {refused.sentence}")
                wait_ms = self.membership.backoff_ms
            except RegistryError as trouble:
                self._say(f"the registry does not answer: {trouble}")
                wait_ms = self.membership.backoff_ms
            except CannotListen as trouble:  # it did listen there before
                self._say(str(trouble))
                wait_ms = self.membership.look_ms
            except FairwayError as fault:
                self._fail(fault)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1_000):
                    await self._changed.wait()

    async def _turn(self) -> int:
        """Look and act. Returns how long to wait unless something happens."""
        if self._remedy is not None:
            await self._apply_remedy(self._remedy)
        if self.server is None:
            await self._place.leave()  # first: the next master waits for that, and recovery takes seconds
            await self._node.read(fresh=True)
            if self._world.clock.monotonic_ns() < self._rest_until_ns:
                return self.membership.look_ms
            await self._open()
        if not await self._place.take(self._record()):
            if self._place.why:
                self._say(self._place.why)
            return self.membership.backoff_ms
        record = await self._node.read(fresh=True)
        alive = await living(self._world.registry, self.membership.group)
        leadership.check_kind(self.membership.group, record, self.kind)
        if self.server is None:
            return 0  # deposed meanwhile
        if record is not None and (why := leadership.foreign(self.membership.group, record, self._me())) is not None:
            await self._adopt_or_refuse(why)
            return 0
        return await self._act(record, alive)

    def _me(self) -> leadership.Me:
        store = self._opened.store
        epoch = max(store.messages.log.epoch, store.actions.log.epoch)
        promised = 0 if self._promise is None else self._promise.epoch
        leader = self.copy_status.leader
        return leadership.Me(
            self.directory,
            store.identity.messages_id,
            store.identity.actions_id,
            max(epoch, promised),
            has_promised=promised > 0,
            leads=0 if leader is None or leader.is_over else leader.epoch,
        )

    async def _act(self, record: GroupRecord | None, alive: dict[str, MemberRecord]) -> int:
        group, me = self.membership.group, self._me()
        decision = leadership.decide(group, record, alive, me, is_patient=self._is_patient(record, alive))
        if me.leads and decision is not OwnStep.LEAD:
            self._step_down("the registry says that another leads")
            return 0
        match decision:
            case OwnStep.LEAD:
                if self.copy_status.leader is not None:
                    self.copy_status.leader.refresh(alive)
                return self.membership.look_ms
            case leadership.FollowDecision():
                self._follow(decision)
                return self.membership.look_ms
            case leadership.Wait(why):
                self._stop_following()
                self._say(why)
                return self.membership.look_ms if self._ruling_since_ns is None else self.membership.backoff_ms
            case OwnStep.CREATE | OwnStep.STAND if not self._is_certain():
                self._say("its session at the registry is not certain")  # otherwise it would have to step down at once
                return self.membership.backoff_ms
            case OwnStep.CREATE:
                await self._stand(
                    leadership.founded(me, kind=self.kind, min_in_sync=self.membership.min_in_sync), alive
                )
            case OwnStep.STAND:
                if record is not None:
                    await self._stand(
                        leadership.succeeded(record, alive, me, min_in_sync=self.membership.min_in_sync), alive
                    )
        return 0

    def _is_certain(self) -> bool:
        return self._world.clock.monotonic_ns() < self._world.registry.certain_until_ns()

    def _is_patient(self, record: GroupRecord | None, alive: dict[str, MemberRecord]) -> bool:
        """Whether to wait for a master that was deposed by hand. It learns of that soon, or its session ends."""
        rightful = (self.directory, "" if record is None else record.master)
        if all(each.role != MASTER or each.directory in rightful for each in alive.values()):
            self._ruling_since_ns = None
            return True
        now_ns = self._world.clock.monotonic_ns()
        if self._ruling_since_ns is None:
            self._ruling_since_ns = now_ns
        return now_ns - self._ruling_since_ns < 2 * self.membership.session_ms * NS_PER_MS

    def _say(self, why: str) -> None:
        """Note what the copy waits for."""
        self.copy_status.why = why
        self.copy_status.master = ""
        if self.copy_status.leader is None:
            self.role = "waiting"

    async def _adopt_or_refuse(self, why: str) -> None:
        """Handle a group that another copy has created meanwhile: a copy without records adopts the ids of its logs."""
        store = self._opened.store
        if store.ends() != (0, 0):
            raise WrongDirectory(why)
        self._let_go()
        self._changed.set()

    # --- the copy's own node -----------------------------------------------------------------------------------------

    def _on_session(self, _state: SessionState) -> None:
        self._changed.set()

    def _record(self) -> MemberRecord:
        """The contents of the copy's own node. Its figures change every `beat_ms`."""
        server = self._opened
        host, port = self.address
        leader = self.copy_status.leader
        follower = self._follower
        if leader is None and self._following is not None and follower is not None:
            self.role = "catching up" if not follower.is_streaming or follower.is_catching_up else "follower"
        shown = MemberRecord(
            self.directory,
            host,
            port,
            self.role,
            0 if leader is None else leader.epoch,
            name=self.face.name,
            http_port=self.face.http_port,
            why_read_only="" if leader is None else leader.why_read_only() or self._why_closed(server),
            started_ms=self._started_ms,
            kind=self.kind,
            is_closed=leader is not None and leader.is_closed,
            verifier=copy_verifier_of(self._secret, self.directory),
        )
        now_ns = self._world.clock.monotonic_ns()
        before = self._place.shown
        is_due = before is None or now_ns - self._beaten_ns >= self.membership.beat_ms * NS_PER_MS
        if not is_due and before is not None:
            return msgspec.structs.replace(shown, ends=before.ends, load=before.load)
        self._beaten_ns = now_ns
        return msgspec.structs.replace(shown, ends=list(server.store.ends()), load=self._load(server, now_ns))

    # --- following ---------------------------------------------------------------------------------------------------

    def _follow(self, master: leadership.FollowDecision) -> None:
        if self._following == master:
            return
        self._stop_following()
        self._following, self._held_up = master, ""
        self.copy_status.master = master.address
        self._begin("follow", self._keep_following(master))

    async def _keep_following(self, master: leadership.FollowDecision) -> None:
        """Dial again and again, until the copy has to follow another master."""
        backoff_ms = self.membership.backoff_ms
        follower = self._follower
        while follower is not None and self._following == master:
            try:
                await follower.run(master)
            except (Diverged, TooFarBehind, ActionsRepaired) as remedy:
                self._remedy = remedy
                self._changed.set()
                return
            except StorageFault as fault:
                self._fail(fault)
                return
            except FairwayError as trouble:
                self.copy_status.why = self._held_up = str(trouble)
            self._changed.set()
            await asyncio.sleep(backoff_ms / 1_000)
            backoff_ms = min(2 * backoff_ms, self.membership.look_ms)

    def _stop_following(self) -> None:
        """Acknowledge nothing to any master from this moment on."""
        self._following = None
        self._cancel("follow")
        if self._follower is not None:
            self._follower.stop()

    async def _apply_remedy(self, remedy: Remedy) -> None:
        """Cut off what only this copy has, or start over. The next turn opens the directory again."""
        record = self._node.record
        if isinstance(remedy, TooFarBehind) and record is not None:
            await self._place.leave()  # the copy starts over as another copy, under another id
            self._let_go()
            self.findings += self._begin_anew(remedy, DirectoryIdentity(0, record.messages_id, record.actions_id))
        elif isinstance(remedy, Diverged):
            self._let_go()
            self.findings += self._cut(remedy)
        else:
            self._let_go()
        self.findings.append(str(remedy))
        self._remedy = None

    def _cut(self, parted: Diverged) -> list[str]:
        with closing(self._world.open_disk()) as disk:
            return [*map(_told, replica_directory.cut(disk, parted.messages_at, parted.actions_at))]

    def _begin_anew(self, remedy: TooFarBehind, adopt: DirectoryIdentity) -> list[str]:
        """Reset the replica. Returns what was set aside."""
        with closing(self._world.open_disk()) as disk:
            kept = replica_directory.wipe(disk, self._world.rng, adopt, *remedy.first_bases)
            return [f"set aside: {name}" for name in kept]

    # --- leading -----------------------------------------------------------------------------------------------------

    async def _stand(self, to: GroupRecord, alive: dict[str, MemberRecord]) -> None:
        """Take over, unless another copy is faster."""
        self._stop_following()
        session = self._place.session  # as it was when the live copies were counted, this copy among them
        if self._follower is not None:
            await self._follower.end_catch_up()
        if not await self._node.change(to) or self.server is None or self._promise is None:
            return
        await self._promise.keep(to.epoch)
        server = self._opened
        loop = asyncio.get_running_loop()
        leader = Leader(
            self._node.twin(),
            server.store,
            self._world.registry,
            self._world.clock,
            loop.call_later,
            self._step_down,
            self.membership.leader,
            session=session,
            living=alive,
            tally=self.copy_status.tally,
        )
        self.copy_status.leader, self.copy_status.is_open = leader, False
        self.role = MASTER
        server.store.lead(to.epoch)
        leader.start()
        if not leader.is_over:
            self._begin("open", self._let_in(server, leader))

    async def _let_in(self, server: ServerT, leader: Leader) -> None:
        """Open to clients, as soon as everything in the logs is committed."""
        try:
            for log in (server.store.messages.log, server.store.actions.log):
                await log.flusher.durable(log.end)
            await leader.mended()
        except FairwayError:  # a fault of the store, which `_watch_for_faults` handles
            return
        if leader.is_over or self.server is not server:
            return
        # the leader opens the directory again: the groups do not know the repaired actions yet
        if server.store.is_view_stale:
            return
        try:
            server.begin_life()
        except FairwayError as fault:
            self._fail(fault)
            return
        self.copy_status.is_open = True
        self._changed.set()

    def _stop_leading(self) -> None:
        leader, self.copy_status.leader = self.copy_status.leader, None
        self.copy_status.is_open = False
        self._cancel("open")
        if leader is not None:
            leader.close()
            self.role = "waiting"

    def _step_down(self, why: str) -> None:
        """Close everything. The next turn decides what follows."""
        self._let_go()
        self._say(why)
        self._changed.set()

    # --- the end -----------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Hand over if this copy leads, write a checkpoint, let go. Raises the fault that has ended the copy, if
        any."""
        try:
            await self._end()
        finally:
            self.probes.close()

    async def _end(self) -> None:
        self._is_stopping = True
        life = self._tasks.get("life")
        self._cancel("life")
        if life is not None:
            await asyncio.wait([life])  # it lets go of a server that it was about to open
        if self.copy_status.is_master and self._fault is None:
            await self._hand_over()
        self._stop_following()
        server = self.server
        is_whole = server is not None and self._is_all_committed(server)
        if server is not None:
            server.fall_silent()
        self._stop_leading()
        await self._place.leave()
        self._cancel("fault")
        try:
            if server is not None and is_whole:
                await server.stop()
            elif server is not None:
                server.abandon()
        finally:
            with suppress(FairwayError, TimeoutError):  # the registry may be ending itself
                async with asyncio.timeout(_CLOSE_S):
                    await self._world.registry.close()
        if self._fault is not None:
            raise self._fault

    async def _hand_over(self) -> None:
        """Take no more, and wait up to `hand_over_ms` until everything is committed."""
        server = self._opened
        self.copy_status.is_open, self.copy_status.is_leaving = False, True
        with suppress(TimeoutError, FairwayError):
            async with asyncio.timeout(self.membership.hand_over_ms / 1_000):
                await server.come_to_rest()
                for log in (server.store.messages.log, server.store.actions.log):
                    await log.flusher.durable(log.end)

    @staticmethod
    def _is_all_committed(server: ServerT) -> bool:
        """Whether a last checkpoint makes sense: the store is sound and everything is committed."""
        logs = (server.store.messages.log, server.store.actions.log)
        return server.store.fault is None and all(log.committed_end >= log.end for log in logs)

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _begin(self, name: str, work: object) -> None:
        self._cancel(name)
        self._tasks[name] = asyncio.get_running_loop().create_task(work, name=f"fairway-{name}")  # type: ignore[arg-type]

    def _cancel(self, name: str) -> None:
        """Cancel the task, unless it is the current one."""
        task = self._tasks.pop(name, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()


def _told(finding: Finding) -> str:
    """What was cut off, for operators."""
    start, end = finding.damage.start, finding.damage.end
    kept = "" if finding.aside is None else f", and is kept in {finding.aside}"
    return f"what was in the {finding.log} from {start} to {end} was {finding.damage.why}{kept}"
