"""Makes `format("fairway.delayed")` known to Spark, as `pyspark_fairway` does for "fairway": one package a source."""

try:
    from fairway.spark.delayed import DelayedSource as DefaultSource  # noqa: F401
except (ImportError, ValueError) as error:  # ValueError: what `fairway.spark` raises where something is missing
    from pyspark_fairway import unusable

    globals().update(unusable("fairway.delayed", error))
