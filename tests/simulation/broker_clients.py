"""Producers and consumers, in a simulated world or a real one: they lose connections, responses and their memory.

Both follow docs/internals/protocol.md to the letter, so whatever contradicts the model is the broker's fault. A batch
or a settlement of unknown outcome is sent again with the same bytes. Every request says what arrived. A consumer that
is no member joins again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fairway.batch.identity import new_secret
from fairway.errors import Code, FairwayError, Refused, Unreachable
from fairway.groups import GroupConfig
from fairway.groups.config import Backoff, encode
from fairway.protocol import ConnectionOptions
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Configure, Configured
from fairway.runtime.clock import Clock
from fairway.runtime.net import Net
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation
from tests.simulation.broker_runs import RUN_MAX, in_order
from tests.simulation.broker_truth import MS_NS, Holder, Owner, Promise, Witness, key_of
from tests.support.client import Client, ConnectionEnded, Delivery, Stream

T = TypeVar("T")

BROKER = "broker"
PORT = 20_880
PATIENCE_S = 4.0  # with an answer, beyond the wait that was asked for
BATCHES_IN_FLIGHT = 3
MANY_ATTEMPTS = 1_000  # so many that none is the last
REASON = "it is no good"  # of whatever a consumer gives back
FORGOTTEN = frozenset({Code.SEQUENCE_GAP, Code.UNKNOWN_PRODUCER})
PASSING = frozenset({Code.BUSY, Code.READ_ONLY, Code.DRAINING, Code.EXPIRED, Code.TOO_MANY_CONNECTIONS})


@dataclass(frozen=True)
class Scene:
    """The world as clients see it, and where the broker is."""

    clock: Clock
    rng: SeededRng
    net: Callable[[str], Net]  # by the name of the host that asks
    note: Callable[[str], None]
    host: str = BROKER
    port: int = PORT
    others: tuple[tuple[str, int], ...] = ()  # the other copies of its group
    patience_s: float = PATIENCE_S
    search_ms: int = 20  # at most, before another copy is asked

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        return ((self.host, self.port), *self.others)

    @classmethod
    def simulated(cls, world: Simulation) -> Scene:
        return cls(world.clock, world.rng, world.net.host, world.loop.note)


@dataclass
class Mood:
    """How the clients behave just now; one for all of them."""

    is_calm: bool = False  # no mischief: consumers take and ack, producers finish what they began
    wait_ms: int = 0  # of a pull in calm times
    may_forget: bool = False  # the broker, in a power cut, what it had answered: durability is `memory`


class Name(NamedTuple):
    """Of a lot in a consumer's hands."""

    is_inbox: bool
    first: int
    attempt: int


@dataclass(frozen=True)
class Planned:
    """What a consumer has decided about messages of a lot."""

    kind: m.Settlement
    name: Name
    lot: m.WireLot
    after_ms: int | None = None

    @property
    def is_inbox(self) -> bool:
        return self.name.is_inbox


class Ended(FairwayError):
    """The outcome of a request is unknown, or there is no connection."""


class Link:
    """One connection at a time to the broker, made anew when it is gone."""

    def __init__(
        self, scene: Scene, net: Net, rng: SeededRng, truth: Witness, options: ConnectionOptions | None = None
    ) -> None:
        self._scene = scene
        self._options = options
        self._net = net
        self._rng = rng
        self._truth = truth
        self._at = 0  # which of the places answered last
        self.client: Client | None = None

    async def connected(self) -> tuple[Client, bool]:
        """The connection, and whether it is a new one."""
        if self.client is not None and not self.client.is_gone:
            return self.client, False
        host, port = self._scene.places[self._at % len(self._scene.places)]
        try:
            async with asyncio.timeout(self._scene.patience_s):
                self.client = await Client.connect(self._net, self._scene.clock, host, port, self._options)
        except (Unreachable, TimeoutError) as error:
            self.client = None
            self._at += 1
            await asyncio.sleep((5 + self._rng.below(60)) / 1_000)
            raise Ended(str(error)) from error
        return self.client, True

    async def ask(self, what: str, answer: Awaitable[T], *, wait_ms: int = 0, is_futile: bool = False) -> tuple[T, int]:
        """The answer, and when it was asked for. `is_futile`: it is to be refused."""
        asked_ns = self._scene.clock.monotonic_ns()
        try:
            async with asyncio.timeout(self._scene.patience_s + wait_ms / 1_000):
                told = await answer
        except (ConnectionEnded, TimeoutError) as error:
            self._at += isinstance(error, TimeoutError) and self.client is not None
            self.drop()
            raise Ended(what) from error
        except Refused as refused:
            if refused.code is Code.NOT_MASTER:
                await self._move_on()
                raise Ended(what) from refused
            if refused.code in (Code.OTHER, Code.PROTOCOL_ERROR, Code.BAD_REQUEST) and not is_futile:
                self._truth.blame(Promise.BROKE, f"{what}: {refused}")
            raise
        self._truth.note_answer(what, asked_ns)
        return told, asked_ns

    async def _move_on(self) -> None:
        """Another copy may lead, now or soon."""
        if self.client is not None:  # the first of several requests that were under way
            self.drop()
            self._at += 1
        await asyncio.sleep((1 + self._rng.below(self._scene.search_ms)) / 1_000)

    def drop(self) -> None:
        """Hang up without a word."""
        if self.client is not None:
            self.client.abort()
            self.client = None


class Producer:
    """One stream to one subject."""

    def __init__(
        self,
        scene: Scene,
        truth: Witness,
        mood: Mood,
        name: str,
        subject: str,
        *,
        pace_ms: int = 120,
        has_keys: bool = False,
    ) -> None:
        self.name = name
        self._has_keys = has_keys
        self._rng = scene.rng.child(name)
        self._scene = scene
        self._truth = truth
        self._mood = mood
        self._subject = subject
        self._pace_ms = pace_ms
        self._link = Link(scene, scene.net(name), self._rng.child("link"), truth)
        self._stream = Stream(self._rng.bits(60) + 1)
        self._pending: list[tuple[bytes, list[bytes]]] = []  # batches not yet acknowledged, with their payloads
        self._made = 0
        self._is_known = False  # something of the stream has a receipt

    @property
    def is_done(self) -> bool:
        return not self._pending

    async def run(self) -> None:
        while True:
            with suppress(Ended):
                await self._turn()
            await asyncio.sleep(self._rng.below(self._pace_ms * 1_000) / 1e6)

    async def _turn(self) -> None:
        if not self._mood.is_calm:
            self.make(1 + self._rng.below(BATCHES_IN_FLIGHT))
        if self._pending:
            await self.send()
        if not self._mood.is_calm and self._rng.below(40) == 0:
            self._link.drop()

    def make(self, batches: int) -> None:
        """Batches to be sent; the bytes of one never change again."""
        while len(self._pending) < batches:
            count = 1 + self._rng.below(1 + self._rng.below(12))
            size = self._rng.below(120)
            payloads = [f"{self.name}/{self._made + each}/".encode().ljust(size, b".") for each in range(count)]
            self._made += count
            keys = [key_of(payload) for payload in payloads] if self._has_keys else None
            self._pending.append((self._stream.batch(payloads, keys), payloads))

    async def send(self) -> None:
        """All that are pending, in order, without waiting in between."""
        client, _ = await self._link.connected()
        flight = self._pending[:BATCHES_IN_FLIGHT]
        for _, payloads in flight:
            self._truth.note_sent(self._subject, payloads, self._scene.clock.monotonic_ns())
        asked = [self._link.ask("a receipt", client.produce(self._subject, data)) for data, _ in flight]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        is_behind = False  # a batch behind one that was not stored leaves a gap
        for each, answer in zip(flight, answers, strict=True):
            if isinstance(answer, Refused):
                if not is_behind and self._mood.may_forget and answer.code in FORGOTTEN:
                    self._begin_anew()
                    return
                self._check_refusal(answer, is_behind=is_behind)
                is_behind = True
            elif isinstance(answer, Ended):
                is_behind = True
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self._truth.note_receipt(self._subject, answer[0].first_sequence, each[1])
                self._pending.remove(each)
                self._is_known = True

    def _begin_anew(self) -> None:
        """A power cut has taken what was acknowledged: the outcome of what is pending stays unknown for ever."""
        self._stream = Stream(self._rng.bits(60) + 1)
        self._is_known = False
        self._pending.clear()

    def _check_refusal(self, refused: Refused, *, is_behind: bool) -> None:
        """Behind a batch that was not stored there is a gap; and where nothing of the stream was, nobody knows it."""
        if refused.code in PASSING or (is_behind and refused.code is Code.SEQUENCE_GAP):
            return
        if is_behind and refused.code is Code.UNKNOWN_PRODUCER and not self._is_known:
            return
        self._truth.blame(Promise.REPEATED, f"a batch of {self.name} is refused: {refused}")


class Consumer:
    """One consumer of one group on one subject."""

    def __init__(
        self,
        scene: Scene,
        truth: Witness,
        mood: Mood,
        owner: Owner,
        name: str,
        config: GroupConfig,
        *,
        pace_ms: int = 30,
    ) -> None:
        self.holder = Holder(name)
        self._pace_ms = pace_ms
        self._rng = scene.rng.child(f"{name}/{owner.subject}")
        self._scene = scene
        self._truth = truth
        self._mood = mood
        self._owner = owner
        self._config = config
        self._link = Link(scene, scene.net(name), self._rng.child("link"), truth)
        self._arrived = 0
        self._sessions = self._rng.child("sessions")
        self._secret = self._new_secret()
        self._is_member = False
        self._has_left = True  # so far as it knows: being no member is then no surprise
        self._held: dict[Name, m.WireLot] = {}
        self._keys: dict[bool, dict[int, str | None]] = {False: {}, True: {}}  # of messages, where several are one's
        self._unsure: list[Planned] = []  # to be sent until it is answered

    @property
    def _place(self) -> tuple[str, str, str]:
        return self._owner.subject, self._owner.group, self.holder.name

    def _new_secret(self) -> bytes:
        """Of a new session; some are of an earlier version, which knows nothing of secrets."""
        return new_secret(self._sessions) if self._sessions.below(4) else b""

    async def run(self) -> None:
        while True:
            await self.step()
            if not self._mood.is_calm:
                await asyncio.sleep(self._rng.below(self._pace_ms * 1_000) / 1e6)

    def hang_up(self) -> None:
        self._link.drop()

    async def step(self) -> None:
        """Something, or an attempt at it."""
        try:
            await self._turn()
        except Ended:
            self._is_member = False
        except Refused as refused:
            await self._refused(refused)

    async def _refused(self, refused: Refused) -> None:
        if refused.code is Code.NOT_A_MEMBER:
            if not self._has_left:
                self._truth.note_eviction(self._owner, self.holder, self._scene.clock.monotonic_ns())
            self._is_member = False
            self._forget()
        elif refused.code is Code.STALE_CONFIG:
            self._is_member = False
        elif refused.code is Code.NO_SUCH_GROUP and self._mood.may_forget:
            self._truth.note_eviction(self._owner, self.holder, self._scene.clock.monotonic_ns())
            self._is_member = False
            self._forget()
        elif refused.code is Code.DRAINING:
            self._link.drop()
            self._is_member = False
        elif refused.code not in PASSING:
            self._truth.blame(Promise.BROKE, f"{self.holder.name}: {refused}")
        await asyncio.sleep((5 + self._rng.below(20)) / 1_000)

    def _spoke(self, asked_ns: int) -> None:
        now_ns = self._scene.clock.monotonic_ns()
        self._truth.note_contact(self._owner, self.holder, asked_ns=asked_ns, now_ns=now_ns)

    def _forget(self) -> None:
        """What it held is others' by now."""
        self._held.clear()
        self._unsure.clear()

    async def _turn(self) -> None:
        client, is_new = await self._link.connected()
        if is_new or not self._is_member:
            await self.join(client)
            return
        if self._unsure:
            await self._settle(client)
            return
        if not self._mood.is_calm:
            await self._mischief(client)
            return
        if self._held:
            self._plan([Planned(m.Settlement.ACK, name, lot) for name, lot in self._held.items()])
            return
        await self.pull(client, self._mood.wait_ms)

    async def _mischief(self, client: Client) -> None:
        match self._rng.below(50):
            case 0:
                await self._vanish()
            case 1:
                await self._leave(client)
            case 2 | 3:
                await self._lose_a_response(client)
            case 4 | 5 | 6:
                await self._beat(client)
            case 7 | 8 if self._held:
                await self._juggle(client)
            case _ if self._held and self._rng.below(3):
                self._decide()
            case _:
                waits = (0, 20, 200, self._config.lease_ms // 2)
                await self.pull(client, waits[self._rng.below(len(waits))])

    # --- membership --------------------------------------------------------------------------------------------------

    async def join(self, client: Client) -> None:
        """Join, and see to it that the group has the configuration of this history."""
        subject, group, name = self._place
        start = m.Whence.LATEST if self._owner.is_latest else m.Whence.EARLIEST
        owner = self._owner
        join = m.Join(subject, group, name, 0, self._arrived, start, owner.is_broadcast, owner.policies, self._secret)
        (joined, _), asked_ns = await self._link.ask("a membership", client.ask(join, m.Joined))
        now_ns = self._scene.clock.monotonic_ns()
        if joined.has_gap and self._mood.may_forget:
            self._owner.from_ns = None  # a power cut took the whole group, and it was told so: it begins anew
        self._truth.note_member(self._owner, now_ns)
        self._spoke(asked_ns)
        self._is_member, self._has_left = True, False
        if joined.config_version == 1:
            configure = Configure(subject, group, encode(self._config), 1)
            await self._link.ask("a configuration", client.ask(configure, Configured))
            self._is_member = False

    async def _leave(self, client: Client) -> None:
        """What it had is given back. If the answer does not come it may still be a member, so it says that it
        remembers nothing."""
        self._truth.note_asked(self._owner, self.holder, None, "left")
        self._forget()
        arrived, self._arrived = self._arrived, 0
        self._is_member, self._has_left = False, True
        await self._link.ask("a goodbye", client.ask(m.Leave(*self._place, arrived), m.Done))
        await asyncio.sleep(self._rng.below(200) / 1_000)

    async def _vanish(self) -> None:
        """Not a word for a while; then it may have forgotten everything."""
        if self._rng.below(2):
            self._link.drop()
        await asyncio.sleep(self._config.lease_ms * (1 + self._rng.below(24)) / 10_000)
        if self._rng.below(2):
            self._truth.note_asked(self._owner, self.holder, None, "forgot")
            self._forget()
            self._link.drop()
            self._arrived = 0
            self._secret = self._new_secret()
            self._is_member, self._has_left = False, True

    async def _beat(self, client: Client) -> None:
        beat = m.Heartbeat(*self._place, self._arrived)
        _, asked_ns = await self._link.ask("a heartbeat", client.ask(beat, m.Renewed))
        self._spoke(asked_ns)

    # --- messages ----------------------------------------------------------------------------------------------------

    async def pull(self, client: Client, wait_ms: int) -> Delivery:
        subject, group, name = self._place
        messages_max = 1 + self._rng.below(1 + self._rng.below(120))
        run_max = RUN_MAX if self._arrived % 3 else 1  # some know nothing of runs
        extends_runs = self._arrived % 3 == 1 and not self._unsure  # what has failed is known to the broker
        most = {"messages_max": messages_max, "wait_ms": wait_ms, "run_max": run_max}
        pull = client.pull(subject, group, name, arrived=self._arrived, extends_runs=extends_runs, **most)
        try:
            delivery, asked_ns = await self._link.ask("a delivery", pull, wait_ms=wait_ms)
        except Ended:
            self._truth.note_lost(self.holder, self._scene.clock.monotonic_ns())
            raise
        now_ns = self._scene.clock.monotonic_ns()
        self._spoke(asked_ns)
        owner = self._owner.private() if delivery.is_inbox else self._owner
        self.holder.attempts = attempts_of(delivery)
        self.holder.behind = {each for lot in delivery.lots if lot.is_behind for each in sequences_of(lot)}
        if owner.order == "key":
            self._keys[delivery.is_inbox].update((at, key_of(each)) for at, each in delivery.payloads.items())
        self._truth.note_delivery(owner, self.holder, delivery.payloads, asked_ns=asked_ns, now_ns=now_ns)
        if delivery.lots:
            self._scene.note(f"{name} got {delivery.number}: {list(delivery.payloads)}")
            self._arrived = delivery.number
        for lot in delivery.lots:
            self._hold(Name(delivery.is_inbox, lot.first, lot.attempt), lot)
        return delivery

    def _hold(self, name: Name, lot: m.WireLot) -> None:
        """A part that was handed back comes again under the name of its lot."""
        if lot.attempt > self._config.attempts_max:
            self._truth.blame(Promise.ATTEMPTS, f"{lot} of {self._owner}: at most {self._config.attempts_max}")
        if self._owner.is_at_most_once:
            return  # settled by being handed out
        rest = self._held.get(name)
        spans = [*rest.spans, *lot.spans] if rest is not None else lot.spans
        self._held[name] = m.WireLot(lot.first, lot.attempt, spans)

    async def _lose_a_response(self, client: Client) -> None:
        """Ask, and hang up before the answer, or with it under way."""
        task = asyncio.ensure_future(self.pull(client, 50))
        await asyncio.sleep(self._rng.below(2_500) / 1e6)
        self._link.drop()
        await task

    async def _juggle(self, client: Client) -> None:
        """Give back the head of a lot, ask for more, and miss the response: the head may be in it, by the name of the
        lot that is still in hand."""
        name, lot = next(iter(self._held.items()))
        head = m.WireLot(lot.first, lot.attempt, [m.SequenceRange(sequences_of(lot)[0], 1)])
        self._plan([Planned(m.Settlement.RELEASE, name, head)])
        await self._settle(client)
        await self._lose_a_response(client)

    def _decide(self) -> None:
        """What becomes of the messages at hand: mostly acked, whole or in parts."""
        planned: list[Planned] = []
        for name, lot in list(self._held.items()):
            draw = self._rng.below(12)
            if draw == 0:
                continue
            part = self._part_of(lot) if self._rng.below(4) == 0 else lot
            if draw == 1:
                after_ms = self._rng.below(3 * self._config.lease_ms // 2)
                planned.append(Planned(m.Settlement.RETRY, name, part, after_ms))
            elif draw == 2:
                planned.append(Planned(m.Settlement.RELEASE, name, part))
            elif draw == 3 and self._config.attempts_max < MANY_ATTEMPTS:
                planned.append(Planned(m.Settlement.REJECT, name, part))
            else:
                planned.append(Planned(m.Settlement.ACK, name, part))
        self._plan(planned)

    def _part_of(self, lot: m.WireLot) -> m.WireLot:
        sequences = [each for each in sequences_of(lot) if self._rng.below(2)]
        return m.WireLot(lot.first, lot.attempt, [m.SequenceRange(each, 1) for each in sequences]) if sequences else lot

    def _plan(self, planned: list[Planned]) -> None:
        for each in self._in_order(planned):
            name, lot = each.name, each.lot
            held = self._held.pop(name)
            rest = sorted(set(sequences_of(held)) - set(sequences_of(lot)))
            if rest:
                self._held[name] = m.WireLot(lot.first, lot.attempt, [m.SequenceRange(at, 1) for at in rest])
            if each.kind in (m.Settlement.RETRY, m.Settlement.RELEASE):
                owner = self._owner_of(name)
                self._truth.note_asked(owner, self.holder, sequences_of(lot), each.kind.name.lower())
            self._unsure.append(each)

    def _in_order(self, planned: list[Planned]) -> list[Planned]:
        """The same, as far as it may be said where several messages of a key are in hand."""
        kept: list[Planned] = []
        for is_inbox in (False, True):
            mine = [each for each in planned if each.is_inbox is is_inbox]
            said = {at: each.kind for each in mine for at in sequences_of(each.lot)}
            held = {
                at: name for name, lot in self._held.items() if name.is_inbox is is_inbox for at in sequences_of(lot)
            }
            kinds = in_order(said, held, self._keys[is_inbox])
            if kinds == said:
                kept += mine
                continue
            for at, kind in sorted(kinds.items()):
                name = held[at]
                kept.append(Planned(kind, name, m.WireLot(name.first, name.attempt, [m.SequenceRange(at, 1)])))
        return kept

    def _owner_of(self, name: Name) -> Owner:
        return self._owner.private() if name.is_inbox else self._owner

    async def _settle(self, client: Client) -> None:
        """All that is planned in one request; again until it is answered."""
        planned = list(self._unsure)
        outcomes = [
            m.Settle(each.kind, each.lot.first, each.lot.attempt, each.lot.spans, each.after_ms, REASON, each.is_inbox)
            for each in planned
        ]
        settle = m.SettleAll(*self._place, outcomes, self._arrived)
        for each in planned:
            if each.kind is m.Settlement.ACK:
                self._truth.note_acking(self._owner_of(each.name), sequences_of(each.lot))
            elif each.kind is m.Settlement.REJECT:
                self._truth.note_rejecting(self._owner_of(each.name), sequences_of(each.lot))
        (settled, _), asked_ns = await self._link.ask("a settlement", client.ask(settle, m.Settled))
        self._spoke(asked_ns)
        self._unsure = self._unsure[len(planned) :]
        self._scene.note(f"{self.holder.name} settled {outcomes}, {settled.stale} stale")
        for each in planned:
            if each.kind is m.Settlement.ACK:
                self._truth.note_acked(self._owner_of(each.name), sequences_of(each.lot), stale=settled.stale)
            elif each.kind is m.Settlement.REJECT:
                self._truth.note_rejected(self._owner_of(each.name), sequences_of(each.lot), stale=settled.stale)


def sequences_of(lot: m.WireLot) -> list[int]:
    return [each for span in lot.spans for each in range(span.first, span.first + span.count)]


def attempts_of(delivery: Delivery) -> dict[int, int]:
    return {each: lot.attempt for lot in delivery.lots for each in sequences_of(lot)}


def group_config(rng: SeededRng) -> GroupConfig:
    """Short leases and backoffs, so that both end within a history."""
    return GroupConfig(
        version=2,
        lease_ms=(300, 600, 1_000)[rng.below(3)],
        attempts_max=MANY_ATTEMPTS,
        backoff=Backoff(first_ms=50, cap_ms=400),
        lot_messages_max=(3, 20, 1_000)[rng.below(3)],
        lots_max=(40, 1_000)[rng.below(2)],
    )


__all__ = ["BROKER", "MS_NS", "PORT", "Consumer", "Link", "Mood", "Producer", "Scene", "group_config", "sequences_of"]
