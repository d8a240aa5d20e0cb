"""The same as `pyspark_fairway`, for `format("fairway.delayed")`: Spark takes one source of each such package."""

try:
    from fairway.spark.delayed import DelayedSource as DefaultSource  # noqa: F401
except (ImportError, ValueError) as error:  # ValueError: what `fairway.spark` raises where something is missing
    from pyspark_fairway import explained

    globals().update(explained.sources("fairway.delayed", error))
