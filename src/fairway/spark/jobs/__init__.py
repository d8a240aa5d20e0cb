"""Jobs over the log: `fairway pipeline …`. Each is a function that takes a SparkSession and its options, and a program
for `spark-submit`.

    archive      subjects to Parquet, exactly once       repetition   how often keys repeat, and what coalescing saves
    replay       messages once more, to a subject        report       shares of the broker's time, lag, what is due
    trace        what became of messages, by group
    reconcile    do the books balance? It names the modules that it is made of

    lives        one row for each message and group, from messages and events       standing   where a broker stands
    picking      which messages a job is about: from an archive or from the live log, by time, key, tag or SQL
    manifest     what an archive consists of: commits, folded into ranges and files        ledger   the same, on a disk
    compacting   small files into large ones
    files        wherever Spark can read and write: local disks, HDFS, object stores        disks   two ways there
    capacity     what servers say of themselves          flow         messages over time, from events
    page         a report as one HTML file: plots, their scales, and markup that is escaped
    program      what the commands share: options, session, exit status
    watching     progress        failing   errors        capping   a rate that is never exceeded
    shuffle      as many tasks as there is to do

A new job is a module with its options, a function and a `command`; `fairway.cli.pipeline` names it. `docs/pipeline.md`
is for users.
"""
