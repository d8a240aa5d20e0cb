"""What a consumer of several broker groups has in the place of a link: threads wait here for any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fairway.client.client_log import ClientLog
from fairway.client.herd import ClusterConsumer
from fairway.errors import Misuse
from fairway.protocol.consumption import ConsumerOptions
from fairway.world.clock import Clock
from fairway.world.hub import Hub
from fairway.world.rng import Rng

if TYPE_CHECKING:
    from fairway.client.sync_way import SyncServerConnection


class ConsumerLink:
    """The part of `world.link.Link` that consumers use."""

    def __init__(
        self, options: ConsumerOptions, meta: SyncServerConnection, clock: Clock, rng: Rng, log: ClientLog | None
    ) -> None:
        self._hub = Hub(clock)
        self._meta = meta
        self.lock = self._hub.lock
        self.announce = self._hub.announce
        self.herd: ClusterConsumer[SyncServerConnection] = ClusterConsumer(
            options, clock, rng, self.lock, self.announce, log
        )

    @property
    def is_orphan(self) -> bool:
        return self._meta.link.is_orphan

    def check(self) -> None:
        """Raise if nothing will ever come from some of them."""
        self._meta.link.check()
        for link in self.herd.links:
            link.check()

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        if any(link.in_reader for link in (self._meta.link, *self.herd.links)):
            raise Misuse("a callback runs in the thread that reads: it must not wait for what that thread brings")
        return self._hub.wait(is_ready, self.check, timeout_s)

    def pump(self) -> None:
        for link in self.herd.links:
            link.pump()
