"""A broker of one group, one consumer of it, and what the consumer was told: for tests that go step by step."""

from __future__ import annotations

from typing import Any

from fairway.groups import GroupConfig
from fairway.protocol import messages as m
from fairway.protocol.consumer_options import ConsumerOptions, ConsumingEvent, JoinDelayed
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import Message
from fairway.runtime.rng import SeededRng
from tests.support.mini_broker import MiniBroker, Wire

LEASE_MS = 15_000


class Stage:
    """A broker, one consumer, and what it was told."""

    def __init__(self, config: GroupConfig | None = None, *, is_pushed: bool = False, **options: Any) -> None:
        self.broker = MiniBroker(config)
        self.events: list[ConsumingEvent] = []
        self.delayed: list[JoinDelayed] = []
        self.pushed: list[Message] = []
        self.calls = 0
        self.session = self.consumer(is_pushed=is_pushed, **options)
        self.wire = Wire(self.session, self.broker)

    def consumer(self, *, is_pushed: bool = False, seed: str = "consuming", **options: Any) -> ConsumerSession:
        """`seed`: of the session's secret. One with the same seed and id is the same session, elsewhere."""
        settings: dict[str, Any] = {"subject": "orders", "group": "billing", "consumer": "ann"}
        return ConsumerSession(
            ConsumerOptions(**settings | options),
            self.broker,
            SeededRng(seed),
            on_messages=self.pushed.extend if is_pushed else None,
            on_event=self.events.append,
            on_change=self._called,
            on_join_delayed=self.delayed.append,
        )

    def _called(self) -> None:
        self.calls += 1

    def begin(self, *payloads: bytes) -> list[Message]:
        """Produce these, connect, and take what comes."""
        if payloads:
            self.broker.produce(payloads)
        self.wire.open()
        self.wire.settle_down()
        return self.session.take_messages()

    def reconnect(self) -> None:
        self.wire.cut()
        self.wire.open()
        self.wire.settle_down()

    def has_ended(self) -> bool:
        return self.session.is_finished

    def said(self, kind: type[m.ControlMessage]) -> list[Any]:
        return [message for message in self.wire.said if isinstance(message, kind)]


def payloads(messages: list[Message]) -> list[bytes]:
    return [message.payload for message in messages]
