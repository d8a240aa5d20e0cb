"""What a handler's end means for its messages, told to the line once for a whole list."""

from __future__ import annotations

from fairway.client.handler_results import settle
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import Message
from fairway.runtime.rng import SeededRng
from tests.support.mini_broker import MiniBroker, Wire


def test_the_messages_of_a_list_are_acked_before_the_line_is_told() -> None:
    messages: list[Message] = []
    unsettled: list[int] = []
    broker = MiniBroker(None)
    session = ConsumerSession(
        ConsumerOptions("orders", "billing", "ann"),
        broker,
        SeededRng("handling"),
        on_change=lambda: unsettled.append(sum(not message.is_settled for message in messages)),
    )
    broker.produce([b"a", b"b", b"c"])
    wire = Wire(session, broker)
    wire.open()
    wire.settle_down()
    messages += session.take_messages()
    messages[0].ack()
    wire.settle_down()
    unsettled.clear()
    settle(messages, None)
    assert unsettled == [0]
    wire.settle_down()
    assert broker.is_all_done()
