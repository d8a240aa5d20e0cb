"""Delay server: holds a message until its due time, then produces it to a broker.

    engine             all data of a delay server, without a network
    options            what an operator may set
    pending_messages   cancel, reschedule, list and count pending messages
    pending_queries    the part of the engine that answers clients about pending messages
    history            what happened to delayed messages, read from both logs
    maintenance        frees rows that are finished; splits, deletes and checkpoints every minute
    recovery           from a start, or a change of masters, to normal work
    requests           answers the requests of clients
    service            a delay server without a port of its own, as it runs in `fairway up`
    server             a delay server with a port of its own, alone or as one copy of several
    metrics            its metrics

    schedule           the schedule log: delayed messages on disk, in buckets by due time, and their rows in memory
    dispatch           from due messages to brokers: intents, the dispatch log, the sender
    replica            one copy of several: follow a master, take over, install a snapshot

A delayed message travels through the package as follows. `requests` passes the batch to `engine`, which appends the
batch to the message log and answers once the log is synced. The appender of `schedule` writes the message into the
bucket of its due time and adds an index row. The loader puts the row on the timing wheel when its hour comes near. When
the row is due, the dispatcher adds the message to an intent and appends the intent to the dispatch log. Once the intent
is synced, the sender produces the batch to a broker group, and the broker's receipt becomes a SENT event.

The subject's number and the message's sequence in the delay server's own message log name a message for ever. A message
changes its bucket when the bucket is split; its name stays.
"""
