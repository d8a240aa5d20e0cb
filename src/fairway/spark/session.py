"""A SparkSession with the settings that matter to Fairway. Any other session works too, some of it slower."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from fairway.spark.filters import IS_PUSHED_BY_SCAN
from fairway.world import host

# Arrow in Java checks bounds and nulls each time it reads a value, a third of what a row costs on Spark's side. What
# it reads here was made by Arrow, too. These come before an operator's `extraJavaOptions`, and do not replace them.
_UNCHECKED = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"

# Each can be overridden. What is already running is not changed: Spark takes most of these only at its start.
SETTINGS: dict[str, str] = {
    "spark.driver.defaultJavaOptions": _UNCHECKED,
    "spark.executor.defaultJavaOptions": _UNCHECKED,
    "spark.sql.python.filterPushdown.enabled": str(IS_PUSHED_BY_SCAN).lower(),  # see `filters`
    "spark.python.unix.domain.socket.enabled": "true",  # a task costs 25 ms in place of 55
    "spark.sql.session.timeZone": "UTC",  # what is in the log is in UTC
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",  # rows to the sink: as many as a batch holds
}


def session(
    app_name: str = "fairway", master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Make a SparkSession, or get the one that there is.

    `master` is where it runs (`local[*]`, `spark://host:7077`); None leaves that to `spark-submit`.
    """
    host.suggest("PYSPARK_PYTHON", sys.executable)  # else Spark takes whichever python3 comes first on the path
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in {**SETTINGS, **(settings or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
