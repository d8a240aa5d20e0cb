"""The delay server: holds a message until it is due, then produces it to a broker.

    buckets         which stretch of time a due time belongs to, and when a stretch is split          (pure)
    letters         messages of several batches as the columns of one
    piece           the record of a bucket: messages of one subject, with their names and due times
    catalogue       what pieces say without their contents, so that a start need not read them
    bucket_file     one bucket on disk
    manifest        which buckets there are
    schedule_log    all buckets: the truth about what is to be delivered
    shelf           pieces that are open; what is not is fetched off the loop
    rows            an index row per message, as arrays
    wheel           the rows that are due soon, in the order of their times                            (pure)
    dispatch_log    intents, what was sent, cancelled and rescheduled: the serial point
    ledger          what it says of messages that are not loaded yet
    moving          from the message log into buckets
    loader          buckets into rows, rows into the wheel; in exactly one of each
    dispatching     from due rows to intents
    forgetting      when a row that is done with is freed, and what is left of it
    recovering      from a start to where an earlier life ended
    splitting       a bucket into finer ones
    housekeeping    what is done every minute
    pending         cancel, reschedule, list, count, histogram
    browsing        pages and counts of what is pending, step by step
    history         what happened, from both logs, as far as they go back
    engine          all of it together, without a network
    carrier         intents of many streams on one line to a broker group                              (pure)
    courier         a line to each broker group, and which subject goes where
    wayfinding      in a cluster: which broker groups take a subject and where they are, as meta servers say
    clockwork       calls the engine when its time has come
    desk            takes delayed messages and questions from a server's sessions
    metrics         its figures
    service         a delay server without a port: behind the broker's in `fairway up`
    server          the same with a port of its own
    member          the same as one copy of several

A message is named by its subject's number and its sequence in the delay server's own message log, for ever: its bucket
changes when one is split, its name does not.
"""
