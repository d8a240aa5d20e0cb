"""All requests of a stranger under a consumer's id leave the group as if the stranger had never been.

Two brokers of one group live through the same history of one consumer: it joins, pulls, settles, loses its connection,
is silent for less than a lease, and the broker crashes. At one of them a stranger asks whatever a member may ask, in
between. Afterwards both have written the same events, and the consumer has had the same answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.errors import Code, Refused
from fairway.groups import GroupConfig
from fairway.protocol import messages as m
from fairway.protocol.line import Answer
from fairway.protocol.line import RequestOutcome as Told
from tests.support.mini_broker import MiniBroker

PLACE = ("orders", "billing", "ann")
SECRET, OTHER = bytes(range(16)), bytes(range(16, 32))
LEASE_MS = 15_000
MESSAGES = 40
REFUSALS = {Code.BUSY, Code.FENCED, Code.NOT_A_MEMBER}


@dataclass
class Life:
    """A broker and its consumer."""

    broker: MiniBroker = field(default_factory=lambda: MiniBroker(GroupConfig(lease_ms=LEASE_MS, lot_messages_max=8)))
    connection: object = None
    answers: list[Told] = field(default_factory=list)
    lots: list[m.WireLot] = field(default_factory=list)
    arrived: int = 0

    def __post_init__(self) -> None:
        self.broker.produce([b"%d" % number for number in range(MESSAGES)])
        self.reconnect()

    def ask(self, message: m.ControlMessage) -> Told:
        told = self.broker.handle(message, self.connection)
        self.answers.append(told)
        return told

    def reconnect(self) -> None:
        self.broker.bound.pop("ann", None)  # the old connection has ended
        self.connection = object()
        self.ask(m.Join(*PLACE, 0, self.arrived, secret=SECRET))

    def pull(self, count: int) -> None:
        told = self.ask(m.Pull(*PLACE, count, 1 << 20, 0, self.arrived))
        if isinstance(told, Answer) and isinstance(told.message, m.Pulled) and told.message.lots:
            self.arrived = told.message.number
            self.lots += told.message.lots

    def settle(self, kind: m.Settlement) -> None:
        outcomes = [m.Settle(kind, lot.first, lot.attempt, lot.spans, 0) for lot in self.lots[:1]]
        del self.lots[:1]
        self.ask(m.SettleAll(*PLACE, outcomes, self.arrived))

    def drop(self) -> None:
        """The connection ends, and the broker sees it."""
        self.broker.bound.pop("ann", None)

    def crash(self) -> None:
        self.broker.sync(len(self.broker.events))
        self.broker.crash(lost_most=0)

    def pass_time(self, ms: int) -> None:
        """And then it says that it lives: by JOIN where the connection has gone."""
        self.broker.advance(ms)
        if "ann" in self.broker.bound:
            self.ask(m.Heartbeat(*PLACE, self.arrived))
        else:
            self.reconnect()


Step = tuple[str, int]
STEPS = st.one_of(
    st.tuples(st.just("pull"), st.integers(1, 12)),
    st.tuples(st.just("settle"), st.sampled_from([1, 2, 4]).map(int)),
    st.tuples(st.sampled_from(["reconnect", "drop", "crash"]), st.just(0)),
    st.tuples(st.just("pass_time"), st.integers(0, LEASE_MS - 1)),
)
SECRETS = st.sampled_from([b"", OTHER])
SPANS = st.lists(st.builds(m.SequenceRange, st.integers(0, MESSAGES), st.integers(1, MESSAGES)), min_size=1, max_size=3)
SETTLES = st.builds(
    m.Settle, st.sampled_from(list(m.Settlement)), st.integers(0, MESSAGES), st.integers(1, 3), SPANS, st.just(0)
)
NUMBERS = st.integers(0, 9)
STRANGERS = st.lists(
    st.one_of(
        st.builds(lambda arrived, secret: m.Join(*PLACE, 0, arrived, secret=secret), NUMBERS, SECRETS),
        st.builds(lambda arrived: m.Pull(*PLACE, 100, 1 << 20, 0, arrived), NUMBERS),
        st.builds(
            lambda outcomes, arrived: m.SettleAll(*PLACE, outcomes, arrived), st.lists(SETTLES, max_size=3), NUMBERS
        ),
        st.builds(lambda arrived: m.Heartbeat(*PLACE, arrived), NUMBERS),
        st.builds(lambda arrived: m.Leave(*PLACE, arrived), NUMBERS),
    ),
    max_size=4,
)


def live(life: Life, step: Step) -> None:
    name, value = step
    is_bound = "ann" in life.broker.bound
    if name in {"pull", "settle"} and not is_bound:
        life.reconnect()
    if name == "pull":
        life.pull(value)
    elif name == "settle":
        life.settle(m.Settlement(value))
    elif name == "pass_time":
        life.pass_time(value)
    else:
        getattr(life, name)()


@settings(max_examples=150)
@given(st.lists(st.tuples(STEPS, STRANGERS), max_size=25))
def test_a_stranger_changes_nothing(history: list[tuple[Step, list[m.ControlMessage]]]) -> None:
    alone, beside = Life(), Life()
    stranger = object()
    for step, tries in history:
        for message in tries:
            told = beside.broker.handle(message, stranger)
            assert isinstance(told, Refused), f"{message} was answered with {told}"
            assert told.code in REFUSALS
        live(alone, step)
        live(beside, step)
        assert beside.broker.events == alone.broker.events
        assert beside.broker.group.snapshot() == alone.broker.group.snapshot()
    assert [*map(repr, beside.answers)] == [*map(repr, alone.answers)]
    assert not any(isinstance(each, Refused) for each in beside.answers)
