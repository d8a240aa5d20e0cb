"""Which changes of a connection are worth a line in the log: never a flood, and never silence about an outage."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.client.client_log import (
    AGAIN_FIRST_NS,
    AGAIN_MOST_NS,
    NS,
    QUIET_NS,
    REASONS_MAX,
    STEADY_NS,
    ClientLog,
    JoinLog,
    Outages,
    shown_on_stderr,
)
from fairway.client.core import Goal
from fairway.client.url import BrokerAddress
from fairway.protocol.consumer_options import JoinDelayed
from fairway.protocol.line import Line
from fairway.runtime.rng import SeededRng

GOAL = Goal((BrokerAddress("127.0.0.1", 20880), BrokerAddress("127.0.0.1", 20881)))
PLACE = "the broker at fairway://127.0.0.1:20880,127.0.0.1:20881"
REFUSED = "cannot connect to 127.0.0.1:20880: Connection refused; 127.0.0.1:20881: Connection refused"
TURNED = "cannot connect to 127.0.0.1:20881: Connection refused; 127.0.0.1:20880: Connection refused"


def test_an_outage_is_reported_at_once_then_at_growing_intervals() -> None:
    outages = Outages(GOAL)
    said = [
        (second, sentence)
        for second in range(2_000)
        if (sentence := outages.trouble(REFUSED if second % 2 else TURNED, second * NS)) is not None
    ]
    assert [second for second, _ in said] == [0, 10, 30, 70, 150, 310, 630, 1_230, 1_830]
    assert said[0][1] == f"waiting for {PLACE}: {TURNED}. Is it running there (`fairway up --data data --port 20880`)?"
    assert said[1][1] == f"still waiting for {PLACE}, after 10 s: {TURNED}"


def test_a_new_reason_is_reported_soon() -> None:
    outages = Outages(GOAL)
    assert outages.trouble("refused", 0)
    assert outages.trouble("no route", NS // 2) is None
    assert outages.trouble("no route", NS)
    assert outages.trouble("refused", 3 * NS) is None


def test_the_end_of_an_outage_is_reported_if_its_beginning_was() -> None:
    outages = Outages(GOAL)
    assert outages.opened(0) == f"connected to {PLACE}"
    assert outages.trouble("cut", NS) == f"lost the connection to {PLACE}: cut; connecting again"
    assert outages.opened(2 * NS) == f"connected to {PLACE}"
    assert outages.trouble("cut", 3 * NS) is None
    assert outages.opened(4 * NS) is None
    assert outages.trouble("cut", 4 * NS + STEADY_NS), "it has held for long: this is another outage"


def test_a_join_that_waits_is_reported_at_once_then_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    line = Line(SeededRng("line"))
    log = JoinLog(line, ClientLog(logging.getLogger("fairway.test")))
    reported = []
    for second in [*range(200), 200 + QUIET_NS // NS]:
        log(JoinDelayed("orders", "hotel", "till", "wait for the lease", second * NS))
        callbacks = line.callbacks()
        reported += [second] * len(callbacks)
        for callback in callbacks:
            callback()
    assert reported == [0, 10, 30, 70, 150, 200 + QUIET_NS // NS]
    assert caplog.messages == ["consumer till cannot join group hotel on orders yet: wait for the lease"] * 6


def test_a_group_of_brokers_is_named() -> None:
    outages = Outages(Goal(GOAL.addresses, "broker group west", is_routed=True))
    assert outages.trouble("refused", 0) == "waiting for the broker group west: refused"


@given(
    st.lists(st.tuples(st.floats(0.01, 30), st.one_of(st.none(), st.integers(0, 20))), max_size=300),
)
def test_nothing_that_a_broker_does_floods_the_log(steps: list[tuple[float, int | None]]) -> None:
    outages, now_ns = Outages(GOAL), 0
    reported = connected = 0
    for wait_s, reason in steps:
        now_ns += int(wait_s * NS)
        if reason is None:
            connected += outages.opened(now_ns) is not None
        else:
            reported += outages.trouble(f"reason {reason}", now_ns) is not None
    assert connected <= reported + 1
    growing = math.log2(AGAIN_MOST_NS / AGAIN_FIRST_NS) + 1
    bound = REASONS_MAX + growing + now_ns / AGAIN_MOST_NS
    resets = now_ns // STEADY_NS  # a connection that held for a minute allows the same once more
    assert reported <= bound * (1 + resets)
    if steps and all(reason is not None for _, reason in steps):
        assert reported <= bound


def test_a_program_that_sets_up_logging_later_gets_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    root, logger = logging.getLogger(), logging.getLogger("fairway")
    handlers, root.handlers = root.handlers, []
    try:
        with shown_on_stderr():
            assert logger.level == logging.INFO
            logging.getLogger("fairway.app").info("first")
            logging.basicConfig(format="mine %(message)s")
            logging.getLogger("fairway.app").warning("second")
        assert (logger.handlers, logger.level) == ([], logging.NOTSET)
    finally:
        root.handlers = handlers
    told = capsys.readouterr().err
    assert told.count("first") == told.count("second") == 1
    assert "mine second" in told
