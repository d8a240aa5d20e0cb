"""Fair actors: every consumer group gets its share of the broker's time, however many consumers it has.

One actor per key, such as (subject, group). All requests of a group, whatever their kind, go into its actor's mailbox;
the scheduler gives ready actors short slices, always to the one that has had least so far. So a group with a hundred
consumers gets no more than a group with two, and a group whose requests are slow (because they read cold data) is held
back by its own slowness: that is the whole of the rate limiting.

    processor    the port: what a request is, and who handles it
    mailbox      a bounded queue of requests, and beside it those that wait for something to come
    actor        a mailbox, its account of time, and whether it may run
    account      what one connection has used
    order        who is next: by virtual time, or by arrival for comparison
    alarms       when an actor must be looked at although nothing has happened
    scheduler    turns and slices, expiry, refusal, removal

Blind to storage and protocol. Everything runs on one loop's thread.
"""

from fairway.scheduling.account import Account
from fairway.scheduling.actor import Actor
from fairway.scheduling.order import Arrival, RunOrder, VirtualTime
from fairway.scheduling.processor import Expiry, Processor, Request, TurnResult
from fairway.scheduling.scheduler import Loop, Scheduler, SchedulerCounters, SchedulerOptions

__all__ = [
    "Account",
    "Actor",
    "Arrival",
    "Expiry",
    "Loop",
    "Processor",
    "Request",
    "RunOrder",
    "Scheduler",
    "SchedulerCounters",
    "SchedulerOptions",
    "TurnResult",
    "VirtualTime",
]
