"""Leases that last as long as a connection: for a net in memory, which reports the end of a connection at once.

On a real network a consumer renews its lease, because nothing else shows that it is alive. In memory the broker sees
the connection end, so a renewal would only repeat what the broker knows. A member's lease stands still while the
connection that joined is there, and runs from the moment at which that connection ends. The consumer is told a lease
that it never has to renew.
"""

from __future__ import annotations

from fairway.broker.desk import GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.names import ConsumerName
from fairway.serving.requests import Requester

LEASE_MS = 10 * 365 * 24 * 3_600_000  # ten years: longer than any test lets pass, and a timer on every loop


class ConnectionLeases:
    """The members of all groups, by the connection that their leases depend on."""

    def __init__(self, desk: GroupCoordinator) -> None:
        self._desk = desk
        self._members: dict[Requester, dict[tuple[GroupHost, ConsumerName], None]] = {}

    def joined(self, host: GroupHost, name: ConsumerName, session: Requester) -> None:
        """The member's lease depends on this connection from now on."""
        self._members.setdefault(session, {})[host, name] = None
        for each in _with_inbox(host):
            each.law.stop_lease(name)

    def left(self, host: GroupHost, name: ConsumerName, session: Requester) -> None:
        self._members.get(session, {}).pop((host, name), None)

    def lost(self, session: Requester) -> None:
        """The connection has ended: the leases of the members that it spoke for run from now on."""
        now_ns = self._desk.clock.monotonic_ns()
        for host, name in self._members.pop(session, {}):
            if not self._desk.groups.has(host) or host.sessions.has_other(name, session):
                continue
            for each in _with_inbox(host):
                each.law.start_lease(name, now_ns=now_ns)
                self._desk.rearm(each)


def _with_inbox(host: GroupHost) -> tuple[GroupHost, ...]:
    return (host,) if host.inbox is None else (host, host.inbox)
