"""Those who schedule messages in a simulated history, and change their minds about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from fairway import batch
from fairway.batch import MessageId
from fairway.delay.schedule.manifest import DAY_MS, HOUR_MS
from fairway.errors import FairwayError, Refused
from fairway.protocol import ControlMessage
from fairway.protocol.delay_messages import Cancel, Decided, Fate, Reschedule
from fairway.protocol.messages import Produce, Produced
from tests.simulation.broker_clients import PORT
from tests.simulation.broker_truth import Promise
from tests.simulation.delay_truth import DelayTruth, Letter
from tests.simulation.delay_world import DelayCluster
from tests.support.client import Client

AnswerT = TypeVar("AnswerT", bound=ControlMessage)

_PATIENCE_S = 1.0  # for one answer
_NEAR_MS = 4_000
_FAR_MS = (3 * HOUR_MS, 5 * DAY_MS, 40 * DAY_MS, 300 * DAY_MS)
_FINAL = ("bad_request", "unsupported", "too_large", "sequence_conflict", "sequence_gap", "unknown_producer")


class Patron:
    """One client. What it asks for it asks until somebody answers; the same bytes each time."""

    def __init__(self, cluster: DelayCluster, truth: DelayTruth, number: int, subject: str, pace_ms: int) -> None:
        self.name = f"patron-{number}"
        self.is_done = False
        self.cancelled = 0
        self._cluster = cluster
        self._truth = truth
        self._subject = subject
        self._pace_ms = pace_ms
        self._rng = cluster.world.rng.child(self.name)
        self._next_producer = 1_000_000 * (1 + number)
        self._own: list[Letter] = []
        self._hosts = list(cluster.copies)
        self._net = cluster.world.net.host(self.name)
        self._client: Client | None = None

    async def run(self, is_calm: Callable[[], bool]) -> None:
        while not is_calm() and not self._truth.is_refuted:
            await asyncio.sleep(self._rng.below(2 * self._pace_ms) / 1_000)
            choice = self._rng.below(10)
            if choice < 7 or not self._own:
                await self._schedule()
            elif choice < 9:
                await self._cancel(self._own[self._rng.below(len(self._own))])
            else:
                await self._put_off(self._own[self._rng.below(len(self._own))])
        self.is_done = True

    # --- what it wants -----------------------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        producer, self._next_producer = self._next_producer, self._next_producer + 1
        letters = [self._letter(producer, index) for index in range(1 + self._rng.below(3))]
        self._truth.letters |= {each.payload: each for each in letters}
        data = batch.encode(
            [each.payload for each in letters],
            producer_id=producer,
            first_sequence=0,
            created_ms=self._now_ms,
            due_ms=[each.least_ms for each in letters],
        )
        if await self._ask(Produce(self._subject), Produced, [data]) is not None:
            for each in letters:
                each.is_taken = True
            self._own += letters

    def _letter(self, producer: int, index: int) -> Letter:
        draw = self._rng.below(10)
        is_far = draw == 0
        after_ms = _FAR_MS[self._rng.below(len(_FAR_MS))] if is_far else self._rng.below(_NEAR_MS)
        due_ms = self._now_ms + (after_ms if draw != 1 else -1_000)
        payload = f"{self.name}/{producer}/{index}".encode()
        return Letter(payload, MessageId(producer, index), self._subject, due_ms, is_far)

    async def _cancel(self, letter: Letter) -> None:
        def in_doubt() -> None:
            letter.is_in_doubt = True

        decided = await self._ask(Cancel("", str(letter.id), None), Decided, on_doubt=in_doubt)
        if decided is not None:
            self._told(letter, decided.fate)
            self.cancelled += decided.fate is Fate.CANCELLED

    async def _put_off(self, letter: Letter) -> None:
        due_ms, before_ms = self._now_ms + self._rng.below(_NEAR_MS), letter.least_ms
        letter.least_ms, letter.is_far = min(before_ms, due_ms), False
        decided = await self._ask(Reschedule("", str(letter.id), None, due_ms), Decided)
        if decided is not None:
            self._told(letter, decided.fate)
            if decided.fate is Fate.RESCHEDULED:
                letter.least_ms = due_ms

    def _told(self, letter: Letter, fate: Fate) -> None:
        if letter.fate is Fate.CANCELLED and fate in (Fate.RESCHEDULED, Fate.ALREADY_DISPATCHED):
            self._truth.blame(Promise.RISEN, f"{letter.payload!r} was cancelled, and then {fate.name}")
        if letter.fate is not Fate.CANCELLED:
            letter.fate = fate

    @property
    def _now_ms(self) -> int:
        return self._cluster.world.clock.wall_ms()

    # --- how it asks -------------------------------------------------------------------------------------------------

    async def _ask(
        self,
        message: ControlMessage,
        answer: type[AnswerT],
        attachments: Sequence[bytes] = (),
        on_doubt: Callable[[], None] = lambda: None,
    ) -> AnswerT | None:
        """Whoever leads, as often as it takes; None if the history is over before."""
        while not self._truth.is_refuted:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    client = await self._connected()
                    return (await client.ask(message, answer, attachments))[0]
            except Refused as refused:
                if refused.code.value in _FINAL:
                    self._truth.blame(Promise.REPEATED, f"{message} of {self.name} was refused: {refused}")
                    return None
                self._go_elsewhere()
            except (FairwayError, TimeoutError):
                on_doubt()
                self._go_elsewhere()
            await asyncio.sleep(0.05)
        return None

    async def _connected(self) -> Client:
        if self._client is None or self._client.is_gone:
            self._client = await Client.connect(self._net, self._cluster.world.clock, self._hosts[0], PORT)
        return self._client

    def _go_elsewhere(self) -> None:
        self.hang_up()
        self._hosts.append(self._hosts.pop(0))

    def hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(FairwayError):
                client.abort()
