"""The master's side of replication: what each replica has synced, what is committed, and the in-sync set.

A replica's REPLICATE is a confirmation and a credit. The confirmation moves the committed end: the least end that every
copy of the set *waited for* has synced. The leader answers the credit as soon as it has synced something that the
replica lacks. It answers with the committed ends alone where only those have moved, and with nothing when the credit's
time is up.

One task changes the set in the registry, one compare-and-set at a time:

    a copy that is gone, or lags for too long     removed in the registry first, then waited for no more
    a copy that has caught up                     waited for first, then written into the registry

The leader fetches what is rotten in its own logs from a copy in sync (`repairs`).

When the leader learns that another copy leads, or can no longer be certain that none does, it calls `on_deposed` and
stops at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from fairway import limits
from fairway.batch.identity import checked, copy_verifier_of
from fairway.errors import Code, Refused, StorageFault
from fairway.protocol import Bytes
from fairway.protocol.frames import stretch, stretched
from fairway.protocol.replication_messages import (
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
from fairway.replication import peers
from fairway.replication.leadership import GroupNode, with_member
from fairway.replication.peers import NS_PER_MS, NS_PER_S, Credit, Peer, Repairs, ReplicaQuestion, ReplicationCounters
from fairway.replication.registration import RegisteredCopies
from fairway.runtime.clock import Clock
from fairway.storage import log_copies
from fairway.storage.log import Damaged
from fairway.storage.store import Store

QUESTIONS = (Follow, Compare, Replicate, Mend, Give)  # a union written where it is needed costs 1 µs
_RETRY_AFTER_MS = 500  # for produce below min_in_sync: a replica takes about so long to come back
_UNKNOWN = Refused(Code.FENCED, "this replica is not known here, or under another epoch: follow again")


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """The bounds that a master sets for its replicas."""

    lag_ms: int = 5_000  # the master stops waiting for a replica that has not caught up for so long
    gone_ms: int = 1_000  # and for a replica whose connection is gone for so long
    check_ms: int = 100
    chunk_bytes_max: int = limits.MIB  # of one answer
    wait_ms_max: int = 5_000  # how long a credit waits
    news_ms: int = 20  # until a replica learns of a committed end that no message follows
    catch_up_bytes_per_s: int = 128 * limits.MIB  # to each replica that is not in sync
    repair_ms: int = 2_000  # for a replica to bring what is rotten here
    repair_again_ms: int = 60_000  # how long the master asks a silent copy in sync, and then leaves it alone


class Leader:
    """One master of one group, in one epoch. Lives on the loop of its store."""

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
        """`session`: the registry session whose end lets another copy take over. `living`: the registered copies.
        `tally`: counters of this process, over all epochs."""
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
        self._waited: set[str] = set(record.in_sync) | {self.me}  # only looked up, so its order does not matter
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
        self._store.on_synced = self._store.on_rot = lambda: None
        self._store.messages.is_awaited = lambda _: False
        if self._task is not None:
            self._task.cancel()
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        for peer in self.peers.values():
            peer.drop()

    def refresh(self, living: Mapping[str, RegisteredCopy] | None = None) -> None:
        """Read the registry again soon. `living`: the registered copies, if the caller has just read them."""
        if living is not None:
            self.living.update(living, self._remembered())
            self._check_peers()
        self._is_refresh_due = True
        self._stirred.set()

    # --- calls from the server ---------------------------------------------------------------------------------------

    def certain_until_ns(self) -> int:
        """Until when no other copy can lead; in the past: another copy may lead."""
        registry = self._registry
        return 0 if self.is_over or registry.session_id != self._session else registry.certain_until_ns()

    def is_certain(self) -> bool:
        """Whether no other copy can lead yet. If not, this call deposes the leader."""
        if self.is_over:
            return False
        if self._clock.monotonic_ns() < self.certain_until_ns():
            return True
        self._depose("the registry has not answered for so long that another copy may lead by now")
        return False

    def _watch_lease(self) -> None:
        """Check again when the lease may have ended, so that a master steps down without a request."""
        if self.is_certain():
            rest_ns = self._registry.certain_until_ns() - self._clock.monotonic_ns()
            self._lease_timer = self._call_later(max(rest_ns, NS_PER_MS) / NS_PER_S, self._watch_lease)

    @property
    def in_sync(self) -> list[str]:
        return self.record.in_sync

    def why_read_only(self, *, is_pinned: bool = False) -> str:
        """Why the group takes no messages; empty: it does. `is_pinned`: only batches that it may have already."""
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
        """Whether the group is given up: it takes nothing that might be lost with it."""
        return self.record.is_closed or self.record.is_done

    @property
    def has_enough_copies(self) -> bool:
        return len(self.record.in_sync) >= self.record.min_in_sync

    def check_writable(self, *, is_pinned: bool) -> None:
        """`Refused` where the group takes no batch."""
        why = self.why_read_only(is_pinned=is_pinned)
        if why:
            raise Refused(Code.READ_ONLY, why, retry_after_ms=_RETRY_AFTER_MS)

    # --- requests of replicas ----------------------------------------------------------------------------------------

    def answer(self, request: ReplicaQuestion) -> None:
        """Answer one of `QUESTIONS`; `Refused` where that is impossible."""
        message = request.message
        if isinstance(message, Follow):
            request.respond(self._follow(request, message))
        elif isinstance(message, Compare):
            request.respond(peers.compare(self._store, message))
        elif isinstance(message, Mend):
            mended, data = peers.mend(self._store, message, self.options.chunk_bytes_max)
            request.respond(mended, [stretch(data)])
        elif isinstance(message, Give):
            request.respond(self._given(request, message))
        elif isinstance(message, Replicate):
            self._replicate(request, message)

    def _follow(self, request: ReplicaQuestion, message: Follow) -> Followed:
        if message.group != self.group:
            raise Refused(Code.BAD_REQUEST, f"this is a copy of group {self.group}, not of {message.group}")
        if message.epoch > self.epoch:  # the registry knows whether that is true
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
        return Followed(self.epoch, [peers.extent(self._store, log) for log in peers.LOGS])

    def _check_registered(self, directory: str, verifier: bytes) -> None:
        """Accept only copies of the group: registered copies, and known copies that the registry does not show now.
        Forgets peers that are neither connected nor registered nor known."""
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
        """The copies to remember while they are not registered."""
        return {*self.record.members, *self._waited}

    def _check_peers(self) -> None:
        """Dismiss peers that have shown another secret than the copy's node has now: the copy was restarted, or a
        stranger followed before the node was known here. Such a peer confirms nothing."""
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
        """Take bytes for a rotten span from a replica. The store checks them before it puts them in place."""
        peer = self.known(request, message)
        data = stretched(request.attachments[0]) if request.attachments else b""
        end = self.repairs.take(peer.directory, message, data, self._clock.monotonic_ns())
        self._stirred.set()
        return Given(end)

    def known(self, request: ReplicaQuestion, message: Replicate | Give | TakeSnapshot) -> Peer:
        """The replica that asks; `Refused` where it has to send FOLLOW first, on this connection."""
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
            peer.cursor = [*_pair(message.starts)]
        if not peers.has(own_ends, ends) or not peers.has((peer.cursor[0], peer.cursor[1]), ends):
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
        """Confirm and send: more is synced on the master's own disk."""
        self._confirm()
        for peer in self.peers.values():
            self._pump(peer)

    def _confirm(self) -> None:
        """Move the committed ends to what every copy of the set has. The store knows what it has synced itself."""
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
        """Have replicas learn of new committed ends, although no message may follow."""
        committed = self._store.committed_ends()
        for peer in self.peers.values():
            if peer.news_ns is None and peer.told != committed:
                peer.news_ns = self._clock.monotonic_ns()
                self._arm(peer)

    # --- sending -----------------------------------------------------------------------------------------------------

    def _pump(self, peer: Peer) -> None:
        """Answer the peer's credits while there is something to send."""
        now_ns = self._clock.monotonic_ns()
        while peer.credits and not self.is_over and peer.is_connected:
            chunks, attachments = self._chunks(peer, now_ns)
            if not peer.credits or not (chunks or self._must_answer(peer, now_ns)):
                break
            self._respond(peer, chunks, attachments, now_ns)
        self._arm(peer)

    def _send_away(self, peer: Peer, refused: Refused) -> None:
        """Refuse the peer: it cannot go on from where it is. It has to follow again, and learns what to do."""
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
        """What the peer lacks and the master has synced: messages first, because actions refer to them."""
        chunks: list[Chunk] = []
        attachments: list[Bytes] = []
        if peer.is_sent_away or (peer.directory not in self._waited and now_ns < peer.free_ns):
            return chunks, attachments
        room = self.options.chunk_bytes_max
        ends = self._store.ends()
        for log in peers.LOGS:
            while room > 0 and peer.cursor[log] < ends[log]:
                found = self._read(peer, log, room)
                if found is None:  # a fetch is under way, and what follows waits; or the peer is dismissed
                    return chunks, attachments
                base, position, data = found
                chunks.append(Chunk(log, base, position))
                attachments.append(stretch(data))
                peer.cursor[log] = position + len(data)
                room -= len(data)
        return chunks, attachments

    def _read(self, peer: Peer, log: int, room: int) -> log_copies.SegmentChunk | None:
        """The next chunk for the peer. Fetches what is not in memory, one piece at a time, so that a replica far behind
        does not make the loop wait for the device."""
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

    def _fetched(self, peer: Peer, log: int, found: log_copies.SegmentChunk | Damaged | StorageFault) -> None:
        peer.is_fetching = False
        self.tally.fetches += 1
        if self.is_over or self.peers.get(peer.directory) is not peer:
            return
        if isinstance(found, log_copies.SegmentChunk):
            peer.fetched = (log, found)
            self._pump(peer)
        else:
            self._cannot_read(peer, log, found)

    def _cannot_read(self, peer: Peer, log: int, why: Damaged | StorageFault) -> None:
        self._send_away(peer, Refused(Code.DAMAGED, f"the master cannot read on in log {log}: {why}"))

    def _arm(self, peer: Peer) -> None:
        """Set one timer: for the oldest credit, for news, or until more may be sent. A timer that fires early looks
        again, so that a busy replica costs no timers."""
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

    # --- the in-sync set ---------------------------------------------------------------------------------------------

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
                continue  # no answer: `is_certain` bounds how long this goes on

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
        """The set as it should be, in the order of the registry's. The master waits for a new copy from now on."""
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
        return (
            peer.is_connected and peer.confirmed is not None and peers.has(peer.confirmed, self._store.committed_ends())
        )

    def _is_registered(self, peer: Peer, now_ns: int) -> bool:
        """Whether the copy is registered; only such a copy counts. If not, looks again: the copy may have come back."""
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
        """Change the set by compare-and-set. Until the outcome is known, the master waits for the larger set."""
        members = self.record.members
        for directory in wanted:
            members = with_member(members, directory)
        with suppress(Refused):  # nothing has changed, and the master waits for no copy in vain
            await self._node.change(msgspec.structs.replace(self.record, in_sync=wanted, members=members))
        self._take_in()
        self._confirm()

    def _take_in(self) -> None:
        """Take over what the node says now."""
        record = self._node.record
        if record is None or record.master != self.me or record.epoch != self.epoch:
            leads = "nobody" if record is None else f"{record.master}, under epoch {record.epoch},"
            self._depose(f"{leads} leads group {self.group} now")
            return
        self.record = record
        self._waited = set(record.in_sync) | {self.me}

    # --- repair of the master's logs ---------------------------------------------------------------------------------

    async def mended(self) -> None:
        """Return when no copy in sync could repair anything more: the logs are whole, or stay rotten."""
        while not self.is_over and self.repairs.is_hopeful(self._others(), self._clock.monotonic_ns()):  # noqa: ASYNC110
            await asyncio.sleep(self.options.check_ms / 1_000)  # time alone may end it

    def hopeless_spans(self) -> int:
        """How many rotten spans no copy in sync can repair."""
        return self.repairs.hopeless(self._others(), self._clock.monotonic_ns())

    def _others(self) -> list[str]:
        return [each for each in self.record.in_sync if each != self.me]

    def _is_awaited(self, position: int) -> bool:
        return self.repairs.hopes_for(position, self._others(), self._clock.monotonic_ns())

    def _seek_repair(self) -> None:
        """Ask for the next span. After a repair of actions, once no other repair is possible, open the directory again:
        the groups are rebuilt from the actions."""
        now_ns = self._clock.monotonic_ns()
        others = [self.peers[each] for each in self._others() if each in self.peers]
        chosen = self.repairs.choose([each for each in others if each.is_connected], now_ns)
        if chosen is not None:
            peer, span = chosen
            peer.wanted = Want(span.log, span.start, span.end - span.start)
            self._pump(peer)
        elif self._store.is_view_stale and not self.repairs.is_hopeful(self._others(), now_ns):
            self._store.checkpoint(self._open_again)  # the checkpoint says that nothing is rotten any more

    def _open_again(self) -> None:
        self._depose("actions that had rotted were repaired: the directory is opened again")

    def _depose(self, why: str) -> None:
        if not self.is_over:
            self.tally.depositions += 1
            self.close()
            self._on_deposed(why)


def _pair(ends: list[int]) -> tuple[int, int]:
    if len(ends) != len(peers.LOGS):
        raise Refused(Code.BAD_REQUEST, f"{len(ends)} ends: there are two logs")
    return ends[0], ends[1]
