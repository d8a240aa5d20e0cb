"""Whatever keys and connections others use, and however often they change both: a steady actor gets its share."""

from __future__ import annotations

import random
from collections.abc import Hashable
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairway.scheduling import Account, Actor, TurnResult, VirtualTime
from fairway.scheduling.actor import MailboxItem
from tests.unit.scheduling.stage import Ask, Stage

MS = 1_000_000
US = 1_000
TOLERANCE = 0.05

# How others name their actors: all the same one, a few of their own, or another one each time. And whether each request
# comes over another connection.
NAMES = st.sampled_from(["one", "few", "fresh"])
OTHERS = st.lists(
    st.tuples(
        st.integers(1, 4), NAMES, st.integers(1, 12), st.sampled_from([60 * US, 150 * US, 400 * US]), st.booleans()
    ),
    min_size=1,
    max_size=3,
)


class Client:
    """Connections that always have so many requests in flight each."""

    def __init__(
        self, stage: Stage, group: int, connections: int, names: str, requests: int, cost_ns: int, *, is_fickle: bool
    ) -> None:
        self.used_ns = 0
        self._stage = stage
        self._group = group
        self._names = names
        self._cost_ns = cost_ns
        self._is_fickle = is_fickle
        self._numbers = count()
        for _ in range(connections):
            account = Account()
            for _ in range(requests):
                self._next(account)

    def _name(self) -> Hashable:
        number = next(self._numbers)
        return self._group, {"one": 0, "few": number % 7, "fresh": number}[self._names]

    def _next(self, account: Account) -> None:
        account = Account() if self._is_fickle else account

        def follow(_: Ask, __: Actor) -> TurnResult:
            self.used_ns += self._cost_ns
            self._next(account)
            return TurnResult.DONE

        self._stage.ask(self._name(), self._cost_ns, work=follow, account=account)


def contenders_of(connections: int, names: str, requests: int, *, is_fickle: bool) -> int:
    """How many shares these may have at most, by the smaller of their actors and their connections."""
    actors = {"one": 1, "few": 7, "fresh": connections * requests}[names]
    return min(actors, connections * requests if is_fickle else connections)


def share(order: VirtualTime, others: list[tuple[int, str, int, int, bool]]) -> float:
    """What a steady client gets, in multiples of what it must get."""
    stage = Stage(order=order)
    steady = Client(stage, 0, 1, "one", 3, 50 * US, is_fickle=False)
    shares = 1
    for group, (connections, names, requests, cost_ns, is_fickle) in enumerate(others, 1):
        Client(stage, group, connections, names, requests, cost_ns, is_fickle=is_fickle)
        shares += contenders_of(connections, names, requests, is_fickle=is_fickle)
    stage.run(15 * MS * shares)  # those whom nobody knew yet are charged for what they sent at once, and have napped
    used_ns, began_ns = steady.used_ns, stage.now_ns
    stage.run(15 * MS * shares)
    return (steady.used_ns - used_ns) / (stage.now_ns - began_ns) * shares


# One of three connections is far ahead, and has requests at the actors that the other two use.
RIDERS = (3, "few", 2, 150 * US, False)


@settings(max_examples=50)
@example([(4, "fresh", 30, 60 * US, False)])
@example([(4, "fresh", 3, 60 * US, True)])
@example([(4, "one", 30, 400 * US, False), (1, "few", 30, 150 * US, False)])
@example([RIDERS, (2, "one", 8, 60 * US, False)])
@example([RIDERS, (3, "one", 7, 150 * US, False)])
@example([(2, "one", 1, 60 * US, False)] * 3)  # each of three gains its one millisecond of naps (order.CREDIT_NS), once
@given(OTHERS)
def test_a_steady_actor_gets_its_share_beside_any_mix_of_keys_and_connections(
    others: list[tuple[int, str, int, int, bool]],
) -> None:
    assert share(VirtualTime(), others) >= 1 - TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_steady_actor_gets_its_share_whatever_the_seed(seed: int) -> None:
    """A hundred mixes for each seed."""
    rng = random.Random(seed)
    for _ in range(100):
        others = [
            (
                rng.randint(1, 4),
                rng.choice(["one", "few", "fresh"]),
                rng.randint(1, 12),
                rng.choice([60 * US, 150 * US, 400 * US]),
                rng.random() < 0.5,
            )
            for _ in range(rng.randint(1, 3))
        ]
        assert share(VirtualTime(), others) >= 1 - TOLERANCE, others


def least_share_beside_a_burst(order: VirtualTime) -> float:
    """The least that a steady client gets of its third, in any stretch of 40 ms, beside two new connections that send
    twenty requests at once, each of which takes forty times what is expected."""
    stage = Stage(order=order)
    steady = Client(stage, 0, 1, "one", 3, 50 * US, is_fickle=False)
    Client(stage, 1, 2, "fresh", 20, 2 * MS, is_fickle=False)
    shares = []
    for _ in range(6):
        used_ns, began_ns = steady.used_ns, stage.now_ns
        stage.run(40 * MS)
        shares.append((steady.used_ns - used_ns) / (stage.now_ns - began_ns) * 3)
    return min(shares)


def test_a_burst_of_costly_requests_takes_no_more_than_its_share() -> None:
    assert least_share_beside_a_burst(VirtualTime()) >= 1 - 2 * TOLERANCE  # a stretch ends within a request of 2 ms


# Who sends, how many requests at once, what each costs, and how long nobody sends anything then.
BURSTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, 30),
        st.sampled_from([1 * US, 20 * US, 50 * US, 2 * MS]),
        st.sampled_from([0, 60 * US, 300 * US]),
    ),
    max_size=20,
)


OVERTAKEN = [(0, 6, 50 * US, 0), (0, 6, 20 * US, 0), (0, 1, 1 * US, 0)]


def connections_out_of_order(order: VirtualTime, bursts: list[tuple[int, int, int, int]]) -> list[int]:
    """Those of three, all of which use one actor, of whose requests a later one went first."""
    stage = Stage(order=order)
    accounts = [Account() for _ in range(3)]
    sent = 0
    seen: list[list[int]] = [[], [], []]
    for connection, requests, cost_ns, pause_ns in bursts:
        for number in range(sent, sent + requests):

            def note(_: Ask, __: Actor, connection: int = connection, number: int = number) -> TurnResult:
                seen[connection].append(number)
                return TurnResult.DONE

            stage.ask("actor", cost_ns, work=note, account=accounts[connection])
        sent += requests
        stage.run(pause_ns)
    stage.run(2_000 * MS)
    assert sum(map(len, seen)) == sent
    return [connection for connection, numbers in enumerate(seen) if numbers != sorted(numbers)]


@settings(max_examples=50)
@example(OVERTAKEN)
@given(BURSTS)
def test_no_request_overtakes_another_of_its_connection(bursts: list[tuple[int, int, int, int]]) -> None:
    assert connections_out_of_order(VirtualTime(), bursts) == []


# --- planted bugs ----------------------------------------------------------------------------------------------------


class FrozenMinimum(VirtualTime):
    """Newcomers start at the least of those that are ready, which newcomers without end keep where it is."""

    def place(self, item: MailboxItem) -> None:
        if item.account is not None:
            item.account.is_new = False
        super().place(item)

    def advance(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        super().advance(0, ready_weight, least_rank)


class Hasty(VirtualTime):
    """Where a connection's next request starts is moved by what the last one took, whatever still waits."""

    def place(self, item: MailboxItem) -> None:
        if item.account is not None:
            item.account.start_ns = 0.0
        super().place(item)


class ActorsOnly(VirtualTime):
    """Connections have no accounts."""

    def place(self, item: MailboxItem) -> None:
        item.is_placed = True

    def settle(self, item: MailboxItem, charge_ns: float) -> None:
        pass


class Trusting(VirtualTime):
    """A request that waits keeps the start that it was given, whatever its connection has used since."""

    def _least_start_ns(self, account: Account | None) -> float:
        return 0.0


class FirstComeFirstServed(VirtualTime):
    """Connections have accounts, actors have none."""

    def charge(self, actor: Any, charge_ns: float) -> None:
        pass


@pytest.mark.parametrize(
    ("order", "others"),
    [
        (FrozenMinimum(), [(4, "fresh", 5, 60 * US, True)]),
        (ActorsOnly(), [(2, "fresh", 30, 60 * US, False)]),
        (FirstComeFirstServed(), [(4, "one", 30, 60 * US, False), (4, "one", 30, 60 * US, False)]),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, VirtualTime) else "",
)
def test_the_property_sees_a_planted_bug(order: VirtualTime, others: list[tuple[int, str, int, int, bool]]) -> None:
    assert share(order, others) < 1 - 2 * TOLERANCE


def test_a_burst_that_is_believed_to_be_cheap_is_seen() -> None:
    assert least_share_beside_a_burst(Trusting()) < 0.5


class Alias(Account):
    """Stands for an account, and is not the same: the mailbox takes the request for one of another connection."""

    __slots__ = ("of",)

    def __init__(self, of: Account) -> None:
        super().__init__()
        self.of = of


class HastyAndAlone(Hasty):
    """The same, where a mailbox does not know which requests are of one connection."""

    def place(self, item: MailboxItem) -> None:
        super().place(item)
        if item.account is not None:
            item.account = Alias(item.account)

    def settle(self, item: MailboxItem, charge_ns: float) -> None:
        if isinstance(item.account, Alias):
            item.account = item.account.of
        super().settle(item, charge_ns)


def test_a_request_that_overtakes_is_seen() -> None:
    assert connections_out_of_order(HastyAndAlone(), OVERTAKEN) == [0]


def test_the_mailbox_keeps_the_order_of_a_connection_whatever_the_starts() -> None:
    assert connections_out_of_order(Hasty(), OVERTAKEN) == []
