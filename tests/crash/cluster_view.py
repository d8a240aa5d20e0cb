"""The state of one broker group in the registry while a campaign runs, read over a connection that no fault touches."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from fairway.registry.layout import (
    GroupRecord,
    RegisteredCopy,
    by_directory,
    group_path,
    member_path,
    members_path,
    unpack,
)

POLL_S = 0.025
PAUSE_S = 1.0  # between two looks that are to be 25 ms apart: the machine did nothing, or something else
ANSWER_S = 2.0
LATE_NS = 500_000_000  # a server of ZooKeeper may not have heard yet what is so


class Change(NamedTuple):
    """Another epoch. It began after `after_ns`, when the one before was still seen."""

    epoch: int
    after_ns: int
    seen_ns: int


@dataclass
class Pause:
    """Of the whole machine: what is measured meanwhile says nothing."""

    began_ns: int
    ended_ns: int


class View:
    """Looks at the group's node all the time, in a thread of its own."""

    def __init__(self, hosts: str, group: str) -> None:
        logging.getLogger("kazoo").setLevel(logging.CRITICAL)  # connections that break are what this is about
        self.record: GroupRecord | None = None
        self.changes: list[Change] = []
        self.history: list[tuple[int, GroupRecord]] = []  # everything that the node has said, and since when
        self.pauses: list[Pause] = []
        self._group = group
        self._client = KazooClient(hosts=hosts, timeout=6.0)
        self._client.start(timeout=60)
        self._seen_ns = time.monotonic_ns()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        with contextlib.suppress(KazooException, KazooTimeoutError):
            self._client.stop()
            self._client.close()

    @property
    def epoch(self) -> int:
        return 0 if self.record is None else self.record.epoch

    def members(self) -> dict[str, RegisteredCopy]:
        """Who lives, by directory; nobody where ZooKeeper does not answer."""
        try:
            names = self._client.get_children_async(members_path(self._group)).get(timeout=ANSWER_S)
            found = []
            for name in names:
                path = member_path(self._group, name)
                with contextlib.suppress(NoNodeError):
                    value, _ = self._client.get_async(path).get(timeout=ANSWER_S)
                    found.append(unpack(RegisteredCopy, path, value))
        except (KazooException, KazooTimeoutError):
            return {}
        return by_directory(found)

    def _look_on(self) -> None:
        while not self._is_over.is_set():
            self._look()
            began_ns = time.monotonic_ns()
            self._is_over.wait(POLL_S)
            ended_ns = time.monotonic_ns()
            if ended_ns - began_ns > PAUSE_S * 1e9:
                self.pauses.append(Pause(began_ns, ended_ns))

    def _look(self) -> None:
        path = group_path(self._group)
        asked_ns = time.monotonic_ns()
        try:
            value, _ = self._client.get_async(path).get(timeout=ANSWER_S)
        except (KazooException, KazooTimeoutError):
            return
        record = unpack(GroupRecord, path, value) if value else None
        if record is None or record.epoch < self.epoch:
            return  # nothing yet; or from a server that lags behind the one that was asked before
        if record.epoch > self.epoch:
            self.changes.append(Change(record.epoch, self._seen_ns - LATE_NS, time.monotonic_ns()))
        if record != self.record:
            self.history.append((time.monotonic_ns(), record))
        self.record = record
        self._seen_ns = asked_ns
