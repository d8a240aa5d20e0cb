"""One line of a synchronous client and the link that carries it: what waits for the other side waits here.

A client has one to its broker. Where the URL names a delay server of its own it has a second one, from the first
message or question that goes there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from fairway.client.asking import AnswerT, Command
from fairway.client.core import (
    ClientCore,
    ClientOptions,
    ConnectionWatch,
    Duration,
    Goal,
    no_answer,
    seconds_of,
    unreachable,
)
from fairway.client.fleet import ClusterClient
from fairway.client.pending import SyncBatch, SyncPending
from fairway.client.spool import SpoolOptions
from fairway.client.spool_keeper import AnySpoolHandle, ClusterSpoolHandle, SpoolHandle
from fairway.errors import BufferFull
from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.line import Line
from fairway.protocol.waiters import Flush
from fairway.world.buffers import Bytes
from fairway.world.clock import Clock
from fairway.world.link import Link
from fairway.world.rng import Rng

T = TypeVar("T")

FIRST_S = 30.0  # for the first attempt to connect to succeed or fail: a host that is up answers much sooner


class SyncServerConnection:
    """A line, its sessions and its link. May be used from any number of threads."""

    def __init__(
        self,
        goal: Goal,
        options: ClientOptions,
        clock: Clock,
        rng: Rng,
        new_link: Callable[[Line, Goal], Link],
        watch: ConnectionWatch | None = None,
    ) -> None:
        self._goal = goal
        self._clock = clock
        self._options = options.producer
        self.core: ClientCore[SyncPending, SyncBatch] = ClientCore(
            clock, rng, options, pending_type=SyncPending, batch_type=self._batch, stores=goal.stores, watch=watch
        )
        self.producing = self.core.producing
        self.link = new_link(self.core.line, goal)
        self.link.start()

    def _batch(self, subject: str, run_later: Callable[[Callable[[], None]], None]) -> SyncBatch:
        return SyncBatch(subject, run_later, self.link)

    def wait_connected(self, patience_s: float) -> None:
        """Return when a connection has been made, now or before; `Unreachable` if that takes too long."""
        link, core = self.link, self.core
        link.wait(core.is_decided, FIRST_S)
        if patience_s and not core.is_connected():
            link.wait(core.is_connected, patience_s)
        if not core.is_connected():
            raise unreachable(self._goal, core.line.trouble)

    def spooling(
        self, options: SpoolOptions, rng: Rng, fleet: ClusterClient[SyncServerConnection] | None
    ) -> AnySpoolHandle:
        """Another way than this one, for what cannot go to the broker now; in a cluster, than all ways of the fleet."""
        if fleet is not None:
            made: AnySpoolHandle = ClusterSpoolHandle(options, fleet, self._clock, rng, post=self._post)
        else:
            with self.link.lock:
                made = SpoolHandle(options, self.core, self._clock, rng, post=self._post, on_change=self.link.stir)
        made.start()
        return made

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        """In a thread of the disk: something is done."""
        with self.link.lock:
            callback(*args)
            self.link.announce()
        self.link.pump()

    # --- sending -----------------------------------------------------------------------------------------------------

    def put(self, add: Callable[[], T], timeout: Duration | None) -> T:
        """Add to what is sent; waits for room where there is none."""
        try:
            return self.put_now(add)
        except BufferFull as full:
            return self.wait_and_put(add, full, timeout)

    def put_now(self, add: Callable[[], T]) -> T:
        """The same without a wait: `BufferFull`."""
        producing = self.producing
        try:
            with self.link.lock:
                added = add()
                is_stirred, producing.is_stirred = producing.is_stirred, False
        except BufferFull:
            if producing.is_crammed:  # room is made, for the next time
                self.link.pump()
            raise
        if is_stirred:
            self.link.pump()
        return added

    def wait_and_put(self, add: Callable[[], T], full: BufferFull, timeout: Duration | None) -> T:
        """There was no room: wait for it, in turn, and try again; unless that is not wanted."""
        if self._options.when_full == "raise":
            raise full
        wait_ns = self._options.block_ms * NS_PER_MS if timeout is None else int(seconds_of(timeout) * 1e9)
        link, end_ns = self.link, self._clock.monotonic_ns() + wait_ns
        while not link.in_reader and self._clock.monotonic_ns() < end_ns:
            has_room: list[bool] = []
            with link.lock:
                cancel = self.producing.when_room(full.messages, full.size_bytes, partial(has_room.append, True))
            link.pump()
            try:
                link.wait(partial(bool, has_room), self.left_s(end_ns))
            finally:
                with link.lock:
                    cancel()
            try:
                with link.lock:
                    added = add()
            except BufferFull as still:
                full = still
            else:
                link.pump()
                return added
        raise full

    def begin_flush(self) -> Flush:
        """Let everything leave; `flushed` waits for it."""
        with self.link.lock:
            flushing = self.producing.flush()
        self.link.pump()
        return flushing

    def flushed(self, flushing: Flush, end_ns: int | None) -> bool:
        """Whether everything is settled by then."""
        return self.link.wait(lambda: flushing.is_done, None if end_ns is None else self.left_s(end_ns))

    def take_unseen(self) -> list[Exception]:
        with self.link.lock:
            return self.producing.take_unseen()

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, command: Command[AnswerT], timeout: Duration) -> tuple[AnswerT, Sequence[Bytes]]:
        """The answer, and what is attached to it."""
        link = self.link
        with link.lock:
            question = self.core.questions.put(command)
        link.pump()
        try:
            if not link.wait(question.is_answered, seconds_of(timeout)):
                raise no_answer(question, timeout, self.core.line.trouble)
        finally:
            question.is_abandoned = True
        return question.answer()

    # --- ending ------------------------------------------------------------------------------------------------------

    def left_s(self, end_ns: int) -> float:
        return max(end_ns - self._clock.monotonic_ns(), 0) / 1e9

    def hang_up(self, end_ns: int) -> None:
        """Give up what is not stored, say goodbye, end the link."""
        link, line = self.link, self.core.line
        with link.lock:
            self.producing.give_up("the client was closed before an answer came")
            line.close(self._clock.monotonic_ns(), patience_ms=self._goal.patience_ms)
            link.announce()
        link.pump()
        if not link.in_reader:
            link.wait(lambda: line.is_closed, min(1.0, self.left_s(end_ns)))
        link.close(1.0)
        for errand in line.errands():
            errand()
