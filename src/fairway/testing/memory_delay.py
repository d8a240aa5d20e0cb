"""The delay server of a broker in memory: the one that `fairway up` runs, from the first delayed message on.

A test that sends none pays for none: a delay server looks after its files every minute, and a year in a test has half a
million of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairway.client.url import BrokerAddress
from fairway.delay.options import DelayOptions
from fairway.delay.service import Delay, DelayWorld

if TYPE_CHECKING:
    from fairway.scheduling import Actor, Expiry, TurnResult
    from fairway.serving.delaying import DelayRequest
    from fairway.serving.exposition import MetricsText
from fairway.serving.memory import MemoryAccount


class MemoryDelay:
    """A delay desk for one life of a broker."""

    def __init__(
        self, world: DelayWorld, broker: BrokerAddress, options: DelayOptions | None, *, is_needed: bool
    ) -> None:
        """`is_needed`: there was one in the life before."""
        self._world = world
        self._broker = broker
        self._options = options
        self._delay: Delay | None = None
        if is_needed:
            self._started()

    @property
    def is_started(self) -> bool:
        return self._delay is not None

    def _started(self) -> Delay:
        if self._delay is None:
            self._delay = Delay.open(self._world, self._options, name="fairway in memory")
            self._delay.reach_here(self._broker)
        return self._delay

    # --- the desk ----------------------------------------------------------------------------------------------------

    def process(self, request: DelayRequest, actor: Actor) -> TurnResult:
        return self._started().desk.process(request, actor)

    def expire(self, request: DelayRequest, expiry: Expiry) -> None:
        request.expire(expiry)

    def fail(self, request: DelayRequest, error: Exception) -> None:
        request.fail(error)

    def show(self, out: MetricsText) -> None:
        if self._delay is not None:
            self._delay.desk.show(out)

    def memory_accounts(self) -> list[MemoryAccount]:
        return [] if self._delay is None else self._delay.desk.memory_accounts()

    @property
    def damaged(self) -> int:
        return 0 if self._delay is None else self._delay.desk.damaged

    # --- the end -----------------------------------------------------------------------------------------------------

    def poke(self) -> None:
        """The clock was set: look at it."""
        if self._delay is not None:
            self._delay.clockwork.poke()

    async def stop(self) -> None:
        if self._delay is not None:
            await self._delay.stop()

    def die(self) -> None:
        """What `kill -9` leaves: not a word more."""
        if self._delay is not None:
            self._delay.clockwork.stop()
            self._delay.desk.close()
            self._delay.courier.abort()
