"""Makes `format("fairway")` known to Spark, which imports every installed package `pyspark_*` and takes its
`DefaultSource`.

If Fairway cannot be imported (the extra is not installed, or pyspark is too old), `explained` provides a source that
gives the reason when used.
"""

try:
    from fairway.spark.source import FairwaySource as DefaultSource  # noqa: F401
except (ImportError, ValueError) as error:  # ValueError: what `fairway.spark` raises where something is missing
    from pyspark_fairway import explained

    globals().update(explained.sources("fairway", error))
