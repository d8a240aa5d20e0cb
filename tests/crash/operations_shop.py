"""Two programs that go on while others look after the cluster: one sends numbered orders, one takes and acks them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import fairway

if TYPE_CHECKING:
    from fairway.client.sync.connection import SyncPending

PATIENCE_S = 90.0  # a machine that is busy is slow, not broken
_HANDFUL = 5
_UNDER_WAY_MAX = 1_000
_PAUSE_S = 0.05
_TAKE_S = 0.5
_SEND_S = 0.1  # between two handfuls
_FLUSH_S = 1.0


class Shop:
    """What they have seen. Nothing in here expects trouble: whatever a client raises is a failure."""

    def __init__(self, url: str, subject: str) -> None:
        self.subject = subject
        self.sent = 0
        self.stored: set[int] = set()
        self.acked: dict[int, tuple[str, int]] = {}  # broker group and sequence, once the ack is confirmed
        self.is_sending = True
        self.is_taking = True
        self.troubles: list[str] = []
        self._url = url
        self._places: dict[int, tuple[str, int]] = {}
        self._is_over = False
        self._has_left = threading.Event()
        self._threads = [threading.Thread(target=self._guard, args=(work,)) for work in (self._send, self._take)]

    def _guard(self, work: Callable[[fairway.Client], None]) -> None:
        try:
            with fairway.connect(self._url) as client:
                work(client)
        except Exception as error:  # whatever reaches a user's code
            self.troubles.append(f"{work.__name__}: {type(error).__name__}: {error}")

    # --- the two programs --------------------------------------------------------------------------------------------

    def _send(self, client: fairway.Client) -> None:
        waiting: dict[int, SyncPending] = {}
        while waiting or not self._is_over:
            if self.is_sending and not self._is_over and len(waiting) < _UNDER_WAY_MAX:
                for number in range(self.sent, self.sent + _HANDFUL):
                    waiting[number] = client.send(self.subject, b"%d" % number, key=f"customer {number % 7}")
                self.sent += _HANDFUL
            for number in [number for number, pending in waiting.items() if pending.done()]:
                waiting.pop(number).result(0)
                self.stored.add(number)
            time.sleep(_SEND_S)

    def _take(self, client: fairway.Client) -> None:
        while not self._is_over:
            if self.is_taking:
                with client.consumer(self.subject, group="billing") as consumer:
                    self._has_left.clear()
                    self._work(consumer)
                self._has_left.set()
            time.sleep(_PAUSE_S)

    def _work(self, consumer: fairway.Consumer) -> None:
        while self.is_taking and not self._is_over:
            held = [self._hold(message) for message in consumer.take(timeout=_TAKE_S)]
            while held and not consumer.flush(_FLUSH_S) and not self._is_over:
                pass
            self.acked.update(held)

    def _hold(self, message: fairway.Message) -> tuple[int, tuple[str, int]]:
        number, place = int(message.payload), (message.broker_group, message.sequence)
        if number in self.acked:
            self.troubles.append(f"order {number} comes from {place} again, although its ack was confirmed")
        if self._places.setdefault(number, place) != place:
            self.troubles.append(f"order {number} is stored twice: at {self._places[number]} and {place}")
        message.ack()
        return number, place

    # --- looking on --------------------------------------------------------------------------------------------------

    def until(self, what: str, is_so: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_so():
            assert not self.troubles, self.troubles
            said = f"{self.sent} sent, {len(self.stored)} stored, {len(self.acked)} acked"
            assert time.monotonic() < end, f"in vain: {what}; {said}"
            time.sleep(_PAUSE_S)

    def until_it_goes_on(self) -> None:
        """What is sent from now on is stored, handed out and acked."""
        first = self.sent + _HANDFUL
        self.until("orders go through", lambda: self.acked.keys() >= set(range(first, first + _HANDFUL)))

    def until_quiet(self) -> None:
        """No more orders; everything sent has its receipt."""
        self.is_sending = False
        self.until("everything is stored", lambda: len(self.stored) == self.sent)

    def rest(self) -> None:
        """Nobody takes anything, until `is_taking` is set again."""
        self.is_taking = False
        self.until("the consumer has left", self._has_left.is_set)

    def close(self, lost: frozenset[int] = frozenset()) -> None:
        """To the end: every order has come, except these."""
        self.is_taking = True
        self.until_quiet()
        self.until("everything is acked", lambda: self.acked.keys() >= self.stored - lost)
        self.end()
        assert not self.troubles, self.troubles

    @property
    def is_closed(self) -> bool:
        return self._is_over

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(PATIENCE_S)


@contextmanager
def shop(url: str, subject: str) -> Iterator[Shop]:
    """Open for business; in the end nothing is lost, nothing is stored twice, and nothing came after its ack."""
    opened = Shop(url, subject)
    opened.start()
    try:
        opened.until_it_goes_on()
        yield opened
        if not opened.is_closed:
            opened.close()
    finally:
        opened.end()
