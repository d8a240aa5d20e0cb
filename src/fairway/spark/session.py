"""Makes a SparkSession with the settings that matter to Fairway; checks pyspark, and quiets its workers.

`check_version` refuses a pyspark that is too old, before any of its newer modules is imported.

`end_quietly` concerns Spark's Python workers. Spark closes the connection to a worker that has been idle for a minute,
and to a worker whose rows it no longer needs (a `limit`). The worker then fails to report its end. Over a Unix socket
the write fails, and pyspark's daemon prints a traceback (BrokenPipeError) among the output of a successful query. Over
TCP the write is lost silently.

`session` makes the SparkSession. Any other session works too, with some operations slower.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader

from fairway.errors import Misuse
from fairway.runtime import host

LEAST: Final = (4, 2)  # the first that limits a micro-batch, and tells a sink its query and micro-batch


def check_version(version: str) -> None:
    """Raise `Misuse` if the version is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < LEAST:
        raise Misuse(
            f"fairway.spark needs pyspark {'.'.join(map(str, LEAST))} or later, and this is {version}: "
            "pip install --upgrade 'fairway[spark]', where the driver runs and where the executors run"
        )


_DAEMON: Final = "pyspark.daemon"


class _Traces:
    """The module `traceback` for pyspark's daemon, without tracebacks of connections that Spark has closed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            traceback.print_exc()


def end_quietly() -> None:
    """In a worker: end silently when Spark has closed the connection. Elsewhere this does nothing."""
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", None) == _DAEMON:
        vars(main)["traceback"] = _Traces()


# The version of Spark that lets a reader take limits (SPARK-58551) plans each scan by itself, filters included.
IS_PUSHED_BY_SCAN: Final = hasattr(DataSourceReader, "pushLimit")

# Arrow in Java checks bounds and nulls each time it reads a value: a third of the cost of a row on Spark's side. The
# data read here was written by Arrow, too. An operator's `extraJavaOptions` come after these options, and add to them.
_UNCHECKED = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
# The caller can override each. A running session does not change: Spark takes most of these only at its start.
SETTINGS: dict[str, str] = {
    "spark.driver.defaultJavaOptions": _UNCHECKED,
    "spark.executor.defaultJavaOptions": _UNCHECKED,
    "spark.sql.python.filterPushdown.enabled": str(IS_PUSHED_BY_SCAN).lower(),  # see `source`
    "spark.python.unix.domain.socket.enabled": "true",  # a task costs 25 ms instead of 55
    "spark.sql.session.timeZone": "UTC",  # times in the log are in UTC
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",  # rows to the sink: as many as a batch holds
}


def session(
    app_name: str = "fairway", master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Make a SparkSession, or get the existing one.

    `master` is where Spark runs (`local[*]`, `spark://host:7077`); None leaves that to `spark-submit`.
    """
    host.suggest("PYSPARK_PYTHON", sys.executable)  # else Spark takes the first python3 on the path
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in {**SETTINGS, **(settings or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
