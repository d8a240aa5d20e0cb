"""A line that is answered by one who does not lead: it looks for another, and whoever asked does not notice."""

from __future__ import annotations

from fairway.client.commands import CommandRequest, describe, repeats
from fairway.errors import Code, Refused
from fairway.protocol.admin_messages import Depth, Describe
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.line import STRAY_MS, STRAY_WAIT_MS_MAX, Line
from fairway.protocol.messages import Join
from fairway.protocol.request_queue import RequestQueue
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from tests.unit.protocol.wired import WiredLine, connected, ended

NS_PER_MS = 1_000_000


def test_what_was_refused_is_sent_to_the_next_one_byte_for_byte() -> None:
    scene = connected(batch_messages_max=1)
    sent = scene.send(b"a", b"b")
    first = scene.batches
    scene.refuse(Code.NOT_MASTER)
    assert scene.has_server(), "the second answer is waited for"
    scene.refuse(Code.NOT_MASTER)
    assert not scene.has_server()
    assert scene.line.moves_on()
    assert not scene.line.moves_on(), "said once"
    scene.connect()
    assert scene.batches == first
    scene.store(0)
    scene.store(1)
    assert [ended(pending) for pending in sent] == ["stored", "stored"]


def test_however_often_nobody_leads_the_next_attempt_is_soon() -> None:
    scene = connected()
    [pending] = scene.send(b"a")
    for _ in range(20):
        scene.refuse(Code.NOT_MASTER)
        due_ns = scene.line.dial_due()
        assert due_ns is not None
        assert due_ns - scene.now_ns <= STRAY_WAIT_MS_MAX * NS_PER_MS
        scene.connect()
    scene.store(0)
    assert ended(pending) == "stored"


def test_who_accepts_and_never_speaks_is_followed_by_the_next_one() -> None:
    line = Line(SeededRng(1))
    line.connected(0)
    line.take(0)
    line.lost("reset", 1)
    assert line.moves_on()
    scene = connected()
    scene.line.lost("reset", scene.now_ns)
    assert not scene.line.moves_on(), "one that spoke is dialed first"


def test_a_wait_that_was_asked_for_is_kept() -> None:
    scene = connected()
    scene.send(b"a")
    scene.refuse(Code.NOT_MASTER, retry_after_ms=2_000)
    due_ns = scene.line.dial_due()
    assert due_ns is not None
    assert due_ns - scene.now_ns >= 2_000 * NS_PER_MS


def test_who_does_not_answer_the_rest_is_left_and_that_is_doubtful() -> None:
    scene = connected(batch_messages_max=1)
    sent = scene.send(b"a", b"b")
    first = scene.batches
    scene.refuse(Code.NOT_MASTER)
    scene.sleep(STRAY_MS)
    assert not scene.has_server()
    scene.connect()
    assert scene.batches == first, "both, under their numbers: the second may be stored"
    scene.store(0)
    scene.store(1, is_duplicate=True)
    assert [ended(pending) for pending in sent] == ["stored", "stored"]


def test_one_refusal_counts_once_as_a_failure() -> None:
    scene = connected(fails_fast=True, breaker_failures=3)
    scene.send(b"a")
    for _ in range(2):
        scene.refuse(Code.NOT_MASTER)
        scene.connect()
    assert not scene.producing.is_failing
    scene.refuse(Code.NOT_MASTER)
    assert scene.producing.is_failing


def test_a_question_is_asked_again_of_the_next_one() -> None:
    wired, questions = WiredLine(), RequestQueue(repeats)
    wired.line.add(questions, wired.now_ns)
    wired.connect()
    question = questions.put(CommandRequest(describe()))
    wired.pump()
    wired.refuse(Code.NOT_MASTER)
    assert not question.is_answered()
    assert isinstance(question.refused, Refused), "for whoever cannot wait"
    wired.connect()
    assert [request.message for request in wired.requests] == [Describe(Depth.GROUPS)]


def test_a_question_that_reaches_a_server_about_to_stop_is_asked_again() -> None:
    wired, questions = WiredLine(), RequestQueue(repeats)
    wired.line.add(questions, wired.now_ns)
    wired.connect()
    question = questions.put(CommandRequest(describe()))
    wired.pump()
    wired.refuse(Code.DRAINING)
    assert not question.is_answered()
    wired.cut()
    wired.connect()
    wired.pump()
    assert wired.requests[-1].message == Describe(Depth.GROUPS)


def test_a_consumer_joins_at_the_next_one() -> None:
    wired = WiredLine()
    wired.line.add(ConsumerSession(ConsumerOptions("orders", "hotel"), ManualClock(), SeededRng("c")), wired.now_ns)
    wired.connect()
    wired.refuse(Code.NOT_MASTER)
    wired.connect()
    assert [type(request.message) for request in wired.requests] == [Join]


def test_who_is_told_where_to_dial_leaves_at_once_and_does_not_wait() -> None:
    scene = connected()
    [pending] = scene.send(b"a")
    [first] = scene.batches
    scene.line.move(scene.now_ns)
    assert scene.line.is_over()
    scene.cut()
    assert scene.line.dial_due() == scene.now_ns
    scene.connect()
    assert scene.batches == [first], "it may be stored: under its number"
    scene.store(0)
    assert ended(pending) == "stored"


def test_who_waits_to_dial_does_so_at_once() -> None:
    wired = WiredLine()
    for _ in range(10):
        wired.line.unreachable("nobody", wired.now_ns)
    wired.line.move(wired.now_ns)
    assert wired.line.dial_due() == wired.now_ns
