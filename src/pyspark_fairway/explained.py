"""What Spark finds where Fairway cannot be imported: a source that says why.

Without it Spark says "Failed to find the data source", and the reason is lost. An error that is raised while Spark
looks for sources would take every other source with it.
"""

from __future__ import annotations

import sys
from typing import Any


def sources(name: str, error: Exception) -> dict[str, Any]:
    """What the module is to have: a source of that name which nobody can use. Without pyspark, or with one that has no
    sources in Python, nothing: then nobody looks for it."""
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
        """Says why."""

        def __init__(self, options: dict[str, str]) -> None:
            raise RuntimeError(reason)

        @classmethod
        def name(cls) -> str:
            return name

    return {"DefaultSource": Unusable}
