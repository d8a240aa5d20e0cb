"""The master's side of replication: what each replica has synced, what is committed by that, and whose copies count.

A replica's REPLICATE is a confirmation and a credit. The confirmation moves the committed end, which is the least that
every copy of the set *waited for* has synced. The credit is answered as soon as something is synced here that the
replica does not have; with nothing but the committed ends where those have moved; and empty when its time is up.

The set in the registry is changed by one task, one compare-and-set at a time:

    a copy that is gone, or lags for too long     removed in the registry first, then waited for no more
    a copy that has caught up                     waited for first, then written into the registry

What has rotted in the master's own logs is fetched from a copy that is in sync (`repairs`).

Whoever finds out that another leads, or cannot know any more that none does, calls `on_deposed` and stops at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from fairway import limits
from fairway.batch.secret import checked, copy_verifier_of
from fairway.errors import Code, Refused, StorageFault
from fairway.protocol import Bytes
from fairway.protocol.frames import stretch, stretched
from fairway.protocol.replicating import (
    ACTIONS,
    MESSAGES,
    Chunk,
    Compare,
    Follow,
    Followed,
    Give,
    Given,
    Mend,
    Replicate,
    Replicated,
    TakeSnapshot,
    Want,
)
from fairway.registry.layout import GroupRecord, RegisteredCopy, hex_id
from fairway.registry.port import Registry, RegistryError
from fairway.replication import log_answers
from fairway.replication.law import with_member
from fairway.replication.node import GroupNode
from fairway.replication.peer import NS_PER_MS, NS_PER_S, Credit, Peer, ReplicaQuestion, has
from fairway.replication.registered_copies import RegisteredCopies
from fairway.replication.repairs import Repairs
from fairway.replication.tally import ReplicationCounters
from fairway.storage import copying
from fairway.storage.log import Damaged
from fairway.storage.store import Store
from fairway.world.clock import Clock

QUESTIONS = (Follow, Compare, Replicate, Mend, Give)  # a union written where it is asked costs 1 µs
LOGS = (MESSAGES, ACTIONS)
_RETRY_AFTER_MS = 500  # for produce below min_in_sync: a replica that comes back takes about so long
_UNKNOWN = Refused(Code.FENCED, "this replica is not known here, or under another epoch: follow again")


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """How a master treats its replicas."""

    lag_ms: int = 5_000  # a replica that has not caught up for so long is waited for no more
    gone_ms: int = 1_000  # and one whose connection is gone
    check_ms: int = 100
    chunk_bytes_max: int = limits.MIB  # of one answer
    wait_ms_max: int = 5_000  # that a credit is kept
    news_ms: int = 20  # until a replica knows of a committed end that no message follows
    catch_up_bytes_per_s: int = 128 * limits.MIB  # to each replica that is not in sync
    repair_ms: int = 2_000  # that a replica has to bring what has rotted here
    repair_again_ms: int = 60_000  # that one which is in sync and does not is waited for, and then left alone


class Leader:
    """One reign: one epoch of one group. Lives on the loop of its store."""

    def __init__(
        self,
        node: GroupNode,
        store: Store,
        registry: Registry,
        clock: Clock,
        call_later: Callable[..., asyncio.TimerHandle],
        on_deposed: Callable[[str], None],
        options: LeaderOptions | None = None,
        *,
        session: int,
        living: Mapping[str, RegisteredCopy],
        tally: ReplicationCounters | None = None,
    ) -> None:
        """`session`: at the registry, the one whose end others take for this copy's. `living`: the copies that are
        registered. `tally`: of all reigns."""
        record = node.record
        if record is None:
            raise ValueError("who leads has read the group's node")
        self.epoch = record.epoch
        self.me = record.master
        self.group = node.group
        self.record: GroupRecord = record
        self.options = options or LeaderOptions()
        self.peers: dict[str, Peer] = {}
        self.is_over = False
        self.living = RegisteredCopies(
            registry, node.group, record.in_sync, living, retry_after_ms=self.options.check_ms
        )
        self._node = node
        self._store = store
        self._registry = registry
        self._clock = clock
        self._call_later = call_later
        self._on_deposed = on_deposed
        self._waited: set[str] = set(record.in_sync) | {self.me}  # asked, and its order does not matter
        self._began_ns = clock.monotonic_ns()
        self._is_refresh_due = False
        self._stirred = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        self._session = session
        self.tally = tally or ReplicationCounters()
        self.repairs = Repairs(store, self.tally, self.options.repair_ms, self.options.repair_again_ms)

    def start(self) -> None:
        self.tally.reigns += 1
        self._store.on_synced = self._synced
        self._store.on_rot = self._stirred.set
        self._store.messages.is_awaited = self._is_awaited
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="fairway-leader")
        self._watch_lease()
        self._synced()

    def close(self) -> None:
        """Confirm and answer nothing any more."""
        self.is_over = True
        self._store.on_synced = self._store.on_rot = _nothing
        self._store.messages.is_awaited = lambda _: False
        if self._task is not None:
            self._task.cancel()
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        for peer in self.peers.values():
            peer.drop()

    def refresh(self, living: Mapping[str, RegisteredCopy] | None = None) -> None:
        """The registry has news, or may have. `living`: the copies that are registered, where it was read."""
        if living is not None:
            self.living.update(living, self._remembered())
            self._check_peers()
        self._is_refresh_due = True
        self._stirred.set()

    # --- what the server asks ----------------------------------------------------------------------------------------

    def certain_until_ns(self) -> int:
        """Until when no other copy can lead; in the past: one may."""
        registry = self._registry
        return 0 if self.is_over or registry.session_id != self._session else registry.certain_until_ns()

    def is_certain(self) -> bool:
        """Whether no other copy can lead yet; whoever is told no is deposed by that."""
        if self.is_over:
            return False
        if self._clock.monotonic_ns() < self.certain_until_ns():
            return True
        self._depose("the registry has not answered for so long that another copy may lead by now")
        return False

    def _watch_lease(self) -> None:
        """When the lease may have ended: nobody need ask for a master to step down."""
        if self.is_certain():
            rest_ns = self._registry.certain_until_ns() - self._clock.monotonic_ns()
            self._lease_timer = self._call_later(max(rest_ns, NS_PER_MS) / NS_PER_S, self._watch_lease)

    @property
    def in_sync(self) -> list[str]:
        return self.record.in_sync

    def why_read_only(self, *, is_pinned: bool = False) -> str:
        """Why no messages are taken; empty: they are. `is_pinned`: only those that this group may have already."""
        copies, least = len(self.record.in_sync), self.record.min_in_sync
        if self.is_closed:
            return f"group {self.group} is given up, by command, and takes nothing any more: send elsewhere"
        if self.record.is_draining and not is_pinned:
            return f"group {self.group} is being drained, by command: send elsewhere"
        if self.has_enough_copies:
            return ""
        return (
            f"{copies} of the copies of group {self.group} are in sync, and {least} are the least for new messages: "
            "bring a replica back, or lower min_in_sync"
        )

    @property
    def is_closed(self) -> bool:
        """Whether the group is given up: nothing is taken that might be lost with it."""
        return self.record.is_closed or self.record.is_done

    @property
    def has_enough_copies(self) -> bool:
        return len(self.record.in_sync) >= self.record.min_in_sync

    def check_writable(self, *, is_pinned: bool) -> None:
        """`Refused` where a batch is not taken."""
        why = self.why_read_only(is_pinned=is_pinned)
        if why:
            raise Refused(Code.READ_ONLY, why, retry_after_ms=_RETRY_AFTER_MS)

    # --- what replicas ask -------------------------------------------------------------------------------------------

    def answer(self, request: ReplicaQuestion) -> None:
        """One of `QUESTIONS`; `Refused` where it cannot be answered."""
        message = request.message
        if isinstance(message, Follow):
            request.respond(self._follow(request, message))
        elif isinstance(message, Compare):
            request.respond(log_answers.compare(self._store, message))
        elif isinstance(message, Mend):
            mended, data = log_answers.mend(self._store, message, self.options.chunk_bytes_max)
            request.respond(mended, [stretch(data)])
        elif isinstance(message, Give):
            request.respond(self._given(request, message))
        elif isinstance(message, Replicate):
            self._replicate(request, message)

    def _follow(self, request: ReplicaQuestion, message: Follow) -> Followed:
        if message.group != self.group:
            raise Refused(Code.BAD_REQUEST, f"this is a copy of group {self.group}, not of {message.group}")
        if message.epoch > self.epoch:  # the registry knows whether it is true
            self.refresh()
            raise Refused(Code.NOT_MASTER, f"epoch {self.epoch} may be over: ask the registry who leads")
        if message.epoch < self.epoch:
            raise Refused(Code.FENCED, f"the master leads under epoch {self.epoch}, not {message.epoch}")
        directory = hex_id(message.directory_id)
        if directory == self.me:
            raise Refused(
                Code.BAD_REQUEST, "this data directory is a copy of the master's: start a replica with an empty one"
            )
        verifier = copy_verifier_of(checked(message.secret, "replica"), directory)
        self._check_registered(directory, verifier)
        before = self._forget(directory)
        peer = self.peers[directory] = Peer(directory, request.session, self._clock.monotonic_ns(), verifier)
        if before is not None:
            peer.caught_up_ns = before.caught_up_ns
        return Followed(self.epoch, [log_answers.extent(self._store, log) for log in LOGS])

    def _check_registered(self, directory: str, verifier: bytes) -> None:
        """Only copies of the group are followed by anybody: those that are registered, and those that it knows and that
        the registry does not answer now. Whoever was neither in sync nor is registered any more is forgotten."""
        remembered = self._remembered()
        for each, peer in [*self.peers.items()]:
            if not (peer.is_connected or each in self.living or each in remembered):
                self._forget(each)
        try:
            self.living.check(directory, verifier, self.record.members, self._clock.monotonic_ns())
        except Refused:
            self.tally.refused_follows += 1
            if self.living.is_look_due:
                self._stirred.set()
            raise

    def _remembered(self) -> set[str]:
        """The copies that are not forgotten when they are not registered any more."""
        return {*self.record.members, *self._waited}

    def _check_peers(self) -> None:
        """Send away peers that have shown another secret than the one that the copy's node stands for now: the copy was
        started again, or a stranger followed before the node was known here. Such a peer confirms nothing."""
        for peer in self.peers.values():
            if not peer.is_sent_away and not self.living.accepts(peer.directory, peer.verifier):
                peer.confirmed = None
                self._send_away(peer, _UNKNOWN)

    def _forget(self, directory: str) -> Peer | None:
        peer = self.peers.pop(directory, None)
        self.repairs.forget(directory)
        if peer is not None:
            peer.drop()
        return peer

    def _given(self, request: ReplicaQuestion, message: Give) -> Given:
        """What has rotted here, from a replica. It is checked by whoever puts it in place."""
        peer = self.known(request, message)
        data = stretched(request.attachments[0]) if request.attachments else b""
        end = self.repairs.take(peer.directory, message, data, self._clock.monotonic_ns())
        self._stirred.set()
        return Given(end)

    def known(self, request: ReplicaQuestion, message: Replicate | Give | TakeSnapshot) -> Peer:
        """The replica that asks; `Refused` where it has to follow first, on this connection."""
        peer = self.peers.get(hex_id(message.directory_id))
        is_known = peer is not None and peer.session is request.session and not peer.is_sent_away
        if peer is None or not is_known or message.epoch != self.epoch:
            raise _UNKNOWN
        return peer

    def _replicate(self, request: ReplicaQuestion, message: Replicate) -> None:
        peer = self.known(request, message)
        now_ns = self._clock.monotonic_ns()
        ends, own_ends = _pair(message.ends), self._store.ends()
        if message.starts:
            peer.begin(list(_pair(message.starts)))
        if not has(own_ends, ends) or not has((peer.cursor[0], peer.cursor[1]), ends):
            raise Refused(Code.BAD_REQUEST, f"a replica has synced {ends}, and was sent {peer.cursor}: follow again")
        peer.heard(ends, own_ends, now_ns)
        wait_ms = min(message.wait_ms, self.options.wait_ms_max)
        peer.credits.append(Credit(request, now_ns + wait_ms * NS_PER_MS))
        self._confirm()
        if peer.directory not in self._waited and self._has_caught_up(peer) and self._is_registered(peer, now_ns):
            self._stirred.set()
        self._pump(peer)

    # --- what is committed -------------------------------------------------------------------------------------------

    def _synced(self) -> None:
        """Something more is on our own disk."""
        self._confirm()
        for peer in self.peers.values():
            self._pump(peer)

    def _confirm(self) -> None:
        """The committed ends: what every copy has that is waited for. The store knows what it has synced itself."""
        if not self.is_certain():
            return
        messages_end, actions_end = self._store.ends()
        for directory in self._waited:
            if directory == self.me:
                continue
            peer = self.peers.get(directory)
            if peer is None or peer.confirmed is None:
                return
            messages_end = min(messages_end, peer.confirmed[0])
            actions_end = min(actions_end, peer.confirmed[1])
        self._store.confirm(messages_end, actions_end)
        self._spread_the_word()

    def _spread_the_word(self) -> None:
        """See to it that replicas learn of new committed ends, although no message may follow."""
        committed = self._store.committed_ends()
        for peer in self.peers.values():
            if peer.news_ns is None and peer.told != committed:
                peer.news_ns = self._clock.monotonic_ns()
                self._arm(peer)

    # --- what is sent ------------------------------------------------------------------------------------------------

    def _pump(self, peer: Peer) -> None:
        """Answer its credits as long as there is something to say."""
        now_ns = self._clock.monotonic_ns()
        while peer.credits and not self.is_over and peer.is_connected:
            chunks, attachments = self._chunks(peer, now_ns)
            if not peer.credits or not (chunks or self._must_answer(peer, now_ns)):
                break
            self._respond(peer, chunks, attachments, now_ns)
        self._arm(peer)

    def _send_away(self, peer: Peer, refused: Refused) -> None:
        """It cannot go on from where it is: it has to follow again, and finds out what to do."""
        if peer.credits:
            peer.credits.popleft().question.refuse(refused)
        if self.peers.get(peer.directory) is peer:
            peer.is_sent_away = True
        peer.drop()

    def _must_answer(self, peer: Peer, now_ns: int) -> bool:
        is_news_due = peer.news_ns is not None and now_ns >= peer.news_ns + self.options.news_ms * NS_PER_MS
        return is_news_due or peer.wanted is not None or now_ns >= peer.credits[0].until_ns

    def _respond(self, peer: Peer, chunks: list[Chunk], attachments: list[Bytes], now_ns: int) -> None:
        peer.told = self._store.committed_ends()
        peer.first_bases = self._store.first_bases()
        peer.news_ns = None
        if peer.directory not in self._waited:
            size = sum(map(len, attachments))
            self.tally.catch_up_bytes += size
            slowed_ns = size * NS_PER_S // self.options.catch_up_bytes_per_s
            peer.free_ns = max(peer.free_ns, now_ns) + slowed_ns
        wanted, peer.wanted = peer.wanted, None
        wants = [] if wanted is None else [wanted]
        answer = Replicated(self.epoch, chunks, list(peer.told), list(peer.first_bases), wants)
        peer.credits.popleft().question.respond(answer, attachments)

    def _chunks(self, peer: Peer, now_ns: int) -> tuple[list[Chunk], list[Bytes]]:
        """What it lacks and is synced here: messages first, for actions speak of them."""
        chunks: list[Chunk] = []
        attachments: list[Bytes] = []
        if peer.is_sent_away or (peer.directory not in self._waited and now_ns < peer.free_ns):
            return chunks, attachments
        room = self.options.chunk_bytes_max
        ends = self._store.ends()
        for log in LOGS:
            while room > 0 and peer.cursor[log] < ends[log]:
                found = self._read(peer, log, room)
                if found is None:  # it is being fetched, and what comes behind it waits; or it is sent away
                    return chunks, attachments
                base, position, data = found
                chunks.append(Chunk(log, base, position))
                attachments.append(stretch(data))
                peer.cursor[log] = position + len(data)
                room -= len(data)
        return chunks, attachments

    def _read(self, peer: Peer, log: int, room: int) -> copying.SegmentChunk | None:
        """What comes next. What is not in memory is fetched first, one piece at a time, so that a replica that is far
        behind does not make everybody wait for the device."""
        position = peer.cursor[log]
        if position < self._store.first_bases()[log]:
            sentence = f"retention has taken what this replica lacks, from {position} of log {log} on: follow again"
            self._send_away(peer, Refused(Code.FENCED, sentence))
            return None
        if peer.fetched is not None and (peer.fetched[0], peer.fetched[1].position) == (log, position):
            (_, fetched), peer.fetched = peer.fetched, None
            return fetched
        if peer.is_fetching:
            return None
        try:
            found = self._store.read_warm_chunk(log, position, room)
            if found is None:
                peer.is_fetching = True
                fetched_to = partial(self._fetched, peer, log)
                self._store.fetch_chunk(log, position, self.options.chunk_bytes_max, fetched_to)
        except Damaged as damaged:
            self._cannot_read(peer, log, damaged)
            return None
        return found

    def _fetched(self, peer: Peer, log: int, found: copying.SegmentChunk | Damaged | StorageFault) -> None:
        peer.is_fetching = False
        self.tally.fetches += 1
        if self.is_over or self.peers.get(peer.directory) is not peer:
            return
        if isinstance(found, copying.SegmentChunk):
            peer.fetched = (log, found)
            self._pump(peer)
        else:
            self._cannot_read(peer, log, found)

    def _cannot_read(self, peer: Peer, log: int, why: Damaged | StorageFault) -> None:
        self._send_away(peer, Refused(Code.DAMAGED, f"the master cannot read on in log {log}: {why}"))

    def _arm(self, peer: Peer) -> None:
        """One timer: for the oldest credit, for news, or until more may be sent. One that rings early looks again, so
        that a busy replica costs no timers."""
        if self.is_over or not peer.credits or not peer.is_connected:
            return
        due_ns = peer.credits[0].until_ns
        if peer.news_ns is not None:
            due_ns = min(due_ns, peer.news_ns + self.options.news_ms * NS_PER_MS)
        now_ns = self._clock.monotonic_ns()
        if peer.free_ns > now_ns and peer.directory not in self._waited:
            due_ns = min(due_ns, peer.free_ns)
        if peer.timer is not None and peer.timer_ns <= due_ns:
            return
        peer.cancel_timer()
        peer.timer_ns = due_ns
        peer.timer = self._call_later(max(due_ns - now_ns, 0) / NS_PER_S + 0.001, self._on_time, peer)

    def _on_time(self, peer: Peer) -> None:
        peer.timer = None
        if not self.is_over:
            self._pump(peer)

    # --- whose copies count ------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Look at the set, again and again."""
        while not self.is_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.options.check_ms / 1_000):
                    await self._stirred.wait()
            self._stirred.clear()
            try:
                await self._look()
            except (RegistryError, Refused):
                continue  # no answer: `is_certain` sees to it that this does not go on for long

    async def _look(self) -> None:
        if not self.is_certain():
            return
        self._seek_repair()
        await self.living.look(self._clock.monotonic_ns(), self._remembered())
        self._check_peers()
        if self._is_refresh_due and not self.is_over:
            self._is_refresh_due = False
            await self._node.read()
            self._take_in()
        wanted = self._wanted()
        if not self.is_over and wanted != self.record.in_sync:
            await self._change_set(wanted)

    def _wanted(self) -> list[str]:
        """The set as it should be, in the order of the registry's; whoever comes in is waited for from now on."""
        now_ns = self._clock.monotonic_ns()
        kept = [each for each in self.record.in_sync if each == self.me or not self._is_lost(each, now_ns)]
        for directory, peer in self.peers.items():
            is_missing = directory not in self.record.in_sync and self._has_caught_up(peer)
            if is_missing and self._is_registered(peer, now_ns) and not self._is_lost(directory, now_ns):
                self._waited.add(directory)
                peer.caught_up_ns = now_ns
                kept.append(directory)
        return kept

    def _has_caught_up(self, peer: Peer) -> bool:
        return peer.is_connected and peer.confirmed is not None and has(peer.confirmed, self._store.committed_ends())

    def _is_registered(self, peer: Peer, now_ns: int) -> bool:
        """Only a registered copy counts; the leader looks again for the node of one that may have come back."""
        if peer.directory not in self.living:
            self.living.seek(now_ns)
            return False
        return True

    def _is_lost(self, directory: str, now_ns: int) -> bool:
        peer = self.peers.get(directory)
        if peer is None:
            is_late = now_ns - self._began_ns > self.options.lag_ms * NS_PER_MS
            return is_late or (directory not in self.living and self._is_gone_since(self._began_ns, now_ns))
        if not peer.is_connected and directory not in self.living:
            return True
        if not peer.is_connected and self._is_gone_since(peer.heard_ns, now_ns):
            return True
        return now_ns - peer.caught_up_ns > self.options.lag_ms * NS_PER_MS

    def _is_gone_since(self, since_ns: int, now_ns: int) -> bool:
        return now_ns - since_ns > self.options.gone_ms * NS_PER_MS

    async def _change_set(self, wanted: list[str]) -> None:
        """Compare-and-set; until the outcome is known the larger set is waited for."""
        members = self.record.members
        for directory in wanted:
            members = with_member(members, directory)
        with suppress(Refused):  # it has changed nothing: nobody is waited for who does not count
            await self._node.change(msgspec.structs.replace(self.record, in_sync=wanted, members=members))
        self._take_in()
        self._confirm()

    def _take_in(self) -> None:
        """What the node says now."""
        record = self._node.record
        if record is None or record.master != self.me or record.epoch != self.epoch:
            leads = "nobody" if record is None else f"{record.master}, under epoch {record.epoch},"
            self._depose(f"{leads} leads group {self.group} now")
            return
        self.record = record
        self._waited = set(record.in_sync) | {self.me}

    # --- what has rotted here ----------------------------------------------------------------------------------------

    async def mended(self) -> None:
        """Return when no copy in sync could have anything of what has rotted here: it is whole, or never will be."""
        while not self.is_over and self.repairs.is_hopeful(self._others(), self._clock.monotonic_ns()):  # noqa: ASYNC110
            await asyncio.sleep(self.options.check_ms / 1_000)  # time alone may end it

    def hopeless_spans(self) -> int:
        """How many rotten spans nobody in sync can repair."""
        return self.repairs.hopeless(self._others(), self._clock.monotonic_ns())

    def _others(self) -> list[str]:
        return [each for each in self.record.in_sync if each != self.me]

    def _is_awaited(self, position: int) -> bool:
        return self.repairs.hopes_for(position, self._others(), self._clock.monotonic_ns())

    def _seek_repair(self) -> None:
        """Ask for the next span. Once actions were repaired, and nothing more is to be hoped for, the directory has to
        be opened again: the groups are made from them."""
        now_ns = self._clock.monotonic_ns()
        peers = [self.peers[each] for each in self._others() if each in self.peers and self.peers[each].is_connected]
        chosen = self.repairs.choose(peers, now_ns)
        if chosen is not None:
            peer, span = chosen
            peer.wanted = Want(span.log, span.start, span.end - span.start)
            self._pump(peer)
        elif self._store.is_view_stale and not self.repairs.is_hopeful(self._others(), now_ns):
            self._store.checkpoint(self._open_again)  # it says that nothing is rotten any more

    def _open_again(self) -> None:
        self._depose("actions that had rotted were repaired: the directory is opened again")

    def _depose(self, why: str) -> None:
        if not self.is_over:
            self.tally.depositions += 1
            self.close()
            self._on_deposed(why)


def _pair(ends: list[int]) -> tuple[int, int]:
    if len(ends) != len(LOGS):
        raise Refused(Code.BAD_REQUEST, f"{len(ends)} ends: there are two logs")
    return ends[0], ends[1]


def _nothing() -> None:
    """Nobody wants to know."""
