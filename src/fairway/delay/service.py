"""Delay server without a port of its own: the engine, its timer, its sender and its request handler.

`fairway up` runs this service behind the broker's port; `fairway.delay.server` gives it a port of its own. One copy of
several follows first: its engine applies what its master writes, and sends nothing before it leads. At a stop the
request handler takes nothing more, no further message goes out, outstanding answers may arrive, and every message moves
to its bucket. If the store fails, the service answers nothing more, and `failed` returns, so that the process can end.

`DueTimer` calls the engine when its time has come, and sooner when there is a reason to. Requests for a turn while a
turn is due share that turn. After a turn of more than 2 ms, which happens when much is due at once, the timer pauses
for as long as the turn took. In `fairway up` the broker that stores the due messages runs on the same loop. During a
start the timer does not pause, because clients wait for the end of the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fairway.delay.dispatch.sender import DispatchSender
from fairway.delay.engine import DelayOptions, Engine, RecoveredLogs
from fairway.delay.requests import DelayRequestHandler
from fairway.errors import FairwayError, Refused, StorageFault
from fairway.protocol.messages import Produced
from fairway.runtime.clock import Clock
from fairway.runtime.disk import Disk
from fairway.runtime.net import Address, Net
from fairway.runtime.rng import Rng

_LONG_NS = 2_000_000


class DueTimer:
    """Calls `turn` when it is due. `turn` does everything that is due, and returns in how many ms the next turn is due
    at the latest."""

    def __init__(
        self,
        clock: Clock,
        turn: Callable[[], int],
        on_failure: Callable[[Exception], None],
        may_rest: Callable[[], bool] = lambda: True,
    ) -> None:
        self._clock = clock
        self._may_rest = may_rest
        self._turn = turn
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._is_poked = False
        self._is_stopped = False
        self._rested_ns = 0  # no turn before this time

    def poke(self) -> None:
        """Something has happened: take a turn soon."""
        if not self._is_poked and not self._is_stopped:
            self._is_poked = True
            self._next_in(0)

    def stop(self) -> None:
        """Take no further turn."""
        self._is_stopped = True
        self._set(None)

    def _run(self) -> None:
        self._is_poked = False
        self._timer = None
        begun_ns = self._clock.monotonic_ns()
        try:
            wait_ms = self._turn()
        except Exception as error:  # A fault of the store, or a bug: a timer that stops must not go unnoticed.
            self.stop()
            self._on_failure(error)
            if not isinstance(error, FairwayError):
                raise
            return
        now_ns = self._clock.monotonic_ns()
        took_ns = now_ns - begun_ns
        self._rested_ns = now_ns + (took_ns if took_ns > _LONG_NS and self._may_rest() else 0)
        if not self._is_stopped:
            self._next_in(0 if self._is_poked else wait_ms / 1_000)

    def _next_in(self, wait_s: float) -> None:
        rest_s = (self._rested_ns - self._clock.monotonic_ns()) / 1e9
        soon_s = max(wait_s, rest_s)
        self._set(self._loop.call_later(soon_s, self._run) if soon_s > 0 else self._loop.call_soon(self._run))

    def _set(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


HERE = "here"  # the target of a delay server in its broker's process, whatever port that has today
_DRAIN_MS = 5_000


@dataclass(frozen=True, slots=True)
class DelayWorld:
    """The world of a delay server: clock, disks, network, randomness. With a `log_disk`, the message log is there, and
    all else on `disk`."""

    clock: Clock
    disk: Disk
    net: Net
    rng: Rng
    log_disk: Disk | None = None

    def close(self) -> None:
        """Release the directories."""
        self.disk.close()
        if self.log_disk is not None:
            self.log_disk.close()


class Delay:
    """One delay server on one loop: `Delay.open`, then `reach` its brokers, then `stop`. One copy of several: `open`,
    then `lead` when elected."""

    @classmethod
    def open(
        cls,
        world: DelayWorld,
        options: DelayOptions | None = None,
        name: str = "fairway delay",
        recovered: RecoveredLogs | None = None,
    ) -> Delay:
        """Recover what is on disk; raises if the directory is not usable. `name`: how the delay server introduces
        itself. `recovered`: the logs of one copy of several, which does not lead yet."""
        try:
            return cls(world, options, name, recovered)
        except FairwayError:
            world.close()
            raise

    def __init__(
        self, world: DelayWorld, options: DelayOptions | None, name: str, recovered: RecoveredLogs | None = None
    ) -> None:
        options = options or DelayOptions()
        self._world = world
        self._clock = world.clock
        self._untold: list[int] = []  # intents sent whose SENT event had no room in the log
        self._failed = asyncio.Event()
        self._failure: Exception | None = None
        self.due_timer = DueTimer(world.clock, self._turn, self._fail, may_rest=lambda: self.engine.is_loaded)
        self.dispatch_sender = DispatchSender(
            world.net,
            world.clock,
            world.rng,
            name=name,
            has_heartbeat=options.has_heartbeat,
            outstanding_bytes=lambda target: self.engine.outstanding_bytes(target),  # noqa: PLW0108  the engine follows
            on_sent=lambda intent, receipt: self._sent(intent.number, receipt),
            on_room=self.due_timer.poke,
        )
        self.engine = Engine(
            world.log_disk or world.disk,
            world.clock,
            world.rng,
            defer=asyncio.get_running_loop().call_soon,
            route=self.dispatch_sender.route,
            schedule_disk=world.disk if world.log_disk is not None else None,
            options=options,
            on_ready=self.due_timer.poke,
            on_fault=self._fail,
            homes=self.dispatch_sender,
            recovered=recovered,
        )
        self.request_handler = DelayRequestHandler(self.engine, self.dispatch_sender, options.rows_max)
        self.due_timer.poke()

    def reach(self, targets: Mapping[str, Sequence[Address]]) -> None:
        """Connect to the broker groups, by name."""
        self.dispatch_sender.reach(targets)

    def reach_here(self, address: Address) -> None:
        """Connect to the broker of this process, which takes everything."""
        self.dispatch_sender.reach({HERE: [address]})

    def lead(self) -> None:
        """Begin to send what is due. Everything in the logs is committed, and nobody else writes them."""
        self.engine.lead()
        self.due_timer.poke()

    # --- turns -------------------------------------------------------------------------------------------------------

    def _turn(self) -> int:
        """Do everything that is due. Return in how many ms to look again."""
        untold, self._untold = self._untold, []
        for number in untold:
            self._sent(number, None)
        self.dispatch_sender.send(self.engine.on_time())
        return self.engine.wait_ms()

    def _sent(self, number: int, receipt: Produced | None) -> None:
        """Note that an intent is stored. If the log has no room, note it in a later turn: after a crash before that,
        the intent is sent again, and the broker recognises it."""
        try:
            due_ms = self.engine.sent(number)
        except Refused:
            self._untold.append(number)
        except StorageFault:
            return  # reported elsewhere
        else:
            self.request_handler.figures.note_sent(due_ms, receipt, self._clock.wall_ms())

    # --- the end -----------------------------------------------------------------------------------------------------

    def _fail(self, failure: Exception) -> None:
        """Stop everything, because the state of the disk is unknown."""
        self._failure = self._failure or failure
        self.due_timer.stop()
        self.request_handler.close()
        self.dispatch_sender.abort()
        self._failed.set()

    async def failed(self) -> None:
        """Return when the service cannot go on. Then `stop` raises the reason."""
        await self._failed.wait()

    def failure(self) -> FairwayError:
        """The reason why the service cannot go on."""
        if isinstance(self._failure, FairwayError):
            return self._failure
        return self.engine.fault or StorageFault(f"the delay server has failed: {self._failure!r}")

    async def come_to_rest(self, drain_ms: int) -> None:
        """Stop sending; wait for outstanding answers and note what was stored."""
        self.due_timer.stop()
        await self.dispatch_sender.finish(drain_ms)

    def fall_silent(self) -> None:
        """Take no requests, send nothing, note nothing."""
        self.request_handler.close()
        self.due_timer.stop()
        self.dispatch_sender.abort()

    def abandon(self) -> None:
        """Release the directories as they are."""
        self.fall_silent()
        self.engine.abandon()
        self._world.close()

    async def stop(self, drain_ms: int = _DRAIN_MS) -> None:
        """Wait for outstanding answers, move messages to their buckets, release the directories. Raises the failure, if
        any."""
        self.request_handler.close()
        await self.come_to_rest(drain_ms)
        try:
            await self.engine.close()
        finally:
            self._world.close()
            await self.dispatch_sender.close()
        if self._failure is not None:
            raise self._failure
