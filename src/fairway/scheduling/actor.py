"""An actor: a mailbox, the time it has used, and two independent facts that decide whether it may run.

    run state      IDLE ── work arrives ──► READY ── picked ──► RUNNING ── slice ends ──► READY or IDLE
    suspensions    a count: `suspend` adds one, `Scheduler.resume` takes one off; above zero no request is handled

A processor suspends its actor for short work elsewhere, such as a cold read. A long poll does not suspend: its
processor returns WAIT. Nor does a paused group: its processor answers for the pause. A suspended actor finishes the
request at hand, still expires overdue requests, and is never removed. So the processor may keep a reference to it.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable

from fairway.errors import invariant
from fairway.scheduling.mailbox import NEVER_NS, Mailbox


class RunState(enum.Enum):
    IDLE = "idle"
    READY = "ready"
    RUNNING = "running"


IDLE, READY, RUNNING = RunState  # reading a member through its class costs 0.1 µs on 3.11, and a turn only 1 µs


class Actor:
    """One actor. Processors call `suspend` and `charge`, and may read the figures. The rest belongs to the
    scheduler."""

    __slots__ = (
        "alarm_ns",
        "byte_cost_ns",
        "bytes_served",
        "elsewhere_ns",
        "idle_since_ns",
        "is_background",
        "key",
        "mailbox",
        "owed_ns",
        "place",
        "rank",
        "run",
        "served_ns",
        "slices",
        "suspensions",
        "sweep_ns",
        "swept_until_ns",
        "virtual_ns",
        "weight",
    )

    def __init__(self, key: Hashable, weight: float, byte_cost_ns: float, now_ns: int) -> None:
        self.key = key
        self.mailbox = Mailbox()
        self.run = IDLE
        self.suspensions = 0
        self.weight = weight
        self.byte_cost_ns = byte_cost_ns
        self.virtual_ns = 0.0  # time used, divided by weight: the actor with the least runs next
        self.owed_ns = 0.0  # time used that is not in `virtual_ns` yet
        self.rank = 0.0  # its rank among the ready actors, from what its accounts had used
        self.place = 0  # the number of its entry among the ready actors; other entries are out of date
        self.idle_since_ns = now_ns
        self.alarm_ns = NEVER_NS
        self.sweep_ns = 0  # the time that the current sweep has taken so far
        self.swept_until_ns = 0  # no new sweep before this time
        self.is_background = False  # set by its processor: its slices do not count in `Scheduler.busy_ns`
        self.served_ns = 0  # figures for operators
        self.elsewhere_ns = 0
        self.bytes_served = 0
        self.slices = 0

    @property
    def may_run(self) -> bool:
        """Whether the actor has a request to handle or to expire."""
        mailbox = self.mailbox
        if self.suspensions or not (mailbox.arrived or (mailbox.is_woken and mailbox.waiting)):
            return bool(mailbox.overdue)
        return True

    def suspend(self) -> None:
        """Handle no further request until `Scheduler.resume` was called as often."""
        self.suspensions += 1

    def lift(self) -> None:
        invariant(self.suspensions > 0, "an actor is resumed no more often than it was suspended")
        self.suspensions -= 1

    def charge(self, *, elapsed_ns: int = 0, size_bytes: int = 0) -> None:
        """Account for work done elsewhere for the actor, when that work ends, and for the bytes of a response.

        Takes effect before the actor's next slice.
        """
        self.owed_ns += elapsed_ns + size_bytes * self.byte_cost_ns
        self.elsewhere_ns += elapsed_ns
        self.bytes_served += size_bytes
