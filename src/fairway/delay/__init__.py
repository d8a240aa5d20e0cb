"""The delay server: holds a message until it is due, then produces it to a broker.

    buckets         which stretch of time a due time belongs to, and when a stretch is split          (pure)
    letters         messages of several batches as the columns of one
    piece           the record of a bucket: messages of one subject, with their names and due times
    bucket_file     one bucket on disk
    manifest        which buckets there are
    schedule_log    all buckets: the truth about what is to be delivered
    rows            an index row per message, as arrays
    wheel           the rows that are due soon, in the order of their times                            (pure)
    timekeeper      what time it is, whatever the wall clock does                                      (pure)
    dispatch_log    intents, what was sent, cancelled and rescheduled: the serial point
    ledger          what it says of messages that are not loaded yet
    moving          from the message log into buckets
    loader          buckets into rows, rows into the wheel; in exactly one of each
    dispatching     from due rows to intents
    recovering      from a start to where an earlier life ended
    splitting       a bucket into finer ones
    housekeeping    what is done every minute
    pending         cancel, reschedule, list, count, histogram
    engine          all of it together, without a network

A message is named by its subject's number and its sequence in the delay server's own message log, for ever: its bucket
changes when one is split, its name does not.
"""
