"""A line: connects for ever, says to each session how each of its questions ended, leaves politely."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from fairway.errors import Code, Misuse, Refused
from fairway.protocol import Connection, ConnectionOptions, ControlMessage, Role
from fairway.protocol.line import Answer, Ask, ConnectionLost, ReconnectOptions, RequestOutcome, RetryDelays
from fairway.protocol.messages import Heartbeat, Leave, Produce, Renewed
from fairway.runtime.rng import SeededRng
from tests.unit.protocol.wired import WiredLine

QUESTION = Heartbeat("orders", "billing", "ann", 0)
REPLY = Renewed(15_000, 1)


class Asker:
    """A session that asks what it is told to."""

    def __init__(self, *questions: ControlMessage) -> None:
        self.questions = list(questions)
        self.outcomes: list[RequestOutcome] = []
        self.opened_count = 0
        self.rooms: list[int] = []
        self.due_ns: int | None = None

    def opened(self, now_ns: int) -> None:
        self.opened_count += 1

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        self.rooms.append(room)
        asked, self.questions = self.questions[:room], self.questions[room:]
        return [Ask(each, (), each) for each in asked]

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        self.outcomes.append(outcome)

    def next_deadline(self) -> int | None:
        return self.due_ns


def wired(*questions: ControlMessage, **options: Any) -> tuple[WiredLine, Asker]:
    scene, asker = WiredLine(**options), Asker(*questions)
    scene.line.add(asker, scene.now_ns)
    return scene, asker


def test_a_question_waits_for_the_connection_and_is_answered_once() -> None:
    scene, asker = wired(QUESTION)
    scene.pump()
    assert not scene.requests
    scene.connect()
    assert scene.is_open()
    scene.answer(REPLY)
    assert asker.outcomes == [Answer(REPLY)]
    assert asker.opened_count == 1


def test_a_refusal_is_an_outcome_and_the_line_stays_open() -> None:
    scene, asker = wired(QUESTION)
    scene.connect()
    scene.refuse(Code.NOT_A_MEMBER)
    [refused] = asker.outcomes
    assert isinstance(refused, Refused)
    assert refused.code is Code.NOT_A_MEMBER
    assert scene.is_open()


def test_what_was_asked_is_lost_with_the_connection_and_the_line_comes_back() -> None:
    scene, asker = wired(QUESTION)
    scene.connect()
    scene.cut()
    assert asker.outcomes == [ConnectionLost("the connection was cut")]
    assert scene.line.trouble == "the cable was pulled"
    asker.questions.append(QUESTION)
    scene.connect()
    scene.answer(REPLY)
    assert asker.outcomes[1:] == [Answer(REPLY)]
    assert asker.opened_count == 2
    assert scene.line.trouble is None


def test_waits_grow_while_nobody_answers_and_are_short_again_after_an_answer() -> None:
    scene, asker = wired(backoff_first_ms=100, backoff_most_ms=800)
    waits_ms = []
    for _ in range(8):
        scene.line.unreachable("refused", scene.now_ns)
        due_ns = scene.line.dial_due()
        assert due_ns is not None
        waits_ms.append((due_ns - scene.now_ns) / 1e6)
        scene.clock.advance(waits_ms[-1])
    assert all(least / 2 <= wait <= least for wait, least in zip(waits_ms, [100, 200, 400, *[800] * 5], strict=True))
    assert len(set(waits_ms[4:])) == 4, "by chance, so that a thousand clients do not come back at once"
    asker.questions.append(QUESTION)
    scene.connect()
    scene.answer(REPLY)
    scene.cut()
    assert (scene.line.dial_due() or 0) - scene.now_ns <= 100e6
    assert scene.troubles == ["refused"] * 8 + ["the cable was pulled"]


def test_a_handshake_alone_does_not_end_the_growing_waits_but_a_while_of_peace_does() -> None:
    scene, _ = wired(backoff_first_ms=100, backoff_most_ms=800)
    for _ in range(4):
        scene.connect()
        scene.cut()
    assert (scene.line.dial_due() or 0) - scene.now_ns >= 400e6
    scene.connect()
    scene.sleep(1_000)
    scene.cut()
    assert (scene.line.dial_due() or 0) - scene.now_ns <= 100e6


def test_a_broker_that_leaves_answers_what_is_under_way_and_is_found_again_when_it_said() -> None:
    scene, asker = wired(QUESTION)
    scene.connect()
    scene.leave(retry_after_ms=700)
    asker.questions.append(QUESTION)
    scene.pump()
    assert len(scene.requests) == 1, "nothing new is asked of one who leaves"
    scene.answer(REPLY)
    assert asker.outcomes == [Answer(REPLY)]
    assert not scene.has_server()
    assert 700e6 <= (scene.line.dial_due() or 0) - scene.now_ns <= 800e6
    scene.connect()
    scene.answer(REPLY)
    assert len(asker.outcomes) == 2


def test_a_broker_that_turns_us_away_is_asked_again_later() -> None:
    scene, _ = wired()
    due_ns = scene.line.dial_due()
    assert due_ns == 0
    scene.line.connected(scene.now_ns)
    scene.server = Connection(Role.SERVER, scene.now_ns)
    scene.server.turn_away(Refused(Code.TOO_MANY_CONNECTIONS, "full house", retry_after_ms=300))
    scene.pump()
    assert scene.line.trouble == "full house"
    assert (scene.line.dial_due() or 0) - scene.now_ns >= 300e6


def test_a_silent_broker_is_pinged_and_then_given_up() -> None:
    scene, asker = wired(QUESTION)
    scene.connect()
    scene.server = None  # it hears nothing and says nothing
    for _ in range(3):
        scene.sleep(10_000)
    assert scene.line.is_over()
    [lost] = asker.outcomes
    assert isinstance(lost, ConnectionLost)
    assert "three heartbeats" in lost.sentence


def test_sessions_share_what_room_there_is() -> None:
    scene = WiredLine(server=ConnectionOptions(requests_max=3))
    askers = [Asker(*[QUESTION] * 4) for _ in range(2)]
    for asker in askers:
        scene.line.add(asker, scene.now_ns)
    scene.connect()
    assert len(scene.requests) == 3
    for _ in range(8):
        scene.answer(REPLY)
    assert [len(asker.outcomes) for asker in askers] == [4, 4]
    assert all(isinstance(outcome, Answer) for asker in askers for outcome in asker.outcomes)


def test_a_session_may_come_late_and_go_early() -> None:
    scene, first = wired(QUESTION)
    scene.connect()
    late = Asker(QUESTION)
    scene.line.add(late, scene.now_ns)
    assert late.opened_count == 1
    scene.pump()
    scene.line.remove(first)
    scene.answer(REPLY)
    scene.answer(REPLY)
    assert (len(first.outcomes), len(late.outcomes)) == (0, 1)


def test_a_request_that_the_broker_cannot_take_is_refused_here_and_the_line_stays_open() -> None:
    scene, asker = wired(Leave("s" * (1 << 20), "billing", "ann", 0))
    scene.connect()
    [refused] = asker.outcomes
    assert isinstance(refused, Refused)
    assert refused.code is Code.TOO_LARGE
    assert scene.is_open()


def test_a_session_that_asks_for_more_than_its_room_is_told_so() -> None:
    class Greedy(Asker):
        def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
            return super().asks(10 if room else 0, now_ns)

    scene = WiredLine(server=ConnectionOptions(requests_max=2))
    greedy = Greedy(*[QUESTION] * 3)
    scene.line.add(greedy, scene.now_ns)
    scene.connect()
    [refused] = greedy.outcomes
    assert isinstance(refused, Refused)
    assert refused.code is Code.BUSY


def test_close_waits_for_answers_and_asks_nothing_more() -> None:
    scene, asker = wired(QUESTION)
    scene.connect()
    scene.line.close(scene.now_ns)
    asker.questions.append(QUESTION)
    scene.pump()
    assert not scene.is_closed()
    scene.answer(REPLY)
    assert asker.outcomes == [Answer(REPLY)]
    assert scene.is_closed(), "both have said goodbye, and nothing is under way"
    assert scene.line.dial_due() is None


def test_close_loses_patience_with_a_broker_that_does_not_answer() -> None:
    scene, asker = wired(QUESTION, drain_ms=2_000)
    scene.connect()
    scene.line.close(scene.now_ns)
    scene.sleep(1_990)
    assert not scene.is_closed()
    scene.sleep(20)
    assert scene.is_closed()
    assert [type(outcome) for outcome in asker.outcomes] == [ConnectionLost]


def test_close_without_a_connection_is_over_at_once() -> None:
    scene, _ = wired()
    scene.line.close(scene.now_ns)
    scene.line.close(scene.now_ns)
    assert scene.is_closed()
    assert scene.line.dial_due() is None


def test_a_connection_that_comes_when_the_line_is_closed_is_over_at_once() -> None:
    scene, asker = wired(QUESTION)
    scene.line.close(scene.now_ns)
    scene.line.connected(scene.now_ns)
    assert scene.line.is_over()
    scene.line.lost("hung up", scene.now_ns)
    assert scene.line.dial_due() is None
    assert asker.opened_count == 0


def test_a_line_has_one_connection_at_a_time() -> None:
    scene, _ = wired()
    scene.connect()
    with pytest.raises(Misuse, match="one connection"):
        scene.line.connected(scene.now_ns)


def test_sessions_are_called_at_their_deadlines_even_without_a_connection() -> None:
    scene, asker = wired()
    asker.due_ns = 5_000
    assert scene.line.next_deadline() == 5_000
    scene.pump()
    assert asker.rooms == [0]


def test_callbacks_are_handed_over_once_in_order() -> None:
    scene, _ = wired()
    done: list[int] = []
    for number in range(3):
        scene.line.run_later(partial(done.append, number))
    for callback in scene.line.callbacks():
        callback()
    assert done == [0, 1, 2]
    assert scene.line.callbacks() == []


def test_a_wait_that_was_asked_for_is_the_least() -> None:
    backoff = RetryDelays(SeededRng(1), first_ms=10, most_ms=100)
    assert all(1_000e6 <= backoff.next_ns(1_000) <= 1_050e6 for _ in range(20))


@pytest.mark.parametrize("options", [{"backoff_first_ms": 0}, {"backoff_first_ms": 9_000}, {"drain_ms": -1}])
def test_options_that_cannot_be_right_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(Misuse):
        ReconnectOptions(**options)  # type: ignore[arg-type]


def test_produce_is_asked_with_its_batch_only() -> None:
    """A session's mistake is its own: it is raised where it was made."""
    scene, _ = wired(Produce("orders"))
    with pytest.raises(Misuse, match="1 belong"):
        scene.connect()
