"""One copy of a group, as its server sees it: options, the port of the server, what the copy may answer, metrics.

A master answers everything. A replica answers requests that only read. While a copy takes over or hands over, it
answers requests that only read, and those of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from fairway.errors import Code, FairwayError, Refused
from fairway.protocol import ControlMessage
from fairway.protocol.messages import Produce
from fairway.registry.port import Registry
from fairway.replication.follower import FollowerOptions
from fairway.replication.leader import QUESTIONS, Leader, LeaderOptions
from fairway.replication.peers import NS_PER_MS, ReplicaQuestion, ReplicationCounters
from fairway.runtime.clock import Clock
from fairway.runtime.disk import Disk
from fairway.runtime.net import Net
from fairway.runtime.rng import Rng
from fairway.runtime.threads import JobRunner, WorkPool
from fairway.storage.store import Store


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """The options that make a server one copy of several."""

    group: str
    advertise: tuple[str, int] | None = None  # where others reach it; None: where it listens
    min_in_sync: int | None = None  # None: as the group's node says
    session_ms: int = 6_000  # as requested from the registry
    look_ms: int = 1_000  # between two looks at the registry without news
    beat_ms: int = 2_000  # between two changes of its own node for new figures
    backoff_ms: int = 50  # before it dials a master again; doubled up to `look_ms`
    hand_over_ms: int = 5_000  # at a stop, for everything to be committed
    leader: LeaderOptions = field(default_factory=LeaderOptions)
    follower: FollowerOptions = field(default_factory=FollowerOptions)


@dataclass(frozen=True, slots=True)
class CopyRuntime:
    """The clock, disks, net and registry that a copy uses. It may open the directory several times, one after
    another."""

    clock: Clock
    open_disk: Callable[[], Disk]
    net: Net
    rng: Rng
    registry: Registry
    jobs: JobRunner  # recovers the directory beside the loop
    pool: WorkPool | None = None  # a broker decompresses large batches there; None: its loop does


PagesByPath: TypeAlias = Mapping[str, Callable[[], Any]]  # for probes, by path


class ProbePort(Protocol):
    """The port for probes. The port belongs to the copy: it answers also while the copy has no server."""

    @property
    def pages(self) -> PagesByPath: ...

    async def listen(self, host: str, port: int | None) -> int | None:
        """Listen, and return the port; None: the operator wants no probes."""

    def opened(self, pages: PagesByPath) -> None:
        """Show the pages of the server that has opened the directory."""

    def closed(self) -> None:
        """Show the last known figures: the server has let go of the directory."""

    def close(self) -> None: ...


class ReplicatedServer(Protocol):
    """The server that a copy runs on its data directory. It listens from the start, and answers as its `CopyStatus`
    allows."""

    @property
    def store(self) -> Store: ...

    @property
    def port(self) -> int: ...

    @property
    def pages(self) -> PagesByPath: ...

    def on_committed(self) -> None:
        """Note that more may be committed. Called often, so it has to be quick."""

    def begin_life(self) -> None:
        """Start to serve: this copy leads, and everything in its logs is committed."""

    async def come_to_rest(self) -> None:
        """Begin nothing more, and finish what was begun: this copy hands over."""

    def fall_silent(self) -> None:
        """Accept no connections, take no requests, write nothing of its own. The server still answers what is
        durable."""

    def abandon(self) -> None:
        """Answer nothing more, and let go of the directory as it is."""

    async def stop(self) -> None:
        """Write a checkpoint and let go of the directory: everything is committed."""

    async def failed(self) -> None:
        """Return when the server cannot go on."""

    def failure(self) -> FairwayError:
        """The reason."""


ServerT = TypeVar("ServerT", bound=ReplicatedServer)


@dataclass(frozen=True, slots=True)
class Face:
    """Where a server listens, and its name."""

    host: str
    port: int  # 0: any, until it listens
    http_port: int | None
    name: str


_RETRY_AFTER_MS = 100  # about the time of a change of masters, where the old master hands over
_FOR_EVER_MS = 86_400_000  # a registry in the same process: its sessions end with the process


class CopyStatus:
    """The status of one copy. Its `CopyLifecycle` changes it."""

    def __init__(
        self,
        group: str,
        reads: tuple[type[ControlMessage], ...],
        questions: tuple[type[ControlMessage], ...] = QUESTIONS,
    ) -> None:
        """`reads`: requests that a replica answers, too. `questions`: requests of replicas. (A union written where it
        is needed costs 1 µs.)"""
        self.group = group
        self.leader: Leader | None = None
        self.is_open = False  # as a master, to all clients
        self.is_leaving = False  # it hands over
        self.master = ""  # HOST:PORT of the master, if that is another copy
        self.why = "it is starting"  # why no copy leads, as far as this copy knows
        self.tally = ReplicationCounters()
        self._reads = reads
        self._questions = questions

    @property
    def is_master(self) -> bool:
        return self.leader is not None and self.is_open

    def leads_ms(self, since_ns: int) -> int | None:
        """For how long after that moment no other copy can lead; None: without limit."""
        until_ns = 0 if self.leader is None else self.leader.certain_until_ns()
        leads_ms = max(until_ns - since_ns, 0) // NS_PER_MS
        return leads_ms if leads_ms < _FOR_EVER_MS else None

    def admit(self, message: ControlMessage) -> Leader | None:
        """`Refused` if this copy cannot answer the request; the leader if the request is one of a replica; None
        otherwise."""
        leader = self.leader
        is_question = isinstance(message, self._questions)
        if leader is None or not leader.is_certain():
            if not is_question and isinstance(message, self._reads):
                return None
            raise self._not_master()
        if is_question:
            return leader
        if not self.is_open:
            if isinstance(message, self._reads):
                return None
            what = "hands over to another" if self.is_leaving else "is about to lead"
            raise Refused(Code.NOT_MASTER, f"this copy of group {self.group} {what}", retry_after_ms=_RETRY_AFTER_MS)
        if isinstance(message, Produce):
            leader.check_writable(is_pinned=message.is_pinned)
        return None

    def _not_master(self) -> Refused:
        if self.master:
            sentence = f"this is a replica of group {self.group}: its master is at {self.master}"
        else:
            sentence = f"this copy of group {self.group} does not lead, and knows nobody who does: {self.why}"
        return Refused(Code.NOT_MASTER, sentence, retry_after_ms=_RETRY_AFTER_MS)


class ReplicaRequestHandler(Protocol):
    """Answers the requests of replicas."""

    def answer(self, question: ReplicaQuestion, /) -> None: ...


def answer(who: ReplicaRequestHandler, question: ReplicaQuestion) -> None:
    """Answer a replica's request at once, outside of any actor: the master's clients wait for the replica."""
    try:
        who.answer(question)
    except FairwayError:
        question.end()
        raise


_MASTER, _FOLLOWER, _WAITING = "master", "follower", "waiting"
_ROLES = (_MASTER, _FOLLOWER, _WAITING)


Samples: TypeAlias = list[tuple[Mapping[str, str], float]]  # labels and values


class Family(NamedTuple):
    """One metric with all its series."""

    name: str
    kind: str
    about: str
    samples: Samples


def families(copy_status: CopyStatus, store: Store) -> list[Family]:
    """The metrics of one copy now."""
    leader, tally = copy_status.leader, copy_status.tally
    role = _MASTER if leader is not None else (_FOLLOWER if copy_status.master else _WAITING)
    epoch, in_sync, least, unmended = store.epoch, 0, 0, len(store.rotten)
    read_only: Samples = []
    lags: Samples = []
    counting: Samples = []
    if leader is not None:
        epoch, in_sync, least = leader.epoch, len(leader.in_sync), leader.record.min_in_sync
        unmended = leader.hopeless_spans()
        reasons = {
            "draining": leader.record.is_draining,
            "given_up": leader.is_closed,
            "min_in_sync": not leader.has_enough_copies,
        }
        read_only = [({"why": why}, is_so) for why, is_so in reasons.items()]
        ends = store.ends()
        lags = [({"copy": each.directory}, each.lag_bytes(ends)) for each in leader.peers.values() if each.is_connected]
        counting = [({"copy": each}, each in leader.in_sync) for each in leader.record.members if each != leader.me]
    return [
        Family("copy_role", "gauge", "What this copy does.", [({"role": each}, each == role) for each in _ROLES]),
        _one("copy_is_open", "gauge", "1: it leads, and serves clients.", copy_status.is_master),
        _one("copy_epoch", "gauge", "Under which it leads, or the last one it has seen.", epoch),
        _one("copies_in_sync", "gauge", "Copies that count, this one included; 0: it does not lead.", in_sync),
        _one("copies_in_sync_min", "gauge", "The least for new messages; 0: it does not lead.", least),
        Family("copy_read_only", "gauge", "1: it leads, and takes no messages: why.", read_only),
        Family("replica_lag_bytes", "gauge", "What a replica that follows has not synced.", lags),
        Family("replica_in_sync", "gauge", "Whether it counts.", counting),
        _one("reigns_total", "counter", "How often this process came to lead.", tally.reigns),
        _one("depositions_total", "counter", "How often it ceased to without being told to stop.", tally.depositions),
        _one("follows_refused_total", "counter", "FOLLOWs of no copy, or without its secret.", tally.refused_follows),
        _one("catch_up_bytes_total", "counter", "Sent to replicas that were not in sync.", tally.catch_up_bytes),
        _one("catch_up_fetches_total", "counter", "Reads for replicas that missed the page cache.", tally.fetches),
        _one("mended_spans_total", "counter", "Rotten spans repaired from another copy.", tally.mended_spans),
        _one("mended_bytes_total", "counter", "Bytes of them.", tally.mended_bytes),
        _one("unmended_spans", "gauge", "Rotten spans that no copy in sync can repair.", unmended),
    ]


def _one(name: str, kind: str, about: str, value: float) -> Family:
    return Family(name, kind, about, [({}, value)])
