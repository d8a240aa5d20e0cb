"""A stranger reads the ids of consumers, as everybody can, and acts under them: nothing is taken, acked or lost.

Two copies of a broker and consumers with fixed ids, on virtual time. Connections are dropped, the master is killed or
loses power, and comes back. All the while a stranger asks `describe` for consumers and tries JOIN, PULL, SETTLE,
HEARTBEAT and LEAVE under their ids, with secrets of its own and without. With a bug planted, the stranger wins.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest

from fairway.batch.identity import new_secret
from fairway.broker.groups import ConsumerSessions
from fairway.errors import Code, FairwayError, Refused
from fairway.group_events import ActionKind, GroupEvent
from fairway.groups import membership
from fairway.groups.members import Member
from fairway.groups.state import GroupState
from fairway.names import ConsumerName
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.runtime.rng import SeededRng
from fairway.serving.requests import Requester
from fairway.simulation import Simulation
from tests.simulation.broker_clients import PORT
from tests.simulation.cluster_steps import whole
from tests.simulation.cluster_world import Cluster
from tests.simulation.planted import swapped
from tests.simulation.stalled_consumers import connect
from tests.support.client import Client

URL = f"fairway://b1:{PORT},b2:{PORT}"
SUBJECT = "orders"
CONSUMERS = {"ann": ("hotel", False), "ben": ("hotel", False), "web-1": ("cache", True)}  # group, is it a broadcast
MESSAGES = 50
PACE_S = 0.2
STORY_S = 240.0


class Stranger:
    """Knows the protocol, and no secret but its own."""

    def __init__(self, cluster: Cluster, rng: SeededRng) -> None:
        self._cluster = cluster
        self._rng = rng
        self.gains: list[str] = []  # what it was granted
        self.refusals: Counter[Code] = Counter()

    async def run(self) -> None:
        while True:
            for copy in list(self._cluster.masters):
                with suppress(FairwayError, OSError, asyncio.TimeoutError):
                    async with asyncio.timeout(2):
                        await self._visit(copy.name)
            await asyncio.sleep(self._rng.uniform())

    async def _visit(self, broker: str) -> None:
        world = self._cluster.world
        client = await Client.connect(world.net.host("stranger"), world.clock, broker, PORT)
        try:
            seen, _ = await client.ask(Describe(Depth.CONSUMERS, SUBJECT), Described)
            for group in (each for of in seen.subjects for each in of.groups):
                for consumer in group.consumers or ():
                    place = SUBJECT, group.name, consumer.name
                    for message in self._requests(place, consumer.response, group.cursor):
                        await self._try(client, message)
        finally:
            client.abort()

    def _requests(self, place: tuple[str, str, str], number: int, cursor: int) -> Iterator[m.ControlMessage]:
        """Everything that a member may ask; JOIN comes at any place among them."""
        arrived = self._rng.below(number + 2)
        spans = [m.SequenceRange(0, max(cursor, 1))]
        firsts = range(max(cursor - 5, 0), cursor)
        kinds = (m.Settlement.ACK, m.Settlement.REJECT, m.Settlement.RETRY, m.Settlement.RELEASE)
        requests: list[m.ControlMessage] = [
            m.Join(*place, 0, arrived, secret=new_secret(self._rng)),
            m.Join(*place, 0, arrived),
            m.Pull(*place, 1_000, 1 << 20, 0, arrived),
            *(m.SettleAll(*place, [m.Settle(kind, first, 1, spans) for first in firsts], arrived) for kind in kinds),
            m.Heartbeat(*place, arrived),
            m.Leave(*place, arrived),
        ]
        while requests:
            yield requests.pop(self._rng.below(len(requests)))

    async def _try(self, client: Client, message: m.ControlMessage) -> None:
        try:
            answer, _ = await client.ask(message, m.ControlMessage)
        except Refused as refused:
            self.refusals[refused.code] += 1
        else:
            self.gains.append(f"{message!r} was answered with {answer!r}")


class World:
    """The consumers, what they have done, and the troubles that they have."""

    def __init__(self, seed: int) -> None:
        self.world = Simulation(seed, steps_max=4_000_000)
        self.cluster = Cluster(self.world, 2)
        self.rng = self.world.rng.child("story")
        self.stranger = Stranger(self.cluster, self.world.rng.child("stranger"))
        self.sent = [b"%d" % number for number in range(MESSAGES)]
        self.handled: dict[str, set[bytes]] = {name: set() for name in CONSUMERS}  # by the program of that consumer
        self.ended: list[str] = []  # consumers that could not go on

    async def consume(self, name: str) -> None:
        group, is_broadcast = CONSUMERS[name]
        async with (
            connect(self.world, name, URL) as client,
            client.consumer(SUBJECT, group, consumer=name, is_broadcast=is_broadcast) as consumer,
        ):
            try:
                while True:
                    taken = await consumer.take(1 + self.rng.below(20), 1)
                    await asyncio.sleep(self.rng.uniform() / 2)
                    self.handled[name].update(message.payload for message in taken)
                    consumer.ack(taken)
                    await consumer.flush(60)
            except FairwayError as error:
                self.ended.append(f"{name}: {error}")

    async def produce(self) -> None:
        async with connect(self.world, "producer", URL) as client:
            for payload in self.sent:
                await client.send(SUBJECT, payload)
                await asyncio.sleep(PACE_S)

    async def trouble(self) -> None:
        """Lost connections, and changes of masters."""
        for _ in range(4):
            await asyncio.sleep(2 * self.rng.uniform())
            self.world.net.drop([*CONSUMERS][self.rng.below(len(CONSUMERS))])
            master = (await self.cluster.master()).name
            [self.cluster.kill, self.cluster.cut_power][self.rng.below(2)](master)
            await self.cluster.master()
            await asyncio.sleep(2 * self.rng.uniform())
            await whole(self.cluster, "b1", "b2")

    @property
    def is_all_handled(self) -> bool:
        """Whether the programs of each group have seen every message: none was taken, acked or lost by another."""
        shared = self.handled["ann"] | self.handled["ben"]
        return shared >= {*self.sent} and self.handled["web-1"] >= {*self.sent}

    async def is_all_acked(self) -> bool:
        """Whether the broker owes nothing to any group, and has no dead letter."""
        broker = (await self.cluster.master()).name
        client = await Client.connect(self.world.net.host("auditor"), self.world.clock, broker, PORT)
        try:
            seen, _ = await client.ask(Describe(Depth.GROUPS, SUBJECT), Described)
        finally:
            client.abort()
        groups = [each for of in seen.subjects for each in of.groups]
        return all(each.oldest_unacked == MESSAGES and not (each.dead or each.dying) for each in groups)

    async def story(self) -> None:
        await whole(self.cluster, "b1", "b2")
        background: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(each) for each in (self.stranger.run(), *(self.consume(name) for name in CONSUMERS))
        ]
        try:
            troubled = asyncio.gather(self.produce(), self.trouble())
            background.append(troubled)
            while not (self.stranger.gains or self.ended):
                await asyncio.sleep(0.1)
                if troubled.done():
                    troubled.result()  # or what went wrong in it
                    if self.is_all_handled and await self.is_all_acked():
                        return
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    def play(self) -> None:
        with self.world:
            self.world.run(asyncio.wait_for(self.story(), STORY_S))


@pytest.mark.parametrize("seed", range(4))
def test_a_stranger_who_knows_the_ids_takes_acks_and_loses_nothing(seed: int) -> None:
    played = World(seed)
    played.play()
    assert played.stranger.gains == []
    assert played.ended == []
    assert played.is_all_handled
    assert played.stranger.refusals.keys() >= {Code.BUSY, Code.FENCED, Code.NOT_A_MEMBER}, "it has tried everything"
    assert played.stranger.refusals.keys() <= {Code.BUSY, Code.FENCED, Code.NOT_A_MEMBER, Code.NO_SUCH_GROUP}


# --- with bugs planted ------------------------------------------------------------------------------------------------


def any_secret_will_do() -> AbstractContextManager[None]:
    def is_owner(member: Member, claim: object) -> bool:
        return True

    return swapped(membership, "_is_owner", is_owner)


def who_speaks_first_is_bound() -> AbstractContextManager[None]:
    """As it was before sessions had secrets."""

    def check(self: ConsumerSessions, name: ConsumerName, session: Requester, state_machine: object) -> None:
        if not self.has_other(name, session):
            self.bind(name, session)
            return
        raise Refused(Code.FENCED, "another connection has joined")

    return swapped(ConsumerSessions, "check", check)


def nobody_is_bound() -> AbstractContextManager[None]:
    def check(self: ConsumerSessions, name: ConsumerName, session: Requester, state_machine: object) -> None:
        """Whoever asks may."""

    return swapped(ConsumerSessions, "check", check)


def verifiers_are_not_written() -> AbstractContextManager[None]:
    """The next master does not know of the secret."""

    @contextmanager
    def planted() -> Iterator[None]:
        handlers = GroupState._HANDLERS
        right = handlers[ActionKind.VERIFIER]

        def verify(state: GroupState, event: GroupEvent, now_ns: int) -> None:
            if now_ns:  # a replay gives no time
                right(state, event, now_ns)

        handlers[ActionKind.VERIFIER] = verify
        try:
            yield
        finally:
            handlers[ActionKind.VERIFIER] = right

    return planted()


BUGS = [any_secret_will_do, who_speaks_first_is_bound, nobody_is_bound, verifiers_are_not_written]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug: Callable[[], AbstractContextManager[None]]) -> None:
    """Within a few histories: some bugs show only if the stranger comes between a change of masters and the JOIN of the
    consumer."""
    assert any(_is_caught(bug, seed) for seed in range(12))


def _is_caught(bug: Callable[[], AbstractContextManager[None]], seed: int) -> bool:
    played = World(seed)
    with bug(), suppress(asyncio.TimeoutError):
        played.play()
    return bool(played.stranger.gains)
