"""Spark imports every installed package called `pyspark_*` and takes its `DefaultSource`: this is how
`format("fairway")` is found by itself. Where the extra is not installed there is nothing to find, and no error: one
that is raised here would take every other source with it."""

try:
    from fairway.spark.source import FairwaySource as DefaultSource
except (ImportError, ValueError):  # ValueError: what `fairway.spark` raises where pyspark or pyarrow is missing
    __all__: list[str] = []
else:
    __all__ = ["DefaultSource"]
