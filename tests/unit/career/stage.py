"""Careers that write down what happens to them, and candidates in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fairway
from fairway.career.election import Election

WAIT_S = 30.0  # for anything that should take a moment: a failing test ends, a slow machine does not fail it


def until(is_so: Callable[[], bool]) -> None:
    waiter = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if is_so():
            return
        waiter.wait(0.02)
    raise AssertionError("it did not come about")


class Diary:
    """What careers write into, in one order."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._changed = threading.Condition()

    def note(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    @property
    def lines(self) -> list[str]:
        with self._changed:
            return list(self._lines)

    def until(self, line: str, times: int = 1) -> None:
        """Wait for it."""
        self.until_so(lambda lines: lines.count(line) >= times)

    def until_so(self, is_so: Callable[[list[str]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: is_so(self._lines), WAIT_S), self._lines


class Clerk(fairway.Career):
    """Notes each of its parts; each `execute` waits for `go` where there is one."""

    name = "clerk"

    def __init__(self, who: str, diary: Diary, *, pieces: int | None = None) -> None:
        self.who = who
        self.diary = diary
        self.tokens: list[int] = []
        self.pieces = 0
        self.pieces_in_reign: list[int] = []
        self.go: threading.Event | None = None
        self._pieces_left = pieces

    def inaugurate(self) -> None:
        self.diary.note(f"{self.who} inaugurates")

    def execute(self, token: int) -> bool:
        if not self.tokens or self.tokens[-1] != token:
            self.tokens.append(token)
            self.diary.note(f"{self.who} executes")
        if self.go is not None:
            assert self.go.wait(WAIT_S)
        self.leadership.check()
        self.pieces += 1
        threading.Event().wait(0.002)
        if self._pieces_left is None:
            return True
        self._pieces_left -= 1
        return self._pieces_left > 0

    def hand_over(self) -> None:
        self.pieces_in_reign.append(self.pieces)
        self.diary.note(f"{self.who} hands over")


class Candidate:
    """A candidacy in a thread of its own."""

    def __init__(self, career: fairway.Career, election: Election) -> None:
        self.career = career
        self.election = election
        self.candidacy = fairway.Candidacy(career, election)
        self.raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.candidacy.run()
        except BaseException as error:  # whoever ends it looks at it
            self.raised = error

    def end(self) -> None:
        self.candidacy.stop()
        self.join()

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@contextmanager
def running(*candidates: Candidate) -> Iterator[None]:
    """They end with the test, in the order in which they began."""
    try:
        yield
    finally:
        for candidate in candidates:
            candidate.end()
