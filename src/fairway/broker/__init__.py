"""The broker: sessions in front, the store behind, fair actors between them.

    server      start, stop, and what all the parts share
    session     one connection: frames in, answers out, bounded both ways
    requests    what a session puts into an actor's mailbox
    produce     a batch to the log
    groups      the consumer groups of this broker: their laws, their events in the action log, their timers
    consuming   join, heartbeat, leave, and the table of what consumers ask
    pulling     a range is decided, read and handed out; settling: what became of it
    desk        where decisions of the law become facts
    consumer_sessions  which connection acts for a consumer; parking: pulls of consumers that are paused
    inbox       what only one group is to get, drained beside the subject; inbox_produce: what is sent there
    dead_letter what has had its last attempt; redrive: the way back, through the inbox
    copies      how both know what was copied already; errands: the broker's own work, in an actor's mailbox
    housekeeping  groups that nobody uses go, and what retention may take
    steering    seek, configure, pause, weight, read-only; switches: groups that are off on all brokers
    scan        reading without a group
    describe    what there is, for people
    member      the life of one copy of several (`fairway.replication`); standing: what it may answer meanwhile;
                place: its node in the registry

The way of a message: `session` → `produce` → `storage` → (committed) → `groups` wakes the actors of the subject →
`consuming` decides a range, reads it and answers → `session`.
"""
