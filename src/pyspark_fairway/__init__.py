"""Makes `format("fairway")` known to Spark, which imports every installed package `pyspark_*` and takes its
`DefaultSource`.

If Fairway cannot be imported (the extra is not installed, or pyspark is too old), `unusable` provides a source that
gives the reason when used. Without it Spark reports "Failed to find the data source", and the reason is lost. An error
raised while Spark looks for sources would disable every other source too.
"""

from __future__ import annotations

import sys
from typing import Any


def unusable(name: str, error: Exception) -> dict[str, Any]:
    """The globals for a `pyspark_*` package: a source of that name that cannot be used. Empty without pyspark, or with
    a pyspark without Python data sources: then nobody looks for the source."""
    try:
        from pyspark.sql.datasource import DataSource
    except ImportError:
        return {}
    reason = (
        f'format("{name}") cannot be used in {sys.executable}: {error}. It needs pip install "fairway[spark]" there '
        "(pyspark 4.2 or later), where the driver runs and where the executors run; PYSPARK_PYTHON says which Python "
        "Spark takes"
    )

    class Unusable(DataSource):
        """A source that raises the reason when used."""

        def __init__(self, options: dict[str, str]) -> None:
            raise RuntimeError(reason)

        @classmethod
        def name(cls) -> str:
            return name

    return {"DefaultSource": Unusable}


try:
    from fairway.spark.source import FairwaySource as DefaultSource  # noqa: F401
except (ImportError, ValueError) as error:  # ValueError: what `fairway.spark` raises where something is missing
    globals().update(unusable("fairway", error))
