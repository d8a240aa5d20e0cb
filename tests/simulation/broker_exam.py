"""The examination at the end of a history: in a calm world, is everybody woken who waits for something?

For each group, a message goes from consumer to consumer: it is produced, released, given back for later, and kept by a
consumer that falls silent. Each time another consumer, asleep in a long poll, must get it as soon as it is available.
In between there is nothing else to do, so nothing but the right wake-up wakes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairway.errors import Code, Refused
from fairway.protocol import messages as m
from tests.simulation.broker_clients import MS_NS, Link, Producer, attempts_of, sequences_of
from tests.simulation.broker_truth import Holder, Owner, Promise
from tests.support.client import Delivery

if TYPE_CHECKING:
    from tests.simulation.broker_history import History

PROMPT_MS = 100
WAIT_MS = 30_000
RETRY_MS = 150  # and a prompt answer take less than a lease: whoever gave it back says nothing meanwhile


class _Examinee:
    """A consumer that does what it is told."""

    def __init__(self, history: History, owner: Owner, name: str) -> None:
        rng = history.world.rng.child(name)
        self.holder = Holder(name)
        self._history = history
        self._owner = owner
        self._link = Link(history.scene, history.scene.net(name), rng, history.truth)
        self._arrived = 0
        self.lease_ms = 0  # the group may be so late that nobody has configured it

    @property
    def _place(self) -> tuple[str, str, str]:
        return self._owner.subject, self._owner.group, self.holder.name

    async def join(self) -> None:
        """A new process: where another one had its id, the lease of that one has to end first."""
        client, _ = await self._link.connected()
        joined = None
        while joined is None:
            try:
                joined = await client.join(*self._place, arrived=self._arrived)
            except Refused as refused:
                if refused.code is not Code.BUSY:
                    raise
                await asyncio.sleep((refused.retry_after_ms or 0) / 1_000)
        self.lease_ms = joined.lease_ms

    async def leave(self) -> None:
        """Gone for good, with nothing in hand."""
        client, _ = await self._link.connected()
        await client.ask(m.Leave(*self._place, self._arrived), m.Done)
        self._link.drop()

    async def pull(self, wait_ms: int) -> Delivery:
        client, _ = await self._link.connected()
        asked_ns = self._history.world.clock.monotonic_ns()
        delivery = await client.pull(*self._place, arrived=self._arrived, wait_ms=wait_ms)
        now_ns = self._history.world.clock.monotonic_ns()
        if delivery.lots:
            self._arrived = delivery.number
        self._history.truth.note_contact(self._owner, self.holder, asked_ns=asked_ns, now_ns=now_ns)
        self.holder.attempts = attempts_of(delivery)
        self._history.truth.note_delivery(self._owner, self.holder, delivery.payloads, asked_ns=asked_ns, now_ns=now_ns)
        return delivery

    async def wait(self) -> Delivery:
        """Asleep until there is something; an empty answer in between keeps the lease."""
        while not (delivery := await self.pull(WAIT_MS)).lots:
            pass
        return delivery

    async def settle(self, lots: list[m.WireLot], kind: m.Settlement, after_ms: int | None = None) -> None:
        client, _ = await self._link.connected()
        sequences = [each for lot in lots for each in sequences_of(lot)]
        if kind is not m.Settlement.ACK:
            self._history.truth.note_asked(self._owner, self.holder, sequences, kind.name.lower())
        else:
            self._history.truth.note_acking(self._owner, sequences)
        await client.settle(*self._place, lots, kind=kind, arrived=self._arrived, after_ms=after_ms)
        if kind is m.Settlement.ACK:
            self._history.truth.note_acked(self._owner, sequences)

    async def sweep(self) -> None:
        """Take and ack whatever is there, such as what other groups were examined with."""
        while lots := (await self.pull(0)).lots:
            await self.settle(lots, m.Settlement.ACK)


async def examine(history: History, owners: Sequence[Owner] | None = None) -> None:
    """Every group in turn, or these."""
    for number, owner in enumerate(history.truth.owners.values() if owners is None else owners):
        has_keys = history.has_policies
        producer = Producer(
            history.scene, history.truth, history.mood, f"examiner-{number}", owner.subject, has_keys=has_keys
        )
        examine_one = _receive_one if owner.is_broadcast or owner.is_at_most_once else _pass_around
        if owner.order == "strict":
            examine_one = _take_over
        await examine_one(history, owner, producer)
        if history.truth.is_refuted:
            return


async def _receive_one(history: History, owner: Owner, producer: Producer) -> None:
    """Nothing can be handed on: the one of that name gets every message, or the message is settled by going out."""
    one = _Examinee(history, owner, f"{owner.group}-{owner.subject}-c0")
    await one.join()
    await one.sweep()
    waiting = await _asleep(one)
    producer.make(1)
    await producer.send()
    lots = await _awake(history, owner, waiting, "a message", PROMPT_MS)
    if lots is not None:
        await one.settle(lots, m.Settlement.ACK)
        await one.leave()


async def _pass_around(history: History, owner: Owner, producer: Producer) -> None:
    one = _Examinee(history, owner, f"{owner.group}-{owner.subject}-one")
    two = _Examinee(history, owner, f"{owner.group}-{owner.subject}-two")
    await one.join()
    await one.sweep()
    waiting = await _asleep(one)
    producer.make(1)
    await producer.send()
    lots = await _awake(history, owner, waiting, "a message", PROMPT_MS)
    if lots is None:
        return
    await two.join()
    waiting = await _asleep(two)
    await one.settle(lots, m.Settlement.RELEASE)
    lots = await _awake(history, owner, waiting, "what was released", PROMPT_MS)
    if lots is None:
        return
    waiting = await _asleep(one)
    await two.settle(lots, m.Settlement.RETRY, RETRY_MS)
    lots = await _awake(history, owner, waiting, "a retry", RETRY_MS + PROMPT_MS)
    if lots is None:
        return
    waiting = await _asleep(two)
    lots = await _awake(history, owner, waiting, "what a silent consumer had", one.lease_ms + PROMPT_MS)
    if lots is None:
        return
    await two.settle(lots, m.Settlement.ACK)
    await two.leave()


async def _take_over(history: History, owner: Owner, producer: Producer) -> None:
    """In strict order: the next in line gets what the active one had, when it says nothing more."""
    one = _Examinee(history, owner, f"{owner.group}-{owner.subject}-one")
    two = _Examinee(history, owner, f"{owner.group}-{owner.subject}-two")
    await one.join()
    for _ in range(12):  # whoever was there before is given up, one after another
        await one.sweep()
        await asyncio.sleep(one.lease_ms / 3_000)
    await two.join()
    waiting = await _asleep(one)
    producer.make(1)
    await producer.send()
    lots = await _awake(history, owner, waiting, "a message", PROMPT_MS)
    if lots is None:
        return
    waiting = await _asleep(two)
    lots = await _awake(history, owner, waiting, "what a silent consumer had", one.lease_ms + PROMPT_MS)
    if lots is None:
        return
    await two.settle(lots, m.Settlement.ACK)
    await two.leave()


async def _asleep(examinee: _Examinee) -> asyncio.Task[Delivery]:
    """In a long poll, which the broker has taken in."""
    waiting = asyncio.ensure_future(examinee.wait())
    await asyncio.sleep(0.02)
    return waiting


async def _awake(
    history: History, owner: Owner, waiting: asyncio.Task[Delivery], what: str, within_ms: int
) -> list[m.WireLot] | None:
    taken_before = history.taken_by_retention
    try:
        async with asyncio.timeout(within_ms / 1_000):
            delivery = await waiting
    except (TimeoutError, Refused) as problem:
        if history.taken_by_retention > taken_before:
            return None
        told = f"{type(problem).__name__} {problem}"
        history.truth.blame(Promise.STUCK, f"{what} wakes nobody in {owner} within {within_ms} ms: {told}")
        return None
    return delivery.lots


async def ask_once_more(history: History) -> None:
    """After the last crash: leases end, and nothing is handed out that was acked."""
    await asyncio.sleep(2 * history.config.lease_ms / 1_000)
    for owner in history.truth.owners.values():
        name = "c0" if owner.is_broadcast else "late"
        late = _Examinee(history, owner, f"{owner.group}-{owner.subject}-{name}")
        await late.join()
        await late.sweep()


__all__ = ["MS_NS", "ask_once_more", "examine"]
