"""Chooses the broker group for each message of one subject.

Groups take turns, so that each gets as many messages. The turn changes between batches, not between messages: otherwise
batches would be half as full. A group that takes no messages now (the client is not connected to it, or has to send it
batches again) is passed over while another group takes them.

In an ordered subject the messages of a key go to one group, the same from every client, and wait for that group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from fairway.client.cluster.server_connection import ConnectionT
from fairway.lookup.routes import home
from fairway.protocol.route_messages import SubjectRoute


class Partitioner(Generic[ConnectionT]):
    """Chooses for one subject: for its delayed messages (`is_due`) or for its other messages."""

    __slots__ = ("_at", "_connections", "_names", "connection", "is_due", "is_ordered", "subject", "why")

    def __init__(self, subject: str, connection: ConnectionT, *, is_due: bool) -> None:
        self.subject = subject
        self.is_due = is_due
        self.is_ordered = False
        self.connection = connection  # takes messages without a key now
        self.why = ""  # why no group takes messages
        self._names: tuple[str, ...] = ()
        self._connections: tuple[ConnectionT, ...] = ()
        self._at = -1

    @property
    def connections(self) -> tuple[ConnectionT, ...]:
        """The connections to the groups that take the subject's messages; empty if none is known."""
        return self._connections

    @property
    def names(self) -> tuple[str, ...]:
        """The names of these groups, in the same order."""
        return self._names

    def place(self, route: SubjectRoute, connections: Sequence[ConnectionT], nowhere: ConnectionT) -> None:
        """Use these connections from now on.

        A partitioner that still points to `nowhere` stays there: the caller sends on what waits there first.
        """
        self.is_ordered = route.is_ordered
        self.why = route.why
        self._names, self._connections = tuple(route.writable), tuple(connections)
        if not connections:
            self.connection = nowhere
        elif self.connection not in (nowhere, *connections):
            self.turn()

    def pick(self, key: str | None) -> ConnectionT:
        """The connection for one more message."""
        if len(self._connections) < 2:
            return self.connection
        if self.is_ordered and key is not None:
            return self._connections[home(key, self._names)]
        connection = self.connection
        if connection.producing.is_filling(self.subject, self.is_due) and connection.core.line.is_open:
            return connection
        return self.turn()

    def turn(self) -> ConnectionT:
        """Give the turn to the next connection."""
        if self._connections:
            self.connection = self.next_connection()
        return self.connection

    def next_connection(self, key: str | None = None) -> ConnectionT:
        """The next connection that takes messages, or just the next if none does. An ordered key has its own."""
        if self.is_ordered and key is not None:
            return self._connections[home(key, self._names)]
        count = len(self._connections)
        turns = [(self._at + step) % count for step in range(1, count + 1)]
        self._at = next((at for at in turns if self._takes(self._connections[at])), turns[0])
        return self._connections[self._at]

    def another(self, connection: ConnectionT) -> ConnectionT | None:
        """Another connection that takes messages now. None if there is none, or if the subject is ordered."""
        if self.is_ordered:
            return None
        return next((each for each in self._connections if each is not connection and self._takes(each)), None)

    def _takes(self, connection: ConnectionT) -> bool:
        producing = connection.producing
        return (
            connection.core.line.is_open
            and producing.is_flowing(self.subject, is_due=self.is_due)
            and producing.room_for(1, 0)
        )

    def shares(self, keys: Iterable[str | None]) -> dict[ConnectionT, list[int]]:
        """Divide many messages among the connections, as indexes into the list, in order."""
        found: dict[ConnectionT, list[int]] = {}
        for index, key in enumerate(keys):
            connection = self.connection if key is None else self._connections[home(key, self._names)]
            found.setdefault(connection, []).append(index)
        return found
