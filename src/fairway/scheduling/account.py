"""What one connection has used of the loop.

An actor has an account of time of its own, for all who use it. A request counts against both: its actor and its
connection. So a connection that uses a hundred actors gets the time of one connection, and an actor that a hundred
connections use gets the time of one actor (`order`).

Each request of a connection starts, in virtual time, where the one before it is expected to end. What that one really
took is known later, and moves the start of those to come, though not before that of one which may still be waiting:
otherwise a request would overtake it. Requests that wait already are moved when their turn comes, if their connection
has used more by then than was expected: a thousand requests that cost forty times what others do would otherwise all
be served as cheap ones.
"""

from __future__ import annotations

COST_NS = 50_000.0  # of a request whose connection nobody knows yet: a small produce, about


class Account:
    """`start_ns`: where its last request starts. `end_ns`: where that one is expected to end. `cost_ns`: what a request
    of it takes, by experience. `served_ns`: where the request that was served last really ended."""

    __slots__ = ("cost_ns", "end_ns", "is_new", "served_ns", "start_ns")

    def __init__(self) -> None:
        self.start_ns = 0.0
        self.end_ns = 0.0
        self.served_ns = 0.0
        self.cost_ns = COST_NS
        self.is_new = True  # none of its requests was handled yet
