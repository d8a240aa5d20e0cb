"""Candidates in threads, in an election of one process: who rules, what stops it, and what it leaves behind."""

from __future__ import annotations

import threading

import pytest

import fairway
from fairway.career import LocalBallot, LocalElection
from fairway.errors import Deposed, Misuse
from tests.unit.career.stage import WAIT_S, Candidate, Clerk, Diary, running, until


def stand(who: str, diary: Diary, ballot: LocalBallot, kind: type[Clerk] = Clerk) -> Candidate:
    return Candidate(kind(who, diary), ballot.election())


def clerk_of(candidate: Candidate) -> Clerk:
    assert isinstance(candidate.career, Clerk)
    return candidate.career


def election_of(candidate: Candidate) -> LocalElection:
    assert isinstance(candidate.election, LocalElection)
    return candidate.election


def test_next_one_is_inaugurated_when_the_one_before_has_handed_over() -> None:
    diary, ballot, leaving = Diary(), LocalBallot(), threading.Event()

    class Slow(Clerk):
        def hand_over(self) -> None:
            assert leaving.wait(WAIT_S)
            super().hand_over()

    first = stand("first", diary, ballot, Slow)
    diary.until("first executes")
    second = stand("second", diary, ballot)
    with running(first, second):
        first.candidacy.stop()
        until(lambda: not clerk_of(first).leadership.holds or clerk_of(first).pieces > 0)
        assert "second inaugurates" not in diary.lines
        leaving.set()
        diary.until("second executes")
    assert diary.lines == [f"{who} {does}" for who in ("first", "second")
                           for does in ("inaugurates", "executes", "hands over")]  # fmt: skip


def test_suspended_session_stops_execution_until_it_is_confirmed() -> None:
    diary, ballot = Diary(), LocalBallot()
    first = stand("first", diary, ballot)
    with running(first):
        diary.until("first executes")
        election_of(first).suspend()
        until(lambda: not clerk_of(first).leadership.holds)
        waiter = threading.Event()
        waiter.wait(0.05)  # the piece in hand is finished
        pieces = clerk_of(first).pieces
        waiter.wait(0.1)
        assert clerk_of(first).pieces == pieces
        election_of(first).resume()
        until(lambda: clerk_of(first).pieces > pieces)
        assert "first hands over" not in diary.lines


def test_lost_session_ends_the_reign_and_the_candidate_stands_again() -> None:
    diary, ballot = Diary(), LocalBallot()
    first = stand("first", diary, ballot)
    diary.until("first executes")
    second = stand("second", diary, ballot)
    with running(second, first):
        election_of(first).expire()
        diary.until("first hands over")
        diary.until("second executes")
        second.end()
        diary.until("first executes", times=2)
        assert clerk_of(first).tokens[0] < clerk_of(second).tokens[0] < clerk_of(first).tokens[1]


def test_waiting_candidate_whose_session_is_lost_stands_again() -> None:
    diary, ballot = Diary(), LocalBallot()
    first = stand("first", diary, ballot)
    diary.until("first executes")
    second = stand("second", diary, ballot)
    with running(first, second):
        until(lambda: len(ballot._queue) == 2)
        election_of(second).expire()
        first.end()
        diary.until("second executes")


def test_execute_that_returns_false_lets_the_others_have_their_turn() -> None:
    diary, ballot = Diary(), LocalBallot()
    go = threading.Event()
    first = Clerk("first", diary, pieces=2)
    first.go = go
    one = Candidate(first, ballot.election())
    diary.until("first executes")
    two = stand("second", diary, ballot)
    with running(two, one):
        until(lambda: len(ballot._queue) == 2)
        go.set()
        diary.until("second executes")
        two.end()
        diary.until("first inaugurates", times=2)


def test_mandate_can_be_laid_down_from_within_and_from_another_thread() -> None:
    diary, ballot = Diary(), LocalBallot()
    first = stand("first", diary, ballot)
    diary.until("first executes")
    second = stand("second", diary, ballot)
    with running(first, second):
        until(lambda: len(ballot._queue) == 2)
        clerk_of(first).leadership.step_down()
        diary.until("second executes")
        clerk_of(second).leadership.step_down()
        diary.until("first executes", times=2)


@pytest.mark.parametrize("in_hand", ["finish", "abort"])
@pytest.mark.parametrize("event", ["suspend", "stop", "expire"])
def test_what_is_in_hand_is_finished_or_aborted(in_hand: str, event: str) -> None:
    diary, ballot = Diary(), LocalBallot()
    kind = type("Kind", (Clerk,), {"in_hand": in_hand})
    clerk = kind("first", diary)
    clerk.go = threading.Event()
    first = Candidate(clerk, ballot.election())
    with running(first):
        diary.until("first executes")
        if event == "stop":
            first.candidacy.stop()
        else:
            getattr(election_of(first), event)()
        clerk.go.set()
        is_finished = in_hand == "finish" and event != "expire"  # nothing of a reign that is over goes on
        if event == "suspend":
            threading.Event().wait(0.1)
            assert clerk.pieces == int(is_finished)
        else:
            diary.until("first hands over")
            assert clerk.pieces_in_reign[0] == int(is_finished)


def test_deposed_by_a_fence_ends_the_reign_and_not_the_candidacy() -> None:
    diary, ballot = Diary(), LocalBallot()

    class Fenced(Clerk):
        def execute(self, token: int) -> bool:
            super().execute(token)
            if len(self.tokens) == 1:
                raise Deposed(self.name, token, "token 99 was seen")
            return True

    first = stand("first", diary, ballot, Fenced)
    with running(first):
        diary.until("first executes", times=2)
        assert diary.lines[:3] == ["first inaugurates", "first executes", "first hands over"]
    assert first.raised is None


@pytest.mark.parametrize(
    ("part", "lines"),
    [
        ("inaugurate", ["first inaugurates"]),
        ("execute", ["first inaugurates", "first executes", "first hands over"]),
        ("hand_over", ["first inaugurates", "first executes", "first hands over"]),
    ],
)
def test_what_a_part_raises_ends_the_candidacy_and_the_office_goes_on(part: str, lines: list[str]) -> None:
    diary, ballot = Diary(), LocalBallot()

    def fails(self: Clerk, *args: int) -> bool:
        getattr(Clerk, part)(self, *args)
        raise ZeroDivisionError(part)

    first = stand("first", diary, ballot, type("Failing", (Clerk,), {part: fails}))
    if part == "hand_over":
        diary.until("first executes")
        first.candidacy.stop()
    first.join()
    assert isinstance(first.raised, ZeroDivisionError)
    assert diary.lines == lines
    with running(stand("second", diary, ballot)):
        diary.until("second executes")


def test_execute_that_forgets_to_answer_is_told() -> None:
    class Forgetful(Clerk):
        def execute(self, token: int) -> bool:
            return None  # type: ignore[return-value]

    first = stand("first", Diary(), LocalBallot(), Forgetful)
    first.join()
    assert isinstance(first.raised, Misuse)
    assert "Forgetful.execute returned None: it says True to go on, or False" in str(first.raised)


def test_candidate_that_never_ruled_ends_without_a_word() -> None:
    diary, ballot = Diary(), LocalBallot()
    first = stand("first", diary, ballot)
    diary.until("first executes")
    second = stand("second", diary, ballot)
    until(lambda: len(ballot._queue) == 2)
    second.end()
    assert second.raised is None
    first.end()
    assert not any(line.startswith("second") for line in diary.lines)


def test_what_cannot_be_right_is_said_at_once() -> None:
    class Nameless(fairway.Career):
        pass

    class Odd(Clerk):
        in_hand = "drop"  # type: ignore[assignment]

    ballot = LocalBallot()
    with pytest.raises(Misuse, match="Nameless has no name"):
        fairway.Candidacy(Nameless(), ballot.election())
    with pytest.raises(Misuse, match="'finish'ed, or 'abort'ed"):
        fairway.Candidacy(Odd("x", Diary()), ballot.election())
    with pytest.raises(Misuse, match=r"fairway\.aio\.elect"):
        fairway.Candidacy(object(), ballot.election())  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="is not in office"):
        _ = Clerk("x", Diary()).leadership
    with pytest.raises(Misuse, match="has no candidate yet"):
        ballot.election().suspend()
    with pytest.raises(NotImplementedError, match=r"execute\(token\) is what a career is for"):
        Nameless().execute(1)
