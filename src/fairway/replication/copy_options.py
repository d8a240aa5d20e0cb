"""The options of a copy, its runtime, and the port of the server that the copy runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from fairway.errors import FairwayError
from fairway.registry.port import Registry
from fairway.replication.follower import FollowerOptions
from fairway.replication.leader import LeaderOptions
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


class ReplicatedServer(Protocol):
    """The server that a copy runs on its data directory. It listens from the start, and answers as its `CopyStatus`
    allows."""

    @property
    def store(self) -> Store: ...

    @property
    def port(self) -> int: ...

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
