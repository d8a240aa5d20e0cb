"""Fairway's log as a Spark source and sink, in Python alone: `spark.read.format("fairway")`, `writeStream`, no jar.

    session     a SparkSession with the settings that matter
    source      what Spark finds under the name "fairway" (by way of the package `pyspark_fairway`)
    options     every option, parsed once       schema     the columns
    looking     what the driver asks: subjects, places      brokers    and of one broker group: progress, too
    places      where broker groups are     calling    the one conversation with a server
    splits      ranges of sequences into tasks  reading    a task: scans into Arrow        frames    its record batches
    stream      micro-batches and their offsets
    sink        rows into batches (encoding), each of which can be stored once only: sending, and pinning, to whom
    events      "fairway.events", the life of messages: event_log reads it, event_frames makes rows of it
    delayed     "fairway.delayed", what is pending at a delay server
    version     which pyspark it needs          worker     how a Python worker ends

`docs/spark.md` is for users.
"""

from fairway.errors import Misuse

try:
    import pyarrow  # noqa: F401
    import pyspark
except ImportError as error:
    raise Misuse(f"fairway.spark needs {error.name}: pip install 'fairway[spark]'") from error

from fairway.spark.version import check_version

check_version(pyspark.__version__)  # before anything is imported that an older one does not have

from fairway.spark.session import session  # noqa: E402
from fairway.spark.worker import end_quietly  # noqa: E402

__all__ = ["session"]

end_quietly()
