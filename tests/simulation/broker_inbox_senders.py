"""A program that writes to one group alone, in some histories: a few messages into its private inbox now and then, each
batch sent again until it is answered."""

from __future__ import annotations

from collections.abc import Sequence

from fairway.protocol import ConnectionOptions
from fairway.protocol import messages as m
from fairway.protocol.connection_states import INBOX
from tests.simulation.broker_clients import Mood, Scene
from tests.simulation.broker_operator import Operator
from tests.simulation.broker_truth import Owner, Truth
from tests.support.client import Stream

NAME = "correspondent"
LETTERS_MAX = 4


class Correspondent(Operator):
    """A producer that asks as an operator does: one request at a time."""

    pace_ms = 150

    def __init__(self, scene: Scene, truth: Truth, mood: Mood, owners: Sequence[Owner]) -> None:
        options = ConnectionOptions(features=(INBOX,))
        super().__init__(scene, truth, mood, owners, redrives=False, steers=False, name=NAME, options=options)
        self._commands = [self._write]
        self.is_done = False
        self._streams: dict[str, Stream] = {}  # by inbox
        self._written = 0

    async def _write(self, owner: Owner) -> int:
        inbox = owner.private().subject
        stream = self._streams.setdefault(inbox, Stream(self._rng.bits(60) + 1))
        count = 1 + self._rng.below(LETTERS_MAX)
        payloads = [f"{NAME}/{self._written + each}/".encode() for each in range(count)]
        self._written += count
        self._truth.note_sent(inbox, payloads, self._scene.clock.monotonic_ns())
        produced = await self._command(m.Produce(inbox), m.Produced, [stream.batch(payloads)])
        if produced is not None:
            self._truth.note_receipt(inbox, produced.first_sequence, payloads)
            self.done["sent to one group"] += count
        return count
