"""The account of a connection: the loop time that it has used.

A request counts against two accounts: the time of its actor, for all connections that use the actor, and the account of
its connection. So a connection that uses 100 actors gets the time of one connection. An actor that 100 connections use
gets the time of one actor (`virtual_time`).

Each request of a connection starts, in virtual time, at the expected end of the request before it. The real cost is
known later and moves the start of later requests. No start moves before the start of a request that may still wait:
otherwise a later request would overtake that request.

The scheduler also moves waiting requests when their turn comes, if their connection has used more than expected by
then. Otherwise 1,000 requests that each cost 40 times the usual would all be served as cheap ones.
"""

from __future__ import annotations

COST_NS = 50_000.0  # of a request of a new connection: about a small produce


class Account:
    """The virtual times of one connection.

    `start_ns`: the start of its last request. `end_ns`: the expected end of that request. `cost_ns`: the usual cost of
    a request, by experience. `served_ns`: the real end of the request that was served last.
    """

    __slots__ = ("cost_ns", "end_ns", "is_new", "served_ns", "start_ns")

    def __init__(self) -> None:
        self.start_ns = 0.0
        self.end_ns = 0.0
        self.served_ns = 0.0
        self.cost_ns = COST_NS
        self.is_new = True  # none of its requests was handled yet
