"""The thread that does a candidate's asking, whatever the form of the election: one thing at a time, none of them lost.

A candidate's calls, and what other threads have to tell, are notes to it. A form says what there is to be done now
(`_attend`), how to have no place in the line (`_withdraw`), and how to end (`_leave`).
"""

from __future__ import annotations

import enum
import queue

from fairway.career.election import ElectionListener
from fairway.errors import Misuse
from fairway.world.workers import Workers


class ElectionTask(enum.Enum):
    """What the thread is to do, or to know."""

    CAMPAIGN = "campaign"
    RESIGN = "resign"
    CLOSE = "close"
    LOOK = "look"  # something may have changed


class ElectionThread:
    """An election with a thread of its own."""

    def __init__(self) -> None:
        self._notes: queue.SimpleQueue[ElectionTask] = queue.SimpleQueue()
        self._workers = Workers()
        self._listener: ElectionListener | None = None
        self._is_running = False  # wants to be elected, or is

    # --- the port ----------------------------------------------------------------------------------------------------

    def open(self, listener: ElectionListener) -> None:
        if self._listener is not None:
            raise Misuse("this election has its candidate: make another one")
        self._listener = listener
        self._workers.start("fairway-election", lambda: self._serve(listener))

    def campaign(self) -> None:
        self._notes.put(ElectionTask.CAMPAIGN)

    def resign(self) -> None:
        self._notes.put(ElectionTask.RESIGN)

    def close(self) -> None:
        self._notes.put(ElectionTask.CLOSE)

    # --- the form ----------------------------------------------------------------------------------------------------

    def _attend(self, listener: ElectionListener) -> float | None:
        """Whatever is to be done now; how long until there is something again, though nobody leaves a note."""
        raise NotImplementedError

    def _withdraw(self) -> None:
        """Have no place in the line, nor one on its way."""
        raise NotImplementedError

    def _leave(self) -> None:
        """The end: nothing is asked of it after this."""

    # --- the thread --------------------------------------------------------------------------------------------------

    def _serve(self, listener: ElectionListener) -> None:
        try:
            self._serve_until_closed(listener)
        except Exception as error:  # a bug: nobody would be elected any more, in silence
            listener.failed(error)
            raise
        finally:
            listener.closed()

    def _serve_until_closed(self, listener: ElectionListener) -> None:
        wait_s: float | None = None
        while (note := self._next_note(wait_s)) is not ElectionTask.CLOSE:
            if note is ElectionTask.CAMPAIGN:
                self._is_running = True
            elif note is ElectionTask.RESIGN:
                self._is_running = False
                self._withdraw()
                listener.resigned()
            wait_s = self._attend(listener) if self._is_running else None
        self._is_running = False
        self._withdraw()
        self._leave()

    def _next_note(self, wait_s: float | None) -> ElectionTask | None:
        try:
            return self._notes.get(timeout=wait_s)
        except queue.Empty:
            return None
