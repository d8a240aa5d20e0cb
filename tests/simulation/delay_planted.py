"""Bugs that copies of a delay server might have, one at a time, to show that the campaign would find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from fairway.delay.dispatch.dispatcher import Intent
from fairway.delay.engine import Engine
from fairway.delay.recovery import Recovery
from fairway.delay.replica import DelayReplica
from fairway.delay.schedule import bucket_file, manifest
from fairway.delay.snapshot import OpenSnapshot
from fairway.runtime.disk import Disk
from tests.simulation.broker_truth import Promise
from tests.simulation.planted import swapped


@dataclass(frozen=True)
class Bug:
    """How to plant it, which promise must find it, and in which histories."""

    sentence: str
    plant: Callable[[], AbstractContextManager[None]]
    caught_by: frozenset[Promise]
    seeds: tuple[int, ...]


def send_what_is_not_committed() -> AbstractContextManager[None]:
    def intended(self: Engine, intent: Intent, _end: int) -> None:
        self._ready.append(intent)
        self._on_ready()

    return swapped(Engine, "_intended", intended)


def forget_decisions() -> AbstractContextManager[None]:
    def begin(self: DelayReplica) -> None:
        self._journal.heard = []

    return swapped(DelayReplica, "_begin", begin)


@contextmanager
def leave_intents_alone() -> Iterator[None]:
    def remake(_self: Recovery, _is_quiet: bool) -> list[Intent]:
        return []

    def is_remade(self: Recovery) -> bool:
        return self._is_leading

    with swapped(Recovery, "_remake", remake), swapped(Recovery, "is_remade", property(is_remade)):
        yield


def a_snapshot_of_an_older_manifest() -> AbstractContextManager[None]:
    """Buckets end where the manifest says, and what was put into them since is in no log."""

    def add_buckets(self: OpenSnapshot, _engine: Engine, disk: Disk) -> None:
        listing = self._add(disk, manifest.NAME)
        for each in manifest.unpack(listing.read(0, listing.size)).buckets:
            self._add(disk, bucket_file.file_name(each.number), each.synced_end)

    return swapped(OpenSnapshot, "_add_buckets", add_buckets)


BUGS = {
    "send-what-is-not-committed": Bug(
        "an intent is handed out before other copies have it",
        send_what_is_not_committed,
        frozenset({Promise.REPEATED, Promise.RISEN}),
        (5, 7),
    ),
    "forget-decisions": Bug(
        "a copy does not bring to its rows what its master has decided",
        forget_decisions,
        frozenset({Promise.RISEN, Promise.REPEATED}),
        (0, 1),
    ),
    "leave-intents-alone": Bug(
        "a new master does not make intents again that were not noted as sent",
        leave_intents_alone,
        frozenset({Promise.LOST}),
        (0, 3),
    ),
    "a-snapshot-of-an-older-manifest": Bug(
        "buckets in a snapshot end where the manifest on disk says",
        a_snapshot_of_an_older_manifest,
        frozenset({Promise.LOST}),
        (0, 2),
    ),
}
