"""A delay server without a port of its own: the engine, its clockwork, its courier, and the desk that requests come to.

`fairway up` puts it behind the broker's port; `server` gives it one of its own. As one copy of several (`member`) it
follows first: its engine takes in what its master writes, and sends nothing before it leads. Stopping: the desk takes
nothing more, no further message goes out, what is on its way may arrive, and everything is put where it belongs. A
store that fails is another matter: nothing more is said, and `failed` returns, so that the process can end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fairway.delay.clockwork import DueTimer
from fairway.delay.courier import DispatchSender
from fairway.delay.desk import DelayRequestHandler
from fairway.delay.dispatching import Intent, Redirected
from fairway.delay.engine import Engine, RecoveredLogs
from fairway.delay.metrics import Figures
from fairway.delay.options import DelayOptions
from fairway.errors import FairwayError, Refused, StorageFault
from fairway.names import Subject
from fairway.protocol.delaying import TransitReport
from fairway.protocol.messages import Produced
from fairway.world.clock import Clock
from fairway.world.dialing import Address
from fairway.world.disk import Disk
from fairway.world.net import Net
from fairway.world.rng import Rng

HERE = "here"  # the target of a delay server that shares a process with its broker, whatever port that has today
_DRAIN_MS = 5_000


@dataclass(frozen=True, slots=True)
class DelayWorld:
    """The world as a delay server sees it. With a `log_disk`, its message log is there, and all else on `disk`."""

    clock: Clock
    disk: Disk
    net: Net
    rng: Rng
    log_disk: Disk | None = None

    def close(self) -> None:
        """Let go of the directories."""
        self.disk.close()
        if self.log_disk is not None:
            self.log_disk.close()


class Delay:
    """One delay server on one loop: `Delay.open`, then `reach` its brokers, then `stop`. A copy: `follow`, and `lead`
    when it is its turn."""

    @classmethod
    def open(cls, world: DelayWorld, options: DelayOptions | None = None, name: str = "fairway delay") -> Delay:
        """Recover what is there; raises where it is not ours. `name`: what brokers are told."""
        return cls._open(world, options, name, Engine)

    @classmethod
    def follow(cls, world: DelayWorld, options: DelayOptions, name: str, recovered: RecoveredLogs) -> Delay:
        """As one copy of several, which does not lead. `recovered`: its logs."""
        return cls._open(world, options, name, partial(Engine, follows=True, recovered=recovered))

    @classmethod
    def _open(cls, world: DelayWorld, options: DelayOptions | None, name: str, make: Callable[..., Engine]) -> Delay:
        try:
            return cls(world, options, name, make)
        except FairwayError:
            world.close()
            raise

    def __init__(
        self, world: DelayWorld, options: DelayOptions | None, name: str, make: Callable[..., Engine] = Engine
    ) -> None:
        loop = asyncio.get_running_loop()
        self._world = world
        self._clock = world.clock
        self._untold: list[int] = []  # intents that are sent, and the log had no room to say so
        self._failed = asyncio.Event()
        self._failure: Exception | None = None
        self.clockwork = DueTimer(world.clock, self._turn, self._fail, may_rest=lambda: self.engine.is_loaded)
        self.courier = DispatchSender(
            world.net,
            world.clock,
            world.rng,
            name=name,
            has_heartbeat=options is None or options.has_heartbeat,
            outstanding_bytes=self._outstanding_bytes,
            on_sent=self._sent,
            on_room=self.clockwork.poke,
        )
        self.engine = make(
            world.log_disk or world.disk,
            world.clock,
            world.rng,
            defer=loop.call_soon,
            route=self._route,
            schedule_disk=world.disk if world.log_disk is not None else None,
            options=options,
            on_ready=self.clockwork.poke,
            homes=self.courier,
        )
        self.engine.on_fault = self._fail
        self.figures = Figures(self.engine, self.courier)
        self.desk = DelayRequestHandler(self.engine, self.figures, self, (options or DelayOptions()).rows_max)
        self.clockwork.poke()

    def reach(self, targets: Mapping[str, Sequence[Address]]) -> None:
        """Where the broker groups are, by name."""
        self.courier.reach(targets)

    def reach_here(self, address: Address) -> None:
        """The broker of this very process, which takes everything."""
        self.courier.reach({HERE: [address]})

    def _route(self, subject: Subject) -> str | None:
        return self.courier.route(subject)

    def _outstanding_bytes(self, target: str) -> int:
        return self.engine.outstanding_bytes(target)

    def lead(self) -> None:
        """Everything in the logs is committed, and nobody else writes them: send what is due from now on."""
        self.engine.lead()
        self.clockwork.poke()

    # --- on their way ------------------------------------------------------------------------------------------------

    def in_transit(self) -> list[TransitReport]:
        """Messages of batches that were made for a broker group and are not known to be there, by group."""
        found = sorted(self.engine.in_transit().items())
        return [TransitReport(name, messages, self.courier.is_reached(name)) for name, messages in found]

    def resend(self, group: str) -> Redirected:
        """Send what waits for a broker group to others."""
        is_reached = self.courier.is_reached(group)
        redirected = self.engine.redirect(group, is_reached=is_reached)
        if not is_reached:
            kept = [each for each in self.courier.withdraw(group) if each.number not in redirected.numbers]
            self.courier.send(kept)
        return redirected

    # --- what time does ----------------------------------------------------------------------------------------------

    def _turn(self) -> int:
        """What is to be done by now; in how many ms to look again."""
        untold, self._untold = self._untold, []
        for number in untold:
            self._note(number, None)
        self.courier.send(self.engine.on_time())
        return self.engine.wait_ms()

    def _sent(self, intent: Intent, receipt: Produced | None) -> None:
        self._note(intent.number, receipt)

    def _note(self, number: int, receipt: Produced | None) -> None:
        """That an intent is sent. Without room for the note it is made later: until then the intent would be sent again
        after a crash, and recognised."""
        try:
            due_ms = self.engine.sent(number)
        except Refused:
            self._untold.append(number)
        except StorageFault:
            return  # which has been reported
        else:
            self.figures.note_sent(due_ms, receipt, self._clock.wall_ms())

    # --- the end -----------------------------------------------------------------------------------------------------

    def _fail(self, failure: Exception) -> None:
        """Not a word more: what is on disk is unknown."""
        self._failure = self._failure or failure
        self.clockwork.stop()
        self.desk.close()
        self.courier.abort()
        self._failed.set()

    async def failed(self) -> None:
        """Return when it cannot go on: then `stop` raises what happened."""
        await self._failed.wait()

    def failure(self) -> FairwayError:
        """What that is."""
        if isinstance(self._failure, FairwayError):
            return self._failure
        return self.engine.fault or StorageFault(f"the delay server has failed: {self._failure!r}")

    async def come_to_rest(self, drain_ms: int) -> None:
        """No further message goes out; what is on its way may arrive, and is noted as sent."""
        self.clockwork.stop()
        await self.courier.finish(drain_ms)

    def fall_silent(self) -> None:
        """Take nothing, send nothing, note nothing."""
        self.desk.close()
        self.clockwork.stop()
        self.courier.abort()

    def abandon(self) -> None:
        """Let go of the directories as they are."""
        self.fall_silent()
        self.engine.abandon()
        self._world.close()

    async def stop(self, drain_ms: int = _DRAIN_MS) -> None:
        """Let what is on its way arrive, put everything where it belongs, let go. Raises what ended it, if that did."""
        self.desk.close()
        await self.come_to_rest(drain_ms)
        try:
            await self.engine.close()
        finally:
            self._world.close()
            await self.courier.close()
        if self._failure is not None:
            raise self._failure
