"""How many tasks a job's shuffles have.

Spark makes 200 of every shuffle, whatever its size. What is kept or checkpointed has as many parts, and a union adds
them up: reconciling 20,000 messages ran stages of 200, 403 and 809 tasks, nearly all of them empty. A job knows how
many messages it looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

SETTING: Final = "spark.sql.shuffle.partitions"
PARTITIONS_MAX: Final = 200  # Spark's own: whoever has more to do says so
TASK_MESSAGES: Final = 50_000  # of a task: some ten MB of what is known of a message


def partitions(messages: int, cores: int) -> int:
    """For so many messages. No fewer than there are cores, unless messages are few."""
    wanted = -(-messages // TASK_MESSAGES)
    return max(min(max(wanted, cores if messages > TASK_MESSAGES else 1), PARTITIONS_MAX), 1)


@contextmanager
def sized(spark: SparkSession, messages: int) -> Iterator[None]:
    """Shuffles for so many messages, unless the user has set how many parts they have."""
    if SETTING in spark.conf.getAll:
        yield
        return
    spark.conf.set(SETTING, str(partitions(messages, spark.sparkContext.defaultParallelism)))
    try:
        yield
    finally:
        spark.conf.unset(SETTING)
