"""Jobs over the log: `fairway pipeline …`. Each is a function of a SparkSession and options, and a program for
`spark-submit`.

The commands:

    archive            writes subjects to Parquet, exactly once, and joins small files
    replay             sends messages again, to a subject or to one group
    trace              shows what became of messages, by group
    reconcile          compares what was sent, stored, archived, delivered and acked
    repetition         shows how often keys repeat, and what coalescing saves
    report             shows shares of the broker's time, lag, throughput, and delayed messages

What several jobs use:

    job                errors, shuffle sizes, progress, options, the session, exit statuses
    selection          which messages a job is about: from an archive or the live log, by time, key, tag or SQL
    message_lifecycle  one row for each message and group, from messages and events
    server_status      what brokers and delay servers say: subjects, groups, inboxes, and what they count themselves
    capacity           figures that servers give when asked, and those of their `/metrics`
    page               a report as one HTML file
    plots              plots as SVG, and how quantities are written
    markup             HTML and SVG with all text escaped

The archive:

    manifest           commits: which ranges and files an archive consists of
    archive_log        reads and stages rows, loads and makes commits, and repairs what killed runs left
    files              files on local disks, HDFS and object stores

The reconciliation:

    reconcile_options  options and result
    reconciliation     one run, and the messages it covers
    producer_records   business rows, and what outboxes and spools still hold, compared with the log
    audit              compares an archive with the log; finds holes
    findings           what is wrong, and the remedies
    balances           sums per subject, group and window

    report_page        the HTML page of a report

A new job is a module with its options, a function and a `command`; `fairway.cli.pipeline` names it.
`docs/how-to/spark-jobs.md` is for users.
"""
