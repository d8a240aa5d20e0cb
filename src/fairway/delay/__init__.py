"""Delay server: holds a message until its due time, then produces it to a broker.

    engine             all data of a delay server, without a network; its options
    engine_part        what the larger parts of an engine share
    pending_messages   cancel, reschedule, list and count pending messages
    maintenance        frees rows that are finished; splits, deletes and checkpoints every minute
    recovery           from a start, or a change of masters, to normal work
    requests           answers the requests of clients; the history of delayed messages, from both logs; metrics
    service            a delay server without a port of its own, as it runs in `fairway up`
    server             a delay server with a port of its own, alone or as one copy of several
    replica            a replica's rows and buckets, made from its master's logs, so that it can lead at any time
    snapshot           the master takes and sends a snapshot; the replica fetches and checks it
    install            puts a received snapshot in place of the old files

    schedule           the schedule log: delayed messages on disk, in buckets by due time, and their rows in memory
    dispatch           from due messages to brokers: intents, the dispatch log, the sender

A delayed message travels through the package as follows. `requests` passes the batch to `engine`, which appends the
batch to the message log and answers once the log is synced. The appender of `schedule` writes the message into the
bucket of its due time and adds an index row. The sweeper puts the row on the timing wheel when its hour comes near.
When the row is due, the dispatcher adds the message to an intent and appends the intent to the dispatch log. Once the
intent is synced, the sender produces the batch to a broker group, and the broker's receipt becomes a SENT event.

The subject's number and the message's sequence in the delay server's own message log name a message for ever. A message
changes its bucket when the bucket is split; its name stays.

A replica follows the logs of its master (`fairway.replication`). If the logs no longer go back far enough, the replica
fetches a snapshot from its master. The copy then closes its server, `install` moves the files into place, and the copy
opens a new server on them.
"""
