"""Consumer groups that are switched off for all brokers (`fairway subject pause`): the switch is in the registry.

Clients are told by their meta server, within a moment, and stop pulling by themselves. What a broker does is for those
who do not ask one: it looks at the nodes of the subjects that somebody pulls from, one after another, and hands nothing
out to a group that is off. No watches: they would be one open question for each subject at a meta server, and a switch
is turned a few times a year. One read at a time, a subject every `EVERY_S` at most; so with N subjects a switch is seen
after about N times `PAUSE_S`. Until a subject was looked at for the first time its groups are on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from fairway.errors import FairwayError
from fairway.names import Group, Subject
from fairway.registry.layout import SubjectRecord, subject_path, unpack
from fairway.registry.port import Registry
from fairway.world.clock import Clock

EVERY_S = 2.0
PAUSE_S = 0.025  # between two reads: forty in a second is nothing to a registry
FORGET_S = 60.0  # nobody has pulled from it for so long; while a group of it is off, it is kept: else the next is on
_NS = 1_000_000_000


class _Seen:
    __slots__ = ("asked_ns", "off", "read_ns")

    def __init__(self) -> None:
        self.off: frozenset[str] = frozenset()
        self.asked_ns = 0
        self.read_ns: int | None = None


class Switches:
    """Of one copy of a broker group. `run` looks; whoever wants to know asks `is_off`, which costs next to nothing."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self.on_change: Callable[[Subject], None] = lambda _: None
        self._registry = registry
        self._now_ns = clock.monotonic_ns
        self._seen: OrderedDict[Subject, _Seen] = OrderedDict()  # whoever was read last is last
        self._wanted = asyncio.Event()

    def is_off(self, subject: Subject, group: Group) -> bool:
        seen = self._seen.get(subject)
        if seen is None:
            seen = self._seen[subject] = _Seen()
            self._seen.move_to_end(subject, last=False)
            self._wanted.set()
        seen.asked_ns = self._now_ns()
        return group in seen.off

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            if not self._seen:
                self._wanted.clear()
                await self._wanted.wait()
            subject, seen = next(iter(self._seen.items()))
            now_ns = self._now_ns()
            if now_ns - seen.asked_ns > FORGET_S * _NS and not seen.off:
                del self._seen[subject]
                continue
            due_ns = 0 if seen.read_ns is None else seen.read_ns + int(EVERY_S * _NS)
            if now_ns < due_ns:
                await self._rest((due_ns - now_ns) / _NS)
                continue
            await self._read(subject, seen)
            await asyncio.sleep(PAUSE_S)

    async def _rest(self, seconds: float) -> None:
        """Unless a subject comes that was not looked at yet."""
        self._wanted.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        except TimeoutError:
            return

    async def _read(self, subject: Subject, seen: _Seen) -> None:
        path = subject_path(str(subject))
        try:
            node = await self._registry.get(path)
            off = frozenset() if node is None else frozenset(unpack(SubjectRecord, path, node.value).paused)
        except FairwayError:  # no answer, or none that can be read: what was known stays in force
            off = seen.off
        seen.read_ns = self._now_ns()
        self._seen.move_to_end(subject)
        if off != seen.off:
            seen.off = off
            self.on_change(subject)
