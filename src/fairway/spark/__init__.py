"""Fairway's log as a Spark source and sink, in Python alone: `spark.read.format("fairway")`, `writeStream`, no jar.

    session           makes a SparkSession with the settings that matter; checks the version of pyspark
    source            the data source "fairway", which Spark finds through the package `pyspark_fairway`
    options           every option of the source, of events and of the sink, parsed once
    server_groups     where broker groups are: by address, or known to meta servers
    connection        one blocking conversation with a server: requests, resends, lost connections
    plan              a driver's questions to broker groups: subjects, positions, sizes, waiting, a query's progress
    reader            cuts ranges of sequences into tasks; reads a task's ranges with scans
    frames            makes Arrow record batches of stored batches; the columns of a message
    stream            the reader of a streaming query, and its offsets
    sink              makes batches of rows, each of which a broker stores once only, and finds the group for them
    encode            makes the bytes of a batch, and message ids, from Arrow columns
    delayed           the data source "fairway.delayed": messages that are pending at a delay server
    events            the data source "fairway.events": what happened to messages
    jobs              the commands of `fairway pipeline`

A read: `source` asks `plan` for the extents of the subjects, `reader.cut` makes tasks of them, and each task scans its
ranges over a `connection` and turns them into `frames`. A write: each task makes batches of its rows with `encode`, and
sends them in `sink`.

`docs/how-to/spark.md` is for users.
"""

from fairway.errors import Misuse

try:
    import pyarrow  # noqa: F401
    import pyspark
except ImportError as error:
    raise Misuse(f"fairway.spark needs {error.name}: pip install 'fairway[spark]'") from error

from fairway.spark.session import check_version

check_version(pyspark.__version__)  # before any import that an older pyspark cannot satisfy

from fairway.spark.session import end_quietly, session  # noqa: E402

__all__ = ["session"]

end_quietly()
