"""Schedule log of a delay server: delayed messages on disk, in buckets by due time, and their index rows in memory.

    log             the schedule log: all buckets and the manifest; the cache of open bucket records
    manifest        which buckets there are, and which span of time each has; the calendar of spans
    bucket_file     one bucket on disk, and its catalogues
    bucket_record   the record of a bucket, and what can be salvaged of a damaged one
    batch_arrays    a batch as numpy columns, and a new batch from messages of several batches
    append          writes messages of the message log into buckets
    repair          repairs damaged records from the message log; the audit of `fairway verify`
    pending_rows    one row per message, as numpy columns; decisions about messages without a row
    wheel           the rows of the next one to two hours, in order of due time; every hour, rows onto the wheel

A durable batch goes from the message log through `append` into a bucket of `log`. `append` also adds the rows of its
messages. The sweeper of `wheel` puts the rows onto the wheel when their hour comes near. `fairway.delay.dispatch` takes
due rows off the wheel and reads their messages through the cache.
"""
