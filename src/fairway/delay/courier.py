"""Sends intents to brokers by the ordinary PRODUCE, over a line to each group; `carrier` has the way of one intent.

A target is a broker group by its name. Names are in the dispatch log: an intent goes to the group that it was made for,
in this life and the next, wherever that group is reached by then. Each subject has one target, by the same hash
everywhere; in a cluster a guide says who takes it and where they are (`wayfinding`), and while one of them does not,
what is made from then on goes to another. A target that cannot be reached takes nothing new (the engine keeps what is
due on disk), and so does one that has enough to do; neither holds back the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fairway import batch, limits
from fairway.delay.carrier import TargetSender
from fairway.delay.dispatching import Intent
from fairway.names import Subject
from fairway.protocol import ConnectionOptions
from fairway.protocol.line import Line, ReconnectOptions
from fairway.protocol.messages import Produced
from fairway.world.clock import Clock
from fairway.world.dialing import Address
from fairway.world.loop_link import LoopLink
from fairway.world.net import Net
from fairway.world.rng import Rng

_REFUSED_BYTES_MAX = 4 * limits.DELAY_OUTSTANDING_BYTES_MAX  # past it even they count: memory comes first
_GOODBYE_S = 1.0


class Guide(Protocol):
    """Knows a cluster."""

    def groups_of(self, subject: Subject) -> Sequence[str]:
        """The broker groups that take messages of a subject now, the one that it belongs to first."""

    def homes_of(self, subject: Subject) -> Sequence[str]:
        """Of a subject whose keys each have a group of their own: these groups. Of others: none."""

    def want(self, subject: Subject) -> None:
        """Find out where its groups are."""

    def doubt(self, group: str) -> None:
        """It could not be reached, or was lost: is it still there?"""


@dataclass(slots=True)
class DispatchTarget:
    """One broker group, and the way to it."""

    name: str
    addresses: tuple[Address, ...]
    carrier: TargetSender
    line: Line
    link: LoopLink
    leader: Address | None = None
    last: Subject | None = None  # of what was sent there

    @property
    def is_down(self) -> bool:
        return not self.line.is_open

    def has_rest(self) -> bool:
        """Nothing is on its way, or nothing can be."""
        return self.is_down or not self.carrier.messages


class DispatchSender:
    """All lines of one delay server. Lives on its loop."""

    def __init__(
        self,
        net: Net,
        clock: Clock,
        rng: Rng,
        *,
        name: str,
        has_heartbeat: bool = True,
        outstanding_bytes: Callable[[str], int],
        on_sent: Callable[[Intent, Produced | None], None],
        on_room: Callable[[], None],
    ) -> None:
        """`name`: what brokers are told. `on_room`: a target is there again, or has room for more."""
        self._net = net
        self._clock = clock
        self._rng = rng
        self._line_options = ReconnectOptions(
            hello=ConnectionOptions(name=name, has_heartbeat=has_heartbeat), backoff_most_ms=2_000
        )
        self._outstanding_bytes = outstanding_bytes
        self._on_sent = on_sent
        self._on_room = on_room
        self._targets: dict[str, DispatchTarget] = {}
        self._homeless: dict[str, list[Intent]] = {}  # for targets that nobody has told us the address of
        self._routes: dict[Subject, str] = {}
        self._guide: Guide | None = None
        self._named: frozenset[str] | None = None  # the targets that a guide speaks of; None: it has not said

    def __iter__(self) -> Iterator[DispatchTarget]:
        return iter(self._targets.values())

    def reach(self, addresses: Mapping[str, Sequence[Address]]) -> None:
        """Where the targets are: dial them."""
        for name, places in addresses.items():
            self._dial(name, places)
        self._routes.clear()

    def follow(self, guide: Guide) -> None:
        """Ask it from now on. What is on its way and has no target yet is looked for at once."""
        self._guide = guide
        for intent in [intent for intents in self._homeless.values() for intent in intents]:
            guide.want(intent.subject)

    def lead(self, name: str, addresses: Sequence[Address], leader: Address | None) -> None:
        """A broker group is there now. None: nobody knows who leads it."""
        target = self._targets.get(name)
        if target is None:
            self._dial(name, addresses, leader)
        elif (target.addresses, target.leader) != (tuple(addresses), leader):
            target.addresses, target.leader = tuple(addresses), leader
            target.link.redirect(addresses, leader)

    def keep_only(self, names: Collection[str]) -> None:
        """Nobody speaks of the others any more: leave those that owe us no answer, and the rest when they do not."""
        self._named = frozenset(names)
        for name in [*self._targets]:
            self._leave_unnamed(name)

    def _leave_unnamed(self, name: str) -> None:
        target = self._targets.get(name)
        if target is not None and self._is_unnamed(name) and not target.carrier.messages:
            del self._targets[name]
            target.link.abort()

    def _is_unnamed(self, name: str) -> bool:
        return self._named is not None and name not in self._named

    def _dial(self, name: str, addresses: Sequence[Address], leader: Address | None = None) -> None:
        now_ns = self._clock.monotonic_ns()
        carrier = TargetSender(self._rng, on_sent=self._note_sent, on_open=self._on_room)
        line = Line(self._rng, self._line_options, now_ns=now_ns, on_trouble=partial(self._on_trouble, name))
        line.add(carrier, now_ns)
        link = LoopLink(line, addresses, self._net, self._clock)
        self._targets[name] = DispatchTarget(name, tuple(addresses), carrier, line, link, leader)
        self.send(self._homeless.pop(name, []))

    def _on_trouble(self, name: str, _sentence: str, _now_ns: int) -> None:
        if self._guide is not None:
            self._guide.doubt(name)

    def is_busy_with(self, subject: str) -> bool:
        """Whether a target is known by what was last sent there of this subject."""
        return any(target.last == subject and target.carrier.messages for target in self)

    # --- sending -----------------------------------------------------------------------------------------------------

    def route(self, subject: Subject) -> str | None:
        """The target that takes this subject now; None: its messages wait."""
        if self._guide is not None:
            groups = self._guide.groups_of(subject)
        else:
            groups = [self.target_of(subject)] if self._targets else []
        return next((name for name in groups if self.takes(name, subject)), None)

    def homes_of(self, subject: Subject) -> Sequence[str]:
        """Of a subject whose keys each have a group of their own: these groups. Of others: none."""
        return () if self._guide is None else self._guide.homes_of(subject)

    def takes(self, name: str, subject: Subject) -> bool:
        """Whether a target takes messages of a subject now."""
        target = self._targets.get(name)
        if target is None or target.is_down or target.carrier.is_refused(subject):
            return False
        refused_bytes = min(target.carrier.refused_bytes, _REFUSED_BYTES_MAX)
        return self._outstanding_bytes(name) - refused_bytes < limits.DELAY_OUTSTANDING_BYTES_MAX

    def target_of(self, subject: Subject) -> str:
        """The group that a subject's messages go to: each has its share, and it is the same after a restart."""
        name = self._routes.get(subject)
        if name is None:
            name = max(self._targets, key=lambda each: batch.key_hash(f"{each}/{subject}"))
            if len(self._routes) < limits.SUBJECTS_MAX:
                self._routes[subject] = name
        return name

    def send(self, intents: Iterable[Intent]) -> None:
        """Send each as soon as may be; the line writes them in the loop's next turn."""
        stirred: dict[str, DispatchTarget] = {}
        for intent in intents:
            target = self._targets.get(intent.target)
            if target is None:
                self._homeless.setdefault(intent.target, []).append(intent)
                if self._guide is not None:
                    self._guide.want(intent.subject)
            else:
                target.carrier.send(intent)
                target.last = intent.subject
                stirred[intent.target] = target
        for target in stirred.values():
            target.link.stir()

    def _note_sent(self, intent: Intent, receipt: Produced | None) -> None:
        self._on_sent(intent, receipt)
        self._on_room()
        if self._is_unnamed(intent.target):  # not now: its line is in the middle of this
            asyncio.get_running_loop().call_soon(self._leave_unnamed, intent.target)

    def is_reached(self, name: str) -> bool:
        """Whether there is a connection to a target."""
        target = self._targets.get(name)
        return target is not None and not target.is_down

    def withdraw(self, name: str) -> list[Intent]:
        """All that waits for a target, which is not sent any more."""
        intents = self._homeless.pop(name, [])
        target = self._targets.pop(name, None)
        if target is not None:
            intents += target.carrier.outstanding()
            target.link.abort()
            self._dial(name, target.addresses, target.leader)
            self._leave_unnamed(name)
        return intents

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def homeless(self) -> dict[str, int]:
        """Messages of intents whose target is not among those we were told of, by its name."""
        return {name: sum(each.messages for each in intents) for name, intents in self._homeless.items()}

    @property
    def messages(self) -> int:
        """Of intents outstanding."""
        return sum(target.carrier.messages for target in self) + sum(self.homeless.values())

    # --- the end -----------------------------------------------------------------------------------------------------

    async def finish(self, within_ms: int) -> None:
        """Wait a while for what is on its way. What is not stored by then is sent again in the next life."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_ms / 1_000):
                for target in self:
                    await target.link.wait(target.has_rest)

    async def close(self) -> None:
        """Say goodbye to all."""
        for target in self:
            await target.link.close(_GOODBYE_S)

    def abort(self) -> None:
        """Not a word more to anybody."""
        for target in self:
            target.link.abort()
