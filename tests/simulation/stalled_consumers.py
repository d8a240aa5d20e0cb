"""Consumers of `fairway.aio` on virtual time, and what none of their programs may see.

A judge notes when a program is handed a message, and when another program has had its ack confirmed. A message that is
handed out after somebody else's confirmed ack was not this consumer's any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import fairway.aio
from fairway.client.core import ClientOptions
from fairway.protocol.line import ReconnectOptions
from fairway.simulation import Simulation

OPTIONS = ClientOptions(line=ReconnectOptions(backoff_most_ms=500))


@dataclass
class Judge:
    """Who was handed what, and whose acks are confirmed."""

    confirmed: dict[bytes, str] = field(default_factory=dict)  # by payload: whose ack
    begun: list[tuple[str, bytes]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)  # what nobody should have been handed
    lies: list[str] = field(default_factory=list)  # messages that said they were not lapsed, and were another's

    def begins(self, name: str, payload: bytes) -> None:
        self.begun.append((name, payload))
        if payload in self.confirmed:
            self.late.append(f"{payload!r} was handed to {name} after the confirmed ack of {self.confirmed[payload]}")

    def look(self, name: str, payload: bytes, *, is_lapsed: bool) -> None:
        """A program asks a message that it has begun."""
        if self.confirmed.get(payload, name) != name and not is_lapsed:
            self.lies.append(f"{name} was told that {payload!r} is its own, which {self.confirmed[payload]} has acked")

    def has_acked(self, name: str, payload: bytes) -> None:
        self.confirmed.setdefault(payload, name)

    def verdict(self) -> list[str]:
        return self.late + self.lies


def connect(world: Simulation, host: str, url: str) -> fairway.aio.Client:
    net, rng = world.net.host(host), world.rng.child(host)
    return fairway.aio.connect(url, patience=60, options=OPTIONS, net=net, clock=world.clock, rng=rng)
