"""Fair scheduling: every consumer group gets its share of the broker's time, however many consumers it has.

Each key, such as a group, has one actor. All requests of a group, of any kind, go into its actor's mailbox. The
scheduler gives ready actors short slices, always to the actor that has used the least time so far. So a group with 100
consumers gets no more time than a group with two. Slow requests, such as reads of cold data, slow down only their own
group: no other rate limit is needed.

    actor         what a request and a processor are; an actor with its mailbox; the account of a connection
    virtual_time  which actor is next
    scheduler     turns and slices, timers, expiry, refusal, removal of actors

`Scheduler.dispatch` puts a request into a mailbox. In a turn of the loop the scheduler picks an actor, and the
request's processor handles the request. `process` returns a `TurnResult`; a request that cannot be handled in time ends
with an `Expiry`.

The package knows nothing of storage or protocol. Everything runs on one loop's thread.
"""

from fairway.scheduling.actor import Account, Actor, Expiry, Processor, Request, TurnResult
from fairway.scheduling.scheduler import Loop, Scheduler, SchedulerCounters, SchedulerOptions
from fairway.scheduling.virtual_time import VirtualTime

__all__ = [
    "Account",
    "Actor",
    "Expiry",
    "Loop",
    "Processor",
    "Request",
    "Scheduler",
    "SchedulerCounters",
    "SchedulerOptions",
    "TurnResult",
    "VirtualTime",
]
