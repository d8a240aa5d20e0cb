"""What a copy of a group is told, sees of the world, and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from fairway.errors import FairwayError
from fairway.registry.port import Registry
from fairway.replication.follower import FollowerOptions
from fairway.replication.leader import LeaderOptions
from fairway.storage.store import Store
from fairway.world.clock import Clock
from fairway.world.disk import Disk
from fairway.world.job_runner import JobRunner
from fairway.world.net import Net
from fairway.world.rng import Rng
from fairway.world.work_pool import WorkPool


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """What makes a server one copy of several."""

    group: str
    advertise: tuple[str, int] | None = None  # where others reach it; None: where it listens
    min_in_sync: int | None = None  # None: as the group has it
    session_ms: int = 6_000  # as the registry's session was asked for
    look_ms: int = 1_000  # between two looks at the registry, although nothing is heard of it
    beat_ms: int = 2_000  # between two changes of the own node for the sake of its figures
    backoff_ms: int = 50  # before a master is dialed again; doubled up to `look_ms`
    hand_over_ms: int = 5_000  # for everything to be committed, at a stop
    leader: LeaderOptions = field(default_factory=LeaderOptions)
    follower: FollowerOptions = field(default_factory=FollowerOptions)


@dataclass(frozen=True, slots=True)
class CopyRuntime:
    """The world as a copy sees it. The directory may be opened several times, one after another."""

    clock: Clock
    open_disk: Callable[[], Disk]
    net: Net
    rng: Rng
    registry: Registry
    jobs: JobRunner  # the directory is recovered beside the loop
    pool: WorkPool | None = None  # a broker decompresses large batches there; None: its loop does


class ReplicatedServer(Protocol):
    """What a copy runs on its data directory. It listens from the start, and answers as its `Standing` says."""

    @property
    def store(self) -> Store: ...

    @property
    def port(self) -> int: ...

    def on_committed(self) -> None:
        """More may be committed. It is said often, and has to be quick."""

    def begin_life(self) -> None:
        """It leads, and everything in its logs is committed."""

    async def come_to_rest(self) -> None:
        """It hands over: begin nothing more, and let what was begun come to its end."""

    def fall_silent(self) -> None:
        """Accept nobody, take no requests, write nothing of its own accord; what is durable is still answered."""

    def abandon(self) -> None:
        """Not a word more to anybody, let go of the directory as it is."""

    async def stop(self) -> None:
        """Everything is committed: leave a checkpoint, let go."""

    async def failed(self) -> None:
        """Return when it cannot go on."""

    def failure(self) -> FairwayError:
        """Why not."""


ServerT = TypeVar("ServerT", bound=ReplicatedServer)


@dataclass(frozen=True, slots=True)
class Face:
    """Where a server listens, and how it calls itself."""

    host: str
    port: int  # 0: any, until it listens
    http_port: int | None
    name: str
