"""A consumer in a cluster: one consumer session on each broker group of its subject, used as one session.

Each broker group numbers its messages by itself and knows nothing of the others. So a slow or absent group holds up
nobody: the consumer takes messages from every group that has some, by turns and in equal shares.

When the subject gains a broker group, the consumer joins there from the first message on: none of these messages is
older than the consumer. When the subject loses a group, the consumer leaves that group as soon as the messages taken
from there are settled.

The caller holds the consumer's lock; this module takes the lock of each connection. Each session reports its news with
`run_later`, without a lock, and `noticed` passes them on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any, Generic

from fairway.client.client_log import ClientLog, logged_session
from fairway.client.core import ConnectionT
from fairway.errors import FairwayError
from fairway.names import GroupName
from fairway.protocol.consumer_options import ConsumerCounts, ConsumerOptions
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import DecodedBatches, Message, ack_all
from fairway.protocol.line import Line
from fairway.protocol.messages import Whence
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng


class NewsLater:
    """Calls `noticed` after the news of one session, later and without a lock; once for all news until then."""

    def __init__(self, line: Line, noticed: Callable[[], None]) -> None:
        self._line = line
        self._noticed = noticed
        self._is_told = False

    def __call__(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._line.run_later(self._tell)

    def _tell(self) -> None:
        self._is_told = False
        self._noticed()


class BrokerGroupSession(Generic[ConnectionT]):
    """The consumer's session on the connection to one broker group."""

    def __init__(self, name: str, connection: ConnectionT, session: ConsumerSession) -> None:
        self.name = name
        self.connection = connection
        self.session = session

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self.connection.link.lock


class ClusterConsumer(Generic[ConnectionT]):
    """All sessions of one consumer, behind the interface of one."""

    def __init__(
        self,
        options: ConsumerOptions,
        clock: Clock,
        rng: Rng,
        lock: AbstractContextManager[Any],
        announce: Callable[[], None],
        log: ClientLog | None = None,
    ) -> None:
        """`announce` is called under the lock when something has changed."""
        self.consumer = options.consumer or f"c-{rng.bits(64):016x}"
        self.group = str(GroupName.parse(f"{options.group}.{self.consumer}")) if options.is_broadcast else options.group
        self.subject = options.subject
        self.is_paused = False
        self._options = replace(options, consumer=self.consumer)
        self._clock = clock
        self._rng = rng
        self._lock = lock
        self._announce = announce
        self._log = log
        self._decoded = DecodedBatches(options.decoded_bytes_max)  # of all sessions together
        # Replaced, never changed: some callers read the tuple without the lock.
        self._joined: tuple[BrokerGroupSession[ConnectionT], ...] = ()
        self._leaving: tuple[BrokerGroupSession[ConnectionT], ...] = ()
        self._told: tuple[dict[str, ConnectionT], Sequence[str]] = {}, ()  # the arguments of the last `follow`
        self._is_placed = False  # the first route has arrived, even one without broker groups
        self._is_off = False  # the consumer group is switched off in the whole cluster
        self._is_draining = False
        self._take_count = 0
        self._past = ConsumerCounts()  # of sessions that have ended

    # --- following the subject ---------------------------------------------------------------------------------------

    def follow(self, connections: dict[str, ConnectionT], paused: Sequence[str]) -> None:
        """Join and leave broker groups, so that these are the consumer's. Called without any lock."""
        with self._lock:
            self._told = connections, paused
            if self._is_draining:
                return
            self._switch(self.group in paused or self._options.group in paused)
            gone = [joined for joined in self._joined if joined.name not in connections]
            known = {joined.name for joined in (*self._joined, *self._leaving)}
            self._joined = tuple(joined for joined in self._joined if joined.name in connections)
            self._leaving += tuple(gone)
            for joined in gone:
                with joined.lock:
                    joined.session.drain(self._clock.monotonic_ns())
            self._joined += tuple(
                self._new_session(name, connection) for name, connection in connections.items() if name not in known
            )
            self._is_placed = True
            self._announce()
        for joined in (*self._joined, *gone):
            joined.connection.link.stir()

    def _new_session(self, name: str, connection: ConnectionT) -> BrokerGroupSession[ConnectionT]:
        start = Whence.EARLIEST if self._is_placed else self._options.start
        options = replace(self._options, start=start)
        line = connection.core.line
        on_news = NewsLater(line, self.noticed)
        session = logged_session(
            *(options, connection, self._clock, self._rng, self._log),
            broker_group=name, on_news=on_news, decoded=self._decoded,
        )  # fmt: skip
        joined = BrokerGroupSession(name, connection, session)
        with joined.lock:
            session.set_take_count(self._take_count)
            if self.is_paused or self._is_off:
                session.pause()
            line.add(session, self._clock.monotonic_ns(), session.detach, is_on_call=True)
        return joined

    def noticed(self) -> None:
        """Take notice of the news of a session, and let go of sessions that have ended. Called without any lock."""
        with self._lock:
            ended = [joined for joined in self._leaving if joined.session.is_finished]
            for joined in ended:
                self._let_go(joined)
            self._leaving = tuple(joined for joined in self._leaving if joined not in ended)
            self._announce()
        if any(joined.name in self._told[0] for joined in ended):
            self.follow(*self._told)  # the route names a group again that the consumer was leaving

    def _let_go(self, joined: BrokerGroupSession[ConnectionT]) -> None:
        with joined.lock:
            joined.connection.core.line.remove(joined.session)
        for each in fields(ConsumerCounts):
            setattr(self._past, each.name, getattr(self._past, each.name) + getattr(joined.session.counts, each.name))

    @property
    def _all(self) -> tuple[BrokerGroupSession[ConnectionT], ...]:
        return self._joined + self._leaving

    @property
    def links(self) -> list[Any]:
        """The links of all sessions, each once."""
        return list(dict.fromkeys(joined.connection.link for joined in self._all))

    # --- Source ------------------------------------------------------------------------------------------------------

    def take_messages(self, most: int | None = None) -> list[Message]:
        """Take messages from all sessions that have some, in equal shares. The first session is the last next time."""
        if self.is_paused or self._is_off:
            return []
        ready = [joined for joined in self._joined if joined.session.may_have_some]
        if len(self._joined) > 1:
            self._joined = (*self._joined[1:], self._joined[0])
        taken: list[Message] = []
        for _ in range(2):  # the second round takes from the others what some sessions did not have
            for number, joined in enumerate(ready):
                share = None if most is None else -(-(most - len(taken)) // (len(ready) - number))
                if share != 0:
                    with joined.lock:
                        taken += joined.session.take_messages(share)
        return taken

    def set_take_count(self, count: int) -> None:
        self._take_count = count
        for joined in self._joined:
            joined.session.set_take_count(count)

    @property
    def waiting_count(self) -> int:
        return sum(joined.session.waiting_count for joined in self._joined)

    @property
    def has_ready(self) -> bool:
        return not (self.is_paused or self._is_off) and any(joined.session.has_ready for joined in self._joined)

    @property
    def is_quiet(self) -> bool:
        return all(joined.session.is_quiet or joined.session.is_finished for joined in self._all)

    @property
    def counts(self) -> ConsumerCounts:
        every = [self._past, *(joined.session.counts for joined in self._all)]
        return ConsumerCounts(*(sum(getattr(each, field.name) for each in every) for field in fields(ConsumerCounts)))

    @property
    def error(self) -> FairwayError | None:
        """The error that has ended the consumer: one session that cannot go on ends them all."""
        return next((joined.session.error for joined in self._all if joined.session.error is not None), None)

    @property
    def is_finished(self) -> bool:
        if self._is_draining:
            return all(joined.session.is_finished for joined in self._all)
        return self.error is not None

    def ack(self, messages: Sequence[Message]) -> None:
        ack_all(messages)

    def pause(self) -> None:
        self.is_paused = True
        self._pause_sessions()

    def resume(self) -> None:
        self.is_paused = False
        self._pause_sessions()

    def _switch(self, is_off: bool) -> None:
        if is_off != self._is_off:
            self._is_off = is_off
            self._pause_sessions()

    def _pause_sessions(self) -> None:
        for joined in self._joined:
            with joined.lock:
                if self.is_paused or self._is_off:
                    joined.session.pause()
                else:
                    joined.session.resume()

    def hand_back(self) -> int:
        count = 0
        for joined in self._joined:
            with joined.lock:
                count += joined.session.hand_back()
        return count

    def drain(self, now_ns: int, until_ns: int | None = None) -> None:
        self._is_draining = True
        for joined in self._all:
            with joined.lock:
                session, line = joined.session, joined.connection.core.line
                session.drain(now_ns, until_ns)
                if not (session.is_finished or session.unconfirmed_count or line.is_open):
                    session.abandon()  # not connected, and the only news for the broker would be the leaving

    def abandon(self) -> None:
        for joined in self._all:
            with joined.lock:
                if not joined.session.is_finished:
                    joined.session.abandon()

    def forget(self) -> None:
        """Let go of all sessions: the consumer has ended."""
        for joined in self._all:
            self._let_go(joined)
        self._joined = self._leaving = ()
