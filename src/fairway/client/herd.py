"""A consumer's sessions in a cluster: one on each broker group of its subject, which together are used as one is.

Each group numbers its messages by itself and knows nothing of the others, so a group that is slow, or away, holds up
nobody: whoever has something is taken from, by turns and in equal shares. Where the subject gains a group, it is joined
there, from the first message on, for none of them is older than the consumer; where it loses one, it is left as soon as
what was taken from there is settled.

The lock of the consumer is held by whoever calls; that of each way is taken here. News come from the ways' own threads
as errands, and `noticed` passes them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any, Generic

from fairway.client.client_log import ClientLog, JoinLog
from fairway.client.ways import WayT
from fairway.errors import FairwayError
from fairway.names import GroupName
from fairway.protocol.consuming import ConsumerSession
from fairway.protocol.consumption import ConsumerCounts, ConsumerOptions
from fairway.protocol.delivery import Message, ack_all
from fairway.protocol.messages import Whence
from fairway.protocol.page import DecodedBatches
from fairway.protocol.session import Ask, ClientSession, RequestOutcome
from fairway.world.clock import Clock
from fairway.world.rng import Rng


class Watched:
    """A session that is watched: after each answer somebody is told, by an errand."""

    def __init__(
        self, inner: ClientSession, run_later: Callable[[Callable[[], None]], None], told: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._run_later = run_later
        self._told = told
        self._is_told = False

    def opened(self, now_ns: int) -> None:
        self._inner.opened(now_ns)

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        return self._inner.asks(room, now_ns)

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        self._inner.answered(token, outcome, now_ns)
        if not self._is_told:
            self._is_told = True
            self._run_later(self._tell)

    def next_deadline(self) -> int | None:
        return self._inner.next_deadline()

    def _tell(self) -> None:
        self._is_told = False
        self._told()


class BrokerGroupSession(Generic[WayT]):
    """One session, on the way to one broker group."""

    __slots__ = ("name", "session", "watched", "way")

    def __init__(self, name: str, way: WayT, session: ConsumerSession, told: Callable[[], None]) -> None:
        self.name = name
        self.way = way
        self.session = session
        self.watched = Watched(session, way.core.line.run_later, told)

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self.way.link.lock


class ClusterConsumer(Generic[WayT]):
    """All sessions of one consumer; what `client.hand` asks of a session, asked of all of them."""

    def __init__(
        self,
        options: ConsumerOptions,
        clock: Clock,
        rng: Rng,
        lock: AbstractContextManager[Any],
        announce: Callable[[], None],
        log: ClientLog | None = None,
    ) -> None:
        """`announce` is called with the lock, when there is news."""
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
        self._decoded = DecodedBatches(options.decoded_bytes_max)  # of all legs together
        self._legs: tuple[
            BrokerGroupSession[WayT], ...
        ] = ()  # replaced, never changed: some look at it without the lock
        self._leaving: tuple[BrokerGroupSession[WayT], ...] = ()
        self._told: tuple[dict[str, WayT], Sequence[str]] = {}, ()  # the last time
        self._is_placed = False  # somebody has said where the subject is, or that it is nowhere yet
        self._is_off = False  # its group is switched off, for the whole cluster
        self._is_draining = False
        self._wish = 0
        self._past = ConsumerCounts()  # of legs that have gone

    # --- where the subject is ----------------------------------------------------------------------------------------

    def follow(self, ways: dict[str, WayT], paused: Sequence[str]) -> None:
        """Without any lock: these are its broker groups now."""
        with self._lock:
            self._told = ways, paused
            if self._is_draining:
                return
            self._switch(self.group in paused or self._options.group in paused)
            gone = [leg for leg in self._legs if leg.name not in ways]
            known = {leg.name for leg in (*self._legs, *self._leaving)}
            self._legs = tuple(leg for leg in self._legs if leg.name in ways)
            self._leaving += tuple(gone)
            for leg in gone:
                with leg.lock:
                    leg.session.drain(self._clock.monotonic_ns())
            self._legs += tuple(self._new_leg(name, way) for name, way in ways.items() if name not in known)
            self._is_placed = True
            self._announce()
        for leg in (*self._legs, *gone):
            leg.way.link.stir()

    def _new_leg(self, name: str, way: WayT) -> BrokerGroupSession[WayT]:
        start = Whence.EARLIEST if self._is_placed else self._options.start
        options = replace(self._options, start=start)
        on_event = None if self._log is None else self._log.listener(way.core.line)
        session = ConsumerSession(
            options,
            self._clock,
            self._rng,
            on_event=on_event,
            on_change=way.link.stir,
            on_join_delayed=JoinLog(way.core.line, self._log),
            broker_group=name,
            decoded=self._decoded,
        )
        leg = BrokerGroupSession(name, way, session, self.noticed)
        with leg.lock:
            session.wish(self._wish)
            if self.is_paused or self._is_off:
                session.pause()
            way.core.line.add(leg.watched, self._clock.monotonic_ns(), session.detach)
        return leg

    def noticed(self) -> None:
        """An errand: something has happened to some leg."""
        with self._lock:
            ended = [leg for leg in self._leaving if leg.session.is_finished]
            for leg in ended:
                self._let_go(leg)
            self._leaving = tuple(leg for leg in self._leaving if leg not in ended)
            self._announce()
        if any(leg.name in self._told[0] for leg in ended):
            self.follow(*self._told)  # it is back

    def _let_go(self, leg: BrokerGroupSession[WayT]) -> None:
        with leg.lock:
            leg.way.core.line.remove(leg.watched)
        for each in fields(ConsumerCounts):
            setattr(self._past, each.name, getattr(self._past, each.name) + getattr(leg.session.counts, each.name))

    @property
    def _all(self) -> tuple[BrokerGroupSession[WayT], ...]:
        return self._legs + self._leaving

    @property
    def links(self) -> list[Any]:
        """Of all legs, each once."""
        return list(dict.fromkeys(leg.way.link for leg in self._all))

    # --- as a session ------------------------------------------------------------------------------------------------

    def take_messages(self, most: int | None = None) -> list[Message]:
        """From all that have something, in equal shares; who was first is last the next time."""
        if self.is_paused or self._is_off:
            return []
        ready = [leg for leg in self._legs if leg.session.may_have_some]
        if len(self._legs) > 1:
            self._legs = (*self._legs[1:], self._legs[0])
        taken: list[Message] = []
        for _ in range(2):  # the second time what some did not have is taken from the others
            for number, leg in enumerate(ready):
                share = None if most is None else -(-(most - len(taken)) // (len(ready) - number))
                if share != 0:
                    with leg.lock:
                        taken += leg.session.take_messages(share)
        return taken

    def wish(self, count: int) -> None:
        self._wish = count
        for leg in self._legs:
            leg.session.wish(count)

    @property
    def waiting_count(self) -> int:
        return sum(leg.session.waiting_count for leg in self._legs)

    @property
    def has_ready(self) -> bool:
        return not (self.is_paused or self._is_off) and any(leg.session.has_ready for leg in self._legs)

    @property
    def is_quiet(self) -> bool:
        return all(leg.session.is_quiet or leg.session.is_finished for leg in self._all)

    @property
    def counts(self) -> ConsumerCounts:
        every = [self._past, *(leg.session.counts for leg in self._all)]
        return ConsumerCounts(*(sum(getattr(each, field.name) for each in every) for field in fields(ConsumerCounts)))

    @property
    def error(self) -> FairwayError | None:
        """Why it ended by itself: one leg that cannot go on ends them all."""
        return next((leg.session.error for leg in self._all if leg.session.error is not None), None)

    @property
    def is_finished(self) -> bool:
        if self._is_draining:
            return all(leg.session.is_finished for leg in self._all)
        return self.error is not None

    def ack(self, messages: Sequence[Message]) -> None:
        ack_all(messages)

    def pause(self) -> None:
        self.is_paused = True
        self._pause_legs()

    def resume(self) -> None:
        self.is_paused = False
        self._pause_legs()

    def _switch(self, is_off: bool) -> None:
        if is_off != self._is_off:
            self._is_off = is_off
            self._pause_legs()

    def _pause_legs(self) -> None:
        for leg in self._legs:
            with leg.lock:
                if self.is_paused or self._is_off:
                    leg.session.pause()
                else:
                    leg.session.resume()

    def hand_back(self) -> int:
        count = 0
        for leg in self._legs:
            with leg.lock:
                count += leg.session.hand_back()
        return count

    def drain(self, now_ns: int, until_ns: int | None = None) -> None:
        self._is_draining = True
        for leg in self._all:
            with leg.lock:
                leg.session.drain(now_ns, until_ns)
                if not (leg.session.is_finished or leg.session.unconfirmed_count or leg.way.core.line.is_open):
                    leg.session.abandon()  # nobody is there to be told, and nothing would be told but that we leave

    def abandon(self) -> None:
        for leg in self._all:
            with leg.lock:
                if not leg.session.is_finished:
                    leg.session.abandon()

    def forget(self) -> None:
        """The consumer has ended."""
        for leg in self._all:
            self._let_go(leg)
        self._legs = self._leaving = ()
