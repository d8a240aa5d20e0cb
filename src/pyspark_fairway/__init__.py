"""Spark imports every installed package called `pyspark_*` and takes its `DefaultSource`: this is how
`format("fairway")` is found by itself. Where Fairway cannot be imported (the extra is not installed, pyspark is too
old) a source of that name says so when it is used: `explained`."""

try:
    from fairway.spark.source import FairwaySource as DefaultSource  # noqa: F401
except (ImportError, ValueError) as error:  # ValueError: what `fairway.spark` raises where something is missing
    from pyspark_fairway import explained

    globals().update(explained.sources("fairway", error))
