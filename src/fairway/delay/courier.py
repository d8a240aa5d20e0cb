"""Sends intents to brokers by the ordinary PRODUCE, over a line to each group; `carrier` has the way of one intent.

A target is a broker group by its name. Names are in the dispatch log: an intent goes to the group that it was made for,
in this life and the next, wherever that group is reached by then. Each subject has one target, by the same hash
everywhere, until a meta server says who carries what. A target that cannot be reached takes nothing new (the engine
keeps what is due on disk), and so does one that has enough to do; neither holds back the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fairway import batch, limits
from fairway.delay.carrier import Carrier
from fairway.delay.dispatching import Intent
from fairway.names import Subject
from fairway.protocol import Options
from fairway.protocol.line import Line, LineOptions
from fairway.protocol.messages import Produced
from fairway.world.clock import Clock
from fairway.world.dialing import Address
from fairway.world.loop_link import LoopLink
from fairway.world.net import Net
from fairway.world.rng import Rng

_REFUSED_BYTES_MAX = 4 * limits.DELAY_OUTSTANDING_BYTES_MAX  # past it even they count: memory comes first
_GOODBYE_S = 1.0


@dataclass(slots=True)
class Target:
    """One broker group, and the way to it."""

    name: str
    addresses: tuple[Address, ...]
    carrier: Carrier
    line: Line
    link: LoopLink

    @property
    def is_down(self) -> bool:
        return not self.line.is_open

    def has_rest(self) -> bool:
        """Nothing is on its way, or nothing can be."""
        return self.is_down or not self.carrier.messages


class Courier:
    """All lines of one delay server. Lives on its loop."""

    def __init__(
        self,
        net: Net,
        clock: Clock,
        rng: Rng,
        *,
        name: str,
        outstanding_bytes: Callable[[str], int],
        on_sent: Callable[[Intent, Produced | None], None],
        on_room: Callable[[], None],
    ) -> None:
        """`name`: what brokers are told. `on_room`: a target is there again, or has room for more."""
        self._net = net
        self._clock = clock
        self._rng = rng
        self._line_options = LineOptions(hello=Options(name=name), backoff_most_ms=2_000)
        self._outstanding_bytes = outstanding_bytes
        self._on_sent = on_sent
        self._on_room = on_room
        self._targets: dict[str, Target] = {}
        self._homeless: dict[str, list[Intent]] = {}  # for targets that nobody has told us the address of
        self._routes: dict[Subject, str] = {}

    def __iter__(self) -> Iterator[Target]:
        return iter(self._targets.values())

    def reach(self, addresses: Mapping[str, Sequence[Address]]) -> None:
        """Where the targets are: dial them."""
        for name, places in addresses.items():
            carrier = Carrier(self._rng, on_sent=self._note_sent, on_open=self._on_room)
            line = Line(self._rng, self._line_options, now_ns=self._clock.monotonic_ns())
            line.add(carrier, self._clock.monotonic_ns())
            link = LoopLink(line, places, self._net, self._clock)
            self._targets[name] = Target(name, tuple(places), carrier, line, link)
            self.send(self._homeless.pop(name, []))
        self._routes.clear()

    # --- sending -----------------------------------------------------------------------------------------------------

    def route(self, subject: Subject) -> str | None:
        """The target that takes this subject now; None: its messages wait."""
        if not self._targets:
            return None
        name = self.target_of(subject)
        target = self._targets[name]
        if target.is_down or target.carrier.is_refused(subject):
            return None
        refused_bytes = min(target.carrier.refused_bytes, _REFUSED_BYTES_MAX)
        has_room = self._outstanding_bytes(name) - refused_bytes < limits.DELAY_OUTSTANDING_BYTES_MAX
        return name if has_room else None

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
        stirred: dict[str, Target] = {}
        for intent in intents:
            target = self._targets.get(intent.target)
            if target is None:
                self._homeless.setdefault(intent.target, []).append(intent)
            else:
                target.carrier.send(intent)
                stirred[intent.target] = target
        for target in stirred.values():
            target.link.stir()

    def _note_sent(self, intent: Intent, receipt: Produced | None) -> None:
        self._on_sent(intent, receipt)
        self._on_room()

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
