"""The operator: redrives dead letters, moves cursors, pauses and resumes. One command at a time, each said again until
it is answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from fairway.errors import Code, Refused
from fairway.protocol import ConnectionOptions, ControlMessage
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Lever, Redrive, Redriven, Seek, Sought, Switch, Switched
from tests.simulation.broker_clients import PASSING, Ended, Link, Mood, Scene
from tests.simulation.broker_truth import Owner, Promise, Truth
from tests.support.client import AnswerT

NAME = "operator"
NOWHERE = 1 << 60  # a sequence that no subject reaches
ABSENT = frozenset({Code.NO_SUCH_GROUP, Code.NO_SUCH_SUBJECT})


class Operator:
    """Commands the groups that share their messages."""

    pace_ms = 500  # between commands, at most

    def __init__(
        self,
        scene: Scene,
        truth: Truth,
        mood: Mood,
        owners: Sequence[Owner],
        *,
        redrives: bool,
        steers: bool,
        name: str = NAME,
        options: ConnectionOptions | None = None,
    ) -> None:
        self._scene = scene
        self._rng = scene.rng.child(name)
        self._truth = truth
        self._mood = mood
        self._owners = owners
        self._commands = [self._redrive] * redrives + [self._seek, self._pause] * steers
        self._link = Link(scene, scene.net(name), self._rng.child("link"), truth, options)
        self.is_done = not self._commands
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        while not self._mood.is_calm and self._commands:
            await asyncio.sleep(self._rng.below(self.pace_ms) / 1_000)
            owner = self._owners[self._rng.below(len(self._owners))]
            if owner.handed:  # it is known to exist
                await self._commands[self._rng.below(len(self._commands))](owner)
        self.is_done = True

    def hang_up(self) -> None:
        self._link.drop()

    async def redrive_all(self) -> int:
        """In the end, everything: how much that was."""
        return sum([await self._redrive(owner) for owner in self._owners if owner.handed])

    async def _redrive(self, owner: Owner) -> int:
        rate = (0, 0, 40)[self._rng.below(3)]
        redriven = await self._command(Redrive(owner.subject, owner.group, None, rate), Redriven)
        self.done["redriven"] += redriven.count if redriven is not None else 0
        return redriven.count if redriven is not None else 0

    async def _seek(self, owner: Owner) -> int:
        known_end = max(owner.handed) + 1
        to = self._rng.below(known_end + 3)
        if to > known_end:
            return await self._seek_beyond(owner)
        self._truth.note_seeking(owner, to)
        sought = await self._command(Seek(owner.subject, owner.group, m.Whence.SEQUENCE, to), Sought)
        if sought is not None:
            self._truth.note_sought(owner, to, self._scene.clock.monotonic_ns())
            self.done["seek"] += 1
        return 0

    async def _seek_beyond(self, owner: Owner) -> int:
        """The end of the subject: it is refused, and nothing has happened."""
        message = Seek(owner.subject, owner.group, m.Whence.SEQUENCE, NOWHERE)
        sought = await self._command(message, Sought, is_futile=True)
        if sought is not None:
            self._truth.blame(Promise.BROKE, f"{message}: {sought}, and there is nothing")
        return 0

    async def _pause(self, owner: Owner) -> int:
        holders = sorted({each.holder.name for each in owner.handed.values()})
        consumer = "" if self._rng.below(2) else holders[self._rng.below(len(holders))]
        lever = Lever.PAUSE_CONSUMER if consumer else Lever.PAUSE_GROUP
        if await self._command(Switch(lever, True, owner.subject, owner.group, consumer), Switched) is not None:
            self._truth.note_paused(owner, consumer, self._scene.clock.monotonic_ns())
            self.done["pause"] += 1
            await asyncio.sleep(self._rng.below(600) / 1_000)
        self._truth.note_resuming(owner, consumer)
        await self._command(Switch(lever, False, owner.subject, owner.group, consumer), Switched)
        return 0

    async def _command(
        self,
        message: ControlMessage,
        answer: type[AnswerT],
        attachments: Sequence[bytes] = (),
        *,
        is_futile: bool = False,
    ) -> AnswerT | None:
        """None: there is nobody to command, or something is wrong and was said to be; or it is refused, as is right for
        what `is_futile`."""
        while not self._truth.is_refuted:
            try:
                client, _ = await self._link.connected()
                asking = client.ask(message, answer, attachments)
                (told, _), _ = await self._link.ask(type(message).__name__, asking, is_futile=is_futile)
            except Ended:
                await asyncio.sleep((5 + self._rng.below(60)) / 1_000)
            except Refused as refused:
                if is_futile and refused.code is Code.BAD_REQUEST:
                    return None
                if refused.code not in PASSING:
                    self._truth.blame(Promise.BROKE, f"{message}: {refused}")
                    return None
                if refused.code is Code.DRAINING:
                    self._link.drop()
                await asyncio.sleep((20 + self._rng.below(60)) / 1_000)
            else:
                self._scene.note(f"{message}: {told}")
                return told
        return None
